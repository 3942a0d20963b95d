"""Transports: every collective gives what it promises, whatever its size, in whatever order it is waited for."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hvd_slim as hvd
from hvd_slim.stats import Stats
from hvd_slim.transport.base import MESSAGE_LIMIT, Pending, Transport
from hvd_slim.transport.horovod import HorovodTransport
from hvd_slim.transport.mpi import MpiTransport, MpiTransportError
from hvd_slim.watchdog import StalledError

K, RANK = hvd.size(), hvd.rank()

needs_mpi = pytest.mark.skipif(not hvd.mpi_enabled(), reason="launched with Gloo: there is no MPI")
needs_others = pytest.mark.skipif(K < 2, reason="one rank: nobody to wait for")
kinds = pytest.mark.parametrize("kind", ["horovod", pytest.param("mpi", marks=needs_mpi)])

PHASES = ("core", "dense", "explorer", "select", "resync")  # of two allreduces, allgather, broadcast, alltoall

_numbers = itertools.count()


def make(kind: str, limit: int = MESSAGE_LIMIT, process_set: Any = None) -> Transport:
    """A new transport of that kind; collective."""
    build = {"horovod": HorovodTransport, "mpi": MpiTransport}[kind]
    return build(f"test.{kind}.{next(_numbers)}", process_set, Stats(), limit)


class Messages:
    """Random inputs of every rank, known to all: sizes shared, contents each rank's own. Sizes of 0 are frequent."""

    def __init__(self, seed: int, size: int = K, most: int = 3_000) -> None:
        shared = np.random.default_rng(seed)
        self.size = size
        length = int(shared.choice([0, 1, 7, most])) if shared.random() < 0.5 else int(shared.integers(most))
        self.root = int(shared.integers(size))
        of_rank = [np.random.default_rng([seed, rank]) for rank in range(size)]
        self.floats = [rng.normal(size=length) for rng in of_rank]
        self.bytes = [torch.from_numpy(rng.integers(256, size=length, dtype=np.uint8)) for rng in of_rank]
        self.counts = shared.integers(most // size, size=(size, size)) * (shared.random((size, size)) < 0.7)
        self.counts = self.counts * (shared.random() < 0.9)
        self.messages = [
            [torch.from_numpy(rng.integers(256, size=count, dtype=np.uint8)) for count in counts]
            for rng, counts in zip(of_rank, self.counts)
        ]

    def launch(self, transport: Transport, phases: Sequence[str] = PHASES) -> dict[str, Pending[Any]]:
        """The collectives of these phases, all in flight. Collective."""
        rank = transport.rank
        counts, most = self.counts[rank].tolist(), int(self.counts.sum(1).max())
        launches: dict[str, Callable[[], Pending[Any]]] = {
            "core": lambda: transport.allreduce(torch.from_numpy(self.floats[rank]).float(), "core"),
            "dense": lambda: transport.allreduce(torch.from_numpy(self.floats[rank]).clone(), "dense"),
            "explorer": lambda: transport.allgather(self.bytes[rank].clone(), "explorer"),
            "select": lambda: transport.broadcast(self.bytes[rank].clone(), self.root, "select"),
            "resync": lambda: transport.alltoall(torch.cat(self.messages[rank]), counts, most, "resync"),
        }
        return {phase: launches[phase]() for phase in phases}

    def check(self, phase: str, result: Any, rank: int) -> None:
        """The result of the collective launched under ``phase``."""
        if phase in ("core", "dense"):
            exact, magnitude = sum(self.floats), sum(np.abs(floats) for floats in self.floats)
            rounding = self.size * torch.finfo(result.dtype).eps * magnitude
            assert result.dtype == {"core": torch.float32, "dense": torch.float64}[phase]
            assert (np.abs(result.numpy() - exact) <= rounding).all()
        elif phase == "explorer":
            assert torch.equal(result, torch.stack(self.bytes))
        elif phase == "select":
            assert torch.equal(result, self.bytes[self.root])
        else:
            received, counts = result
            assert counts == self.counts[:, rank].tolist()
            assert torch.equal(received, torch.cat([messages[rank] for messages in self.messages]))


def bits(result: Any) -> bytes:
    """All that a collective gave."""
    tensor, counts = result if isinstance(result, tuple) else (result, [])
    return bytes(tensor.numpy().tobytes()) + repr(counts).encode()


# What holds for both --------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("limit", [MESSAGE_LIMIT, 1024, 40 * K])
def test_collectives(kind: str, limit: int) -> None:
    """All five, all in flight at once, waited for in an order that each rank chooses."""
    transport = make(kind, limit)
    for seed in range(12):
        messages = Messages(seed)
        pending = messages.launch(transport)
        for phase in np.random.default_rng([seed, RANK]).permutation(list(pending)):
            messages.check(phase, pending[phase].wait(), RANK)
    transport.close()


@kinds
def test_large_collectives(kind: str) -> None:
    """Where transports and MPI libraries change their algorithms."""
    transport = make(kind)
    for seed, most in enumerate((16_383, 16_384, 16_385, 100_003, 1_000_000)):
        messages = Messages(seed, most=most)
        for phase, pending in messages.launch(transport).items():
            messages.check(phase, pending.wait(), RANK)
    transport.close()


@kinds
def test_allreduce_and_broadcast_write_into_the_tensor(kind: str) -> None:
    transport = make(kind)
    for length in (0, 5, 50_000):
        summed, sent = torch.full((length,), float(RANK)), torch.full((length,), RANK, dtype=torch.uint8)
        assert transport.allreduce(summed, "core").wait() is summed
        assert transport.broadcast(sent, K - 1, "select").wait() is sent
        assert torch.equal(summed, torch.full((length,), K * (K - 1) / 2))
        assert torch.equal(sent, torch.full((length,), K - 1, dtype=torch.uint8))
    transport.close()


@kinds
def test_tensors_may_be_forgotten_while_in_flight(kind: str) -> None:
    transport = make(kind)
    pending = [transport.allreduce(torch.full((30_000 + i,), 1.0), phase) for i, phase in enumerate(("core", "dense"))]
    gc.collect()
    noise = [torch.full((30_000,), float("nan")) for _ in range(20)]
    assert all((each.wait() == K).all() for each in pending)
    assert len(noise) == 20
    transport.close()


@kinds
def test_limit_cuts_without_changing_results(kind: str) -> None:
    """CASES 27. The same bits as uncut, except for the order of an addition, and no collective above the limit."""
    limit = 1024
    whole, cut = make(kind), make(kind, limit)
    carried: list[tuple[str, int, int]] = []
    for primitive in ("_allreduce", "_allgather", "_broadcast", "_alltoall"):
        record_bytes(cut, primitive, carried)
    for seed in range(8):
        messages = Messages(seed)
        expected, pending = messages.launch(whole), messages.launch(cut)
        for phase in pending:
            result, uncut = pending[phase].wait(), expected[phase].wait()
            messages.check(phase, result, RANK)
            if phase not in ("core", "dense"):
                assert bits(result) == bits(uncut)
    totals: dict[int, int] = {}
    of_ranks = [text.split() for text in whole.gather_texts(" ".join(str(here) for _, _, here in carried))]
    for here in of_ranks:
        assert len(here) == len(carried)
        for number, count in enumerate(here):
            totals[number] = totals.get(number, 0) + int(count)
    assert len(totals) > 100
    for (primitive, number, _), total in zip(carried, totals.values()):
        # Each of the K² messages of an alltoall is cut at whole bytes.
        assert total <= limit + (K * K if primitive == "_alltoall" else 0), f"{primitive} number {number}"
    whole.close()
    cut.close()


def record_bytes(transport: Transport, primitive: str, carried: list[tuple[str, int, int]]) -> None:
    """Append (primitive, number, bytes from this rank) to ``carried`` at every call."""
    original = getattr(transport, primitive)

    def recorded(tensor: torch.Tensor, *rest: Any) -> Any:
        carried.append((primitive, len(carried), tensor.nbytes))
        return original(tensor, *rest)

    setattr(transport, primitive, recorded)


@kinds
@pytest.mark.parametrize("limit", [MESSAGE_LIMIT, 1024])
def test_bytes_counted(kind: str, limit: int) -> None:
    """As documented: 2(K−1)/K, K−1 and (K−1)/K of the bytes; for alltoall what goes to and comes from others."""
    for seed in range(6):
        transport, messages = make(kind, limit), Messages(seed)
        for pending in messages.launch(transport).values():
            pending.wait()
        length, counts = len(messages.floats[0]), messages.counts
        sent = {
            "core": 2 * (K - 1) / K * length * 4,
            "dense": 2 * (K - 1) / K * length * 8,
            "explorer": (K - 1) * length,
            "select": (K - 1) / K * length,
            "resync": counts[RANK].sum() - counts[RANK, RANK],
        }
        received = {**sent, "resync": counts[:, RANK].sum() - counts[RANK, RANK]}
        for phase in sent:
            assert transport.stats.bytes_sent[phase] == pytest.approx(sent[phase])
            assert transport.stats.bytes_received[phase] == pytest.approx(received[phase])
            assert transport.stats.collectives[phase] == 1
        transport.close()


@kinds
def test_texts(kind: str) -> None:
    transport = make(kind)
    texts = ["é" * rank + f"rank {rank}\n" * (1 + 1000 * (rank % 2)) for rank in range(K)]
    assert transport.gather_texts(texts[RANK]) == texts
    transport.close()


@kinds
def test_two_transports_used_in_different_orders(kind: str) -> None:
    """CASES 7. Even ranks use one first, odd ranks the other: neither waits for the other."""
    transports = [make(kind), make(kind)]
    for seed in range(5):
        order = [0, 1] if (RANK + seed) % 2 else [1, 0]
        both = {i: Messages(2 * seed + i) for i in order}
        pending = {i: both[i].launch(transports[i]) for i in order}
        for i in order:
            for phase in pending[i]:
                both[i].check(phase, pending[i][phase].wait(), RANK)
    for transport in transports:
        transport.close()


@kinds
def test_process_set(kind: str) -> None:
    """Two sets at work side by side, roots counted within the set; a rank outside is alone and waits for nobody."""
    if K < 2:
        pytest.skip("one rank: no set but the global one")
    split = max(1, K - 2)
    members = [list(range(split)), list(range(split, K))]
    sets = [hvd.add_process_set(ranks) for ranks in members]
    transports = [make(kind, process_set=process_set) for process_set in sets]
    for ranks, transport in zip(members, transports):
        if RANK not in ranks:
            assert (transport.rank, transport.size) == (0, 1)
            continue
        assert (transport.rank, transport.size) == (ranks.index(RANK), len(ranks))
        for seed in range(5):
            messages = Messages(seed, size=len(ranks))
            for phase, pending in messages.launch(transport).items():
                messages.check(phase, pending.wait(), transport.rank)
    for transport in transports:
        transport.close()
    for process_set in sets:
        assert hvd.remove_process_set(process_set)


@needs_others
@kinds
def test_complete_nowhere_before_all_take_part(kind: str) -> None:
    """Not even at the root of a broadcast: a rank may end the job after its last collective."""
    transport, messages = make(kind), Messages(1, most=100)
    for phase, messages.root in itertools.product(PHASES, range(K)):
        time.sleep(0.1 if (messages.root + 1) % K == RANK else 0.0)
        launched = time.monotonic()
        messages.check(phase, messages.launch(transport, [phase])[phase].wait(), RANK)
        completed = time.monotonic()  # the same clock for all processes of a machine
        assert completed > max(float(text) for text in transport.gather_texts(repr(launched)))
    transport.close()


@needs_others
@kinds
def test_late_rank(kind: str) -> None:
    """A rank that comes too late for the others can still complete what it joins, and so can they in the end."""
    transport, signal = make(kind), make(kind)
    if RANK != 0:
        transport._watchdog.warn_after, transport._watchdog.stall_limit = 0.05, 0.2  # type: ignore[attr-defined]
        pending = transport.allreduce(torch.ones(3), "core")
        with pytest.raises(StalledError, match=f"rank {RANK}"):
            pending.wait()
        transport._watchdog.warn_after = transport._watchdog.stall_limit = 60.0  # type: ignore[attr-defined]
    signal.gather_texts("rank 0 may come")
    if RANK == 0:
        pending = transport.allreduce(torch.ones(3), "core")
    assert pending.wait().tolist() == [K] * 3
    for each in (transport, signal):
        each.close()


# Beside each other ----------------------------------------------------------------------------------------------------


@needs_mpi
def test_same_bits_through_horovod_and_mpi() -> None:
    """An allreduce differs by rounding only, and is the same on all ranks; everything else is equal to the bit."""
    horovod, mpi = make("horovod"), make("mpi")
    for seed in range(10):
        messages = Messages(seed, most=40_000)
        ours, theirs = messages.launch(mpi), messages.launch(horovod)
        for phase in ours:
            result, other = ours[phase].wait(), theirs[phase].wait()
            if phase in ("core", "dense"):
                scale = sum(np.abs(floats) for floats in messages.floats)
                rounding = 2 * K * torch.finfo(result.dtype).eps * scale
                assert (np.abs(result.double().numpy() - other.double().numpy()) <= rounding).all()
                assert len(set(mpi.gather_texts(bits(result).hex()))) == 1
            else:
                assert bits(result) == bits(other)
    horovod.close()
    mpi.close()


# The mpi transport's own ----------------------------------------------------------------------------------------------


@needs_mpi
def test_error_in_the_background_thread_reaches_every_wait() -> None:
    """CASES 6. MPI refuses a root that does not exist. That transport is of no use any more; another one is."""
    broken, sound = make("mpi"), make("mpi")
    before = broken.allreduce(torch.ones(3), "core")
    assert before.wait().tolist() == [K] * 3
    pending = [
        broken.broadcast(torch.zeros(3, dtype=torch.uint8), K + 7, "select"),
        broken.allreduce(torch.ones(3), "dense"),
    ]
    for each in (*pending, *pending, broken.allgather(torch.zeros(3, dtype=torch.uint8), "explorer")):
        with pytest.raises(MpiTransportError) as caught:
            each.wait()
        message = str(caught.value)
        assert message.startswith(f"rank {RANK}, ")
        assert "select: MPI_ERR_ROOT" in message
        assert "\n" not in message
        assert caught.value.__cause__ is not None
    with pytest.raises(MpiTransportError, match="MPI_ERR_ROOT"):
        broken.gather_texts("")
    assert before.wait().tolist() == [K] * 3
    assert sound.gather_texts(str(RANK)) == [str(rank) for rank in range(K)]
    broken.close()
    sound.close()


@needs_mpi
def test_allreduce_of_another_dtype_is_refused() -> None:
    transport = make("mpi")
    for dtype in (torch.bfloat16, torch.float16, torch.int32, torch.complex64):
        with pytest.raises(TypeError, match=str(dtype)):
            transport.allreduce(torch.ones(3).to(dtype), "core")
    transport.close()


def threads() -> list[threading.Thread]:
    """The running background threads."""
    return [thread for thread in threading.enumerate() if thread.name == "hvd_slim mpi"]


def processor_seconds(thread: threading.Thread) -> float:
    """That the thread has used so far."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@needs_mpi
def test_thread_does_not_busy_wait() -> None:
    """CASES 48. Idle it uses next to nothing; waiting for another rank, a small part of a processor."""
    others = set(threads())
    transport = make("mpi")
    assert set(threads()) == others  # started by the first collective
    transport.gather_texts("")
    (thread,) = set(threads()) - others
    begin = processor_seconds(thread)
    time.sleep(1.0)
    assert processor_seconds(thread) - begin < 0.01
    transport.gather_texts("")
    if RANK == 0:
        time.sleep(1.0)
    begin, began = processor_seconds(thread), time.monotonic()
    transport.allreduce(torch.ones(1), "core").wait()
    assert processor_seconds(thread) - begin < 0.05 + 0.2 * (time.monotonic() - began)
    transport.close()


@needs_mpi
def test_thread_ends_with_the_transport() -> None:
    others = set(threads())
    closed, forgotten = make("mpi"), make("mpi")
    for transport in (closed, forgotten):
        transport.gather_texts("")
    assert len(set(threads()) - others) == 2
    closed.close()
    assert len(set(threads()) - others) == 1
    with pytest.raises(MpiTransportError, match="closed"):
        closed.gather_texts("")
    closed.close()
    del forgotten, transport
    gc.collect()
    deadline = time.monotonic() + 60
    while set(threads()) - others and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threads()) - others


@needs_mpi
def test_close_waits_for_what_is_in_flight() -> None:
    transport = make("mpi")
    pending = [transport.allreduce(torch.ones(length), "core") for length in (3, 100_000)]
    transport.close()
    assert all((each.wait() == K).all() for each in pending)


@needs_mpi
def test_forked_process_is_refused() -> None:
    transport = make("mpi")
    transport.gather_texts("")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            transport.allreduce(torch.ones(3), "core")
        except MpiTransportError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert transport.gather_texts(str(RANK)) == [str(rank) for rank in range(K)]
    transport.close()


@needs_mpi
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: pinned copies are not tested")
def test_device_tensors() -> None:
    """Results lie on the device, in the order of its stream: what is launched need not be ready."""
    transport, messages = make("mpi"), Messages(3, most=100_000)
    floats = torch.from_numpy(messages.floats[RANK]).float().cuda()
    torch.cuda._sleep(50_000_000)
    floats.mul_(2)
    summed = transport.allreduce(floats, "core")
    gathered = transport.allgather(messages.bytes[RANK].cuda(), "explorer")
    received = transport.alltoall(
        torch.cat(messages.messages[RANK]).cuda(), messages.counts[RANK].tolist(), int(messages.counts.sum()), "resync"
    )
    assert summed.wait() is floats
    messages.check("core", (floats / 2).cpu(), RANK)
    assert gathered.wait().is_cuda
    messages.check("explorer", gathered.wait().cpu(), RANK)
    tensor, counts = received.wait()
    messages.check("resync", (tensor.cpu(), counts), RANK)
    transport.close()


# When there is no MPI to use ------------------------------------------------------------------------------------------


def without_mpi4py(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setitem(sys.modules, "mpi4py", None)


def with_another_library(patch: pytest.MonkeyPatch, folder: Path) -> None:
    module = folder / "MPI.so"
    module.write_bytes(b"\x7fELF\0libc.so.6\0libmpi.so.12345\0")
    patch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=str(module)))


def without_threads(patch: pytest.MonkeyPatch, folder: Path) -> None:
    from mpi4py import MPI

    patch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)


def without_mpi_in_horovod(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(sys.modules["horovod.torch"], "mpi_built", lambda: False)


def after_the_end(patch: pytest.MonkeyPatch, folder: Path) -> None:
    from mpi4py import MPI

    patch.setattr(MPI, "Is_finalized", lambda: True)


@needs_mpi
@pytest.mark.parametrize(
    ("spoil", "remedy"),
    [
        (without_mpi4py, "pip install mpi4py"),
        (with_another_library, "--no-binary mpi4py"),
        (without_threads, "HOROVOD_MPI_THREADS_DISABLE"),
        (without_mpi_in_horovod, "HOROVOD_WITH_MPI=1"),
        (after_the_end, "before hvd.shutdown()"),
    ],
)
def test_one_rank_cannot_use_mpi(
    spoil: Callable[[pytest.MonkeyPatch, Path], None], remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CASES 46. Every rank raises, in one line that names the rank and says what to do; then all can go on."""
    with monkeypatch.context() as patch:
        if RANK == K - 1:
            spoil(patch, tmp_path)
        with pytest.raises(MpiTransportError) as caught:
            make("mpi")
    message = str(caught.value)
    assert f"rank {K - 1}" in message
    assert remedy in message
    assert 'transport="horovod"' in message
    assert "\n" not in message
    make("mpi").close()


@pytest.mark.skipif(hvd.mpi_enabled(), reason="launched with MPI")
def test_launched_with_gloo() -> None:
    with pytest.raises(MpiTransportError, match="Gloo.*mpirun"):
        make("mpi")
