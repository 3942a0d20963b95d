"""What a rank needs beyond the model, for every path, at any moment: stated, and not much more than is true.

Ranks are threads; one of them is recorded, and then runs by itself while every allocation is watched.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch

from hvd_slim.arena import Arena
from hvd_slim.config import EXPLORERS, SHARED_EXPLORERS, SlimConfig
from hvd_slim.memory import extra_memory
from hvd_slim.planner import allowed_paths
from hvd_slim.rehearsal import rehearse
from hvd_slim.synchronizer import Synchronizer
from hvd_slim.transport.base import Transport
from unit.replay import RecordingTransport, ReplayingTransport, peak_memory
from unit.simulated import Meeting, SimulatedTransport

TIGHT = 0.4  # part of the bound that is needed at least
SAMPLED = 300_000  # parameters; more than are searched without a sample
REFERENCE = {"comm_fraction": 0.3, "core_fraction": 0.15}
SPARSE = {"comm_fraction": 0.02, "core_fraction": 0.01}
WAYS = [("random", "dense")] + [
    (explorer, path)
    for explorer in EXPLORERS
    for path in (("allreduce",) if explorer in SHARED_EXPLORERS else ("allgather", "alltoall"))
]
every_way = pytest.mark.parametrize(("explorer", "path"), WAYS)

Named = list[tuple[str, torch.nn.Parameter]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: ``n`` parameters in ``tensors`` tensors on ``size`` ranks, of which ``rank`` is watched."""

    config: SlimConfig
    n: int = SAMPLED
    size: int = 2
    rank: int = 0
    tensors: int = 1
    dtype: torch.dtype = torch.float32
    restore_norm: bool = False

    def model(self, rank: int) -> tuple[Named, list[torch.Tensor]]:
        """Parameters, equal on all ranks, with gradients; and what each rank learns in a step."""
        generator = torch.Generator().manual_seed(0)
        bounds = np.linspace(0, self.n, self.tensors + 1).astype(int)
        named = [(f"{end}", torch.nn.Parameter(self._numbers(end - begin, generator)))
                 for begin, end in zip(bounds, bounds[1:])]  # fmt: skip
        generator.manual_seed(1 + rank)
        learned = [self._numbers(parameter.numel(), generator) for _, parameter in named]
        for _, parameter in named:
            parameter.grad = self._numbers(parameter.numel(), generator)
        return named, learned

    def _numbers(self, count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(int(count), generator=generator).to(self.dtype)

    def run(self, transport: Transport, named: Named, learned: list[torch.Tensor]) -> Synchronizer:
        """The start, rounds with and without a new core, a resync."""
        synchronizer = Synchronizer(self.config, transport, self.restore_norm)
        synchronizer.before_step(named)
        for step in range(self.config.reselect_every + 2):
            for (_, parameter), change in zip(named, learned):
                parameter.data.add_(change, alpha=2.0 ** -(8 + step))
            synchronizer.before_step(named)
            synchronizer.after_step()
        synchronizer.resync()
        return synchronizer

    def peak(self) -> int:
        """Bytes that the watched rank needs at most beyond parameters and gradients."""
        meeting, limit = Meeting(self.size), self.config.max_message_bytes
        transports: list[SimulatedTransport] = [SimulatedTransport(meeting, rank, limit) for rank in range(self.size)]
        transports[self.rank] = recorded = RecordingTransport(meeting, self.rank, limit)
        errors: list[BaseException] = []

        def run(transport: SimulatedTransport) -> None:
            try:
                with meeting.turn:
                    self.run(transport, *self.model(transport.rank))
            except BaseException as error:  # noqa: BLE001  (raised again below)
                errors.append(error)
                meeting.abandon()

        threads = [threading.Thread(target=run, args=(transport,), daemon=True) for transport in transports]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        named, learned = self.model(self.rank)
        kept: list[Synchronizer] = []
        return peak_memory(lambda: kept.append(self.run(ReplayingTransport(recorded), named, learned)))

    def check(self) -> None:
        """The peak lies below the bound, and not far below."""
        peak = self.peak()
        bound = extra_memory(self.n, self.size, self.config.exchange, self.config, self.dtype)
        assert TIGHT * bound <= peak <= bound, f"{peak / self.n:.2f} of {bound / self.n:.2f} bytes a parameter"


def config(explorer: str, path: str, **options: Any) -> SlimConfig:
    return SlimConfig(**{"explorer": explorer, "exchange": path, "reselect_every": 2, "restore_norm": False, **options})


@every_way
@pytest.mark.parametrize("fractions", [REFERENCE, SPARSE], ids=["reference", "sparse"])
@pytest.mark.parametrize("size", [2, 4])
def test_few_ranks(explorer: str, path: str, fractions: dict[str, Any], size: int) -> None:
    Case(config(explorer, path, **fractions), size=size, rank=size - 1).check()


@every_way
def test_64_ranks(explorer: str, path: str) -> None:
    """CASES 44. Only what others send to one rank grows with their number, on the allgather path."""
    fractions = {"comm_fraction": 0.04, "core_fraction": 0.02} if path == "allgather" else REFERENCE
    Case(config(explorer, path, **fractions), n=60_000, size=64).check()


@every_way
@pytest.mark.parametrize("value_dtype", ["float16", "int4"])
def test_narrow_values(explorer: str, path: str, value_dtype: str) -> None:
    Case(config(explorer, path, value_dtype=value_dtype), size=3, rank=1).check()


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_parameters(explorer: str, path: str, dtype: torch.dtype) -> None:
    fractions = {"comm_fraction": 0.9, "core_fraction": 0.5}
    Case(config(explorer, path, **fractions), dtype=dtype, rank=1).check()


@every_way
def test_overlap(explorer: str, path: str) -> None:
    for value_dtype in ("float32", "int8"):
        Case(config(explorer, path, overlap=True, value_dtype=value_dtype), size=3, rank=2).check()


@every_way
def test_few_parameters(explorer: str, path: str) -> None:
    """So few that a core is searched among all of them."""
    Case(config(explorer, path), n=100_000).check()


@every_way
def test_several_tensors(explorer: str, path: str) -> None:
    """What is worked on tensor by tensor takes less."""
    Case(config(explorer, path), size=3, tensors=7).check()


@every_way
def test_norms_and_warm_up(explorer: str, path: str) -> None:
    for warmup in ("dense", "linear"):
        options = {"restore_norm": True, "warmup": warmup, "warmup_rounds": 2}
        Case(config(explorer, path, **options), restore_norm=True).check()


@every_way
def test_messages_in_pieces(explorer: str, path: str) -> None:
    Case(config(explorer, path, comm_fraction=0.5, max_message_bytes=100_000), size=3).check()


@pytest.mark.parametrize("explorer", EXPLORERS)
@pytest.mark.parametrize("n", [100_000, SAMPLED])
def test_measuring_takes_no_more(explorer: str, n: int) -> None:
    """What exchange="auto" tries out before it takes a path."""
    for value_dtype in ("float32", "int8"):
        auto = SlimConfig(explorer=explorer, value_dtype=value_dtype)
        named, _ = Case(auto, n=n).model(0)
        arena = Arena(named)
        peak = peak_memory(lambda: rehearse(arena, auto, 2, lambda action, alone: action()))  # noqa: B023
        assert peak <= min(extra_memory(n, 2, path, auto) for path in allowed_paths(auto, n))


def test_it_is_flat_in_ranks_but_for_allgather() -> None:
    """Per rank, from 64 to 4,096 ranks."""
    n = 25_600_000
    for explorer, path in WAYS:
        few, many = (extra_memory(n, size, path, config(explorer, path)) for size in (64, 4096))
        assert (many <= 1.03 * few) == (path != "allgather")
