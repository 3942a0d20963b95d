"""What all ranks decide alike, whatever differs between them: order, phases, bits. And where the time goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hvd_slim as hvd
from hvd_slim.transport.base import Transport
from hvd_slim.watchdog import Watchdog
from ranks.support import (
    Case,
    Named,
    Options,
    Signs,
    copies,
    flatten,
    identical_on_all_ranks,
    random_options,
    set_gradients,
    slim,
)

transports = pytest.mark.parametrize("transport", ["horovod", "mpi"])


def need(transport: str) -> None:
    if transport == "mpi" and not hvd.mpi_enabled():
        pytest.skip("launched with Gloo: there is no MPI to carry bytes")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The phases of this rank's collectives, in the order in which they are launched."""
    names: list[str] = []
    for kind in ("allreduce", "allgather", "broadcast", "alltoall"):
        original = getattr(Transport, kind)

        def recorded(self: Any, *arguments: Any, kind: str = kind, original: Any = original, **named: Any) -> Any:
            names.append(f"{kind} {arguments[-1]}")
            return original(self, *arguments, **named)

        monkeypatch.setattr(Transport, kind, recorded)
    return names


@transports
@pytest.mark.parametrize("seed", range(6))
def test_order_and_phases_are_the_same_on_every_rank(seed: int, transport: str, launched: list[str]) -> None:
    """CASES 5 and 7. Ranks differ in data, gradients that are None, pace, order of names; not in what they launch."""
    need(transport)
    rng = np.random.default_rng([7, seed])
    options: Options = {**random_options(rng), "transport": transport, "warmup_rounds": int(rng.choice([0, 3]))}
    if seed % 3:
        explorer, exchange = ("greedy", "alltoall") if seed % 3 == 1 else ("leader", "allreduce")
        options |= {"explorer": explorer, "exchange": exchange}
    case = Case("order", 50 + seed, options)
    named = case.parameters()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(named.values(), lr=0.05, momentum=0.9),
        named_parameters=list(named.items())[:: -1 if hvd.rank() % 2 else 1],
        compression=hvd.Compression.slim(**{"exchange": "allgather", **options}),
    )
    local = np.random.default_rng([8, seed, hvd.rank()])
    n = len(flatten(named.values()))
    for step in range(14):
        set_gradients(named.values(), case.gradient(hvd.rank(), step, n) * float(local.choice([0.0, 1.0, 30.0])))
        for parameter in named.values():
            if local.random() < 0.2:
                parameter.grad = None
        if local.random() < 0.2:
            time.sleep(0.02)
        optimizer.step()
    of_rank = hvd.allgather_object(launched)
    assert of_rank.count(of_rank[0]) == hvd.size()
    assert bool(launched) == (hvd.size() > 1)
    optimizer._slim.renew()


def trained(transport: str, **options: Any) -> tuple[Named, Any]:
    """A model after 15 steps."""
    case = Case("again", 38, {})
    named = case.parameters()
    optimizer = slim(named, transport=transport, reselect_every=4, **options)
    for step in range(15):
        set_gradients(named.values(), case.gradient(hvd.rank(), step, len(flatten(named.values()))))
        optimizer.step()
    return named, optimizer


@transports
@pytest.mark.parametrize("value_dtype", ["float32", "int4"])
def test_two_runs_are_the_same_to_the_bit(transport: str, value_dtype: str) -> None:
    """CASES 38."""
    need(transport)
    first, second = (copies(trained(transport, value_dtype=value_dtype, seed=5)[0].values()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    other = copies(trained(transport, value_dtype=value_dtype, seed=6)[0].values())
    assert all(torch.equal(a, b) for a, b in zip(first, other)) == (hvd.size() == 1), "the seed counts"


def test_rank_and_size_are_horovods(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 47: whatever variables launchers leave behind."""
    if hvd.size() == 1:
        pytest.skip("one process that a launcher counts as several is refused on purpose")
    for prefix in ("OMPI_COMM_WORLD", "PMI", "SLURM", "HOROVOD", "MV2_COMM_WORLD"):
        for name, value in (("RANK", "17"), ("SIZE", "99"), ("LOCAL_RANK", "5"), ("PROCID", "17"), ("NTASKS", "99")):
            monkeypatch.setenv(f"{prefix}_{name}", value)
    named, optimizer = trained("horovod")
    transport = optimizer._slim.synchronizer().transport
    assert (transport.rank, transport.size) == (hvd.rank(), hvd.size())
    with optimizer.global_parameters():
        assert identical_on_all_ranks(list(named.values()))


@transports
def test_counters_show_who_waited(transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 45. Seconds add up to no more than went by, and waiting for a slow rank is waiting."""
    need(transport)
    signs, step, slow = Signs(tmp_path), 0, hvd.size() - 1
    wait = Watchdog.wait

    def wait_and_say_so(self: Watchdog, *arguments: Any) -> None:
        signs.give(f"waits in step {step}")
        wait(self, *arguments)

    monkeypatch.setattr(Watchdog, "wait", wait_and_say_so)
    case = Case("slow", 45, {})
    named = case.parameters()
    optimizer = slim(named, transport=transport)
    n = len(flatten(named.values()))
    for step in range(4):
        if step == 1:
            hvd.barrier()
            before, begin = optimizer.stats(), time.monotonic()
        if hvd.rank() == slow and step:
            signs.wait_for_others(f"waits in step {step}")
            time.sleep(0.2)
        set_gradients(named.values(), case.gradient(hvd.rank(), step, n))
        optimizer.step()
    passed, stats = time.monotonic() - begin, optimizer.stats()
    spent = {what: stats["seconds"][what] - before["seconds"][what] for what in stats["seconds"]}
    assert all(seconds >= 0.0 for seconds in spent.values())
    assert sum(spent.values()) <= passed
    if hvd.rank() != slow:
        assert spent["wait"] >= 3 * 0.2, spent
    assert bool(stats["ratio"]) == (hvd.size() > 1)
