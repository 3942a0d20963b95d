"""What a round costs: the bytes that ``stats()`` counts are those of the design's formula and of the real calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import horovod.torch
import numpy as np
import pytest
import torch
from oracle import ceil_exactly
from torch.nn import Parameter

import hvd_slim as hvd
from ranks.support import Case, Named, Options, set_gradients, slim

ROUNDS = 45
OPTIONS: list[Options] = [
    {},
    {"reselect_every": 7, "resync_every": 10},
    {"comm_fraction": 0.101, "core_fraction": 0.1, "reselect_every": 3},  # strata of 900: four-byte offsets
    {"comm_fraction": 0.02, "core_fraction": 0.02, "reselect_every": 5},  # no explorers; the set as indices
    {"local_steps": 3, "comm_fraction": 0.5, "core_fraction": 0.1},
    {"exchange": "dense"},
    {"exchange": "dense", "value_dtype": "bfloat16"},
    {"exchange": "alltoall"},
    {"exchange": "alltoall", "explorer": "cyclic", "resync_every": 10},
    {"exchange": "allgather", "explorer": "cyclic"},
    {"exchange": "allgather", "explorer": "greedy", "value_dtype": "float16"},
    {"exchange": "alltoall", "explorer": "greedy", "comm_fraction": 0.02, "core_fraction": 0.01},
    {"exchange": "allreduce", "explorer": "shared"},
    {"exchange": "allreduce", "explorer": "leader"},
    {"exchange": "allreduce", "explorer": "leader", "comm_fraction": 0.02, "core_fraction": 0.01},
]
VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def tensors(count: int, total: int) -> Named:
    """``count`` equal tensors, ``total`` numbers in all, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return {f"t{i}": Parameter(torch.randn(total // count, generator=generator)) for i in range(count)}


def train(named: Named, optimizer: Any, steps: int) -> None:
    """On gradients of each rank's own."""
    n = sum(parameter.numel() for parameter in named.values())
    for step in range(steps):
        set_gradients(named.values(), np.random.default_rng([hvd.rank(), step]).normal(size=n))
        optimizer.step()


def set_bytes(count: float, n: float) -> float:
    """Of a set of coordinates below n: a bitmap; numbers; or their low 8 or 16 bits and the rest as a bitmap."""
    return min(n / 8, 4 * count, *((count * (low + 1) + n / 2**low) / 8 for low in (8, 16)))


def explorer_bytes(given: Options, n: int, core: int, count: int, v: int) -> float:
    """What each rank sends for the explorers of one round."""
    K, m = hvd.size(), n - core  # noqa: N806
    stratum = math.ceil(m / count) if count else 0
    explorer = given.get("explorer", "random")

    def indices(run: float) -> float:
        by_set = explorer in ("greedy", "leader")
        return set_bytes(run, m) if by_set else run * {"random": 1 if stratum <= 256 else 4}.get(explorer, 0)

    path = given.get("exchange", "allgather")
    if path == "allgather":
        return (K - 1) * (count * v + indices(count))
    if path == "alltoall":  # a message to each owner; answers at full width
        return (K - 1) / K * count * (v + 4) + (K - 1) * indices(count / K)
    return 2 * (K - 1) / K * count * v + (K - 1) / K * indices(count)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bytes_are_the_formulas(options: Options) -> None:
    """Over a whole run within 1 %, sent and received: cores, explorers with indices, core broadcasts, resyncs.

    A rank sends 2(K−1)/K·βn·v for the core, a broadcast's mean over ranks, (K−1)/K of its bytes, for a core set, and
    2(K−1)/K·n·v for a dense round.
    """
    K, n = hvd.size(), 100_000  # noqa: N806
    given: Options = {
        "comm_fraction": 0.3,
        "core_fraction": 0.15,
        "reselect_every": 20,
        "resync_every": 0,
        "local_steps": 1,
    }
    given.update(options)
    v = VALUE_BYTES[given.get("value_dtype", "float32")]
    named = tensors(5, n)
    optimizer = slim(named, **options)
    train(named, optimizer, ROUNDS * given["local_steps"])

    core = ceil_exactly(given["core_fraction"], n)
    explorers = ceil_exactly(given["comm_fraction"], n) - core
    if given.get("exchange") == "dense":
        dense_rounds, resyncs, selections = ROUNDS, 0, 0
    else:
        selected = set(range(0, ROUNDS, given["reselect_every"]))
        asked = {r for r in range(ROUNDS) if given["resync_every"] and (r + 1) % given["resync_every"] == 0}
        # A w̄ spread over the ranks is brought together before another core is looked at.
        resynced = asked | (selected - {0}) if given.get("exchange") == "alltoall" else asked
        resyncs = dense_rounds = len(resynced)
        selections = len(selected)
    expected: float = (ROUNDS - dense_rounds) * (
        2 * (K - 1) / K * core * v + explorer_bytes(given, n, core, explorers, v)
    )
    expected += selections * (K - 1) / K * set_bytes(core, n)
    expected += dense_rounds * 2 * (K - 1) / K * n * (v if given.get("exchange") == "dense" else 4)
    if K == 1:
        resyncs = selections = 0

    stats = optimizer.stats()
    assert stats["total_bytes_received"] == pytest.approx(expected, rel=0.01)
    # The explorers of which rank are owned by which differs a little between ranks; over all it does not.
    sent = float(horovod.torch.allreduce(torch.tensor(stats["total_bytes_sent"], dtype=torch.float64), name="sent"))
    assert sent == pytest.approx(expected, rel=0.01)
    assert stats["total_bytes_sent"] == pytest.approx(expected, rel=0.03 if "alltoall" in options.values() else 0.01)
    assert stats["dense_bytes"] == pytest.approx(ROUNDS * given["local_steps"] * 2 * (K - 1) / K * n * 4)
    assert (stats["reselections"], stats["resyncs"]) == (selections, resyncs)
    assert stats["rounds"] == (0 if K == 1 else ROUNDS)
    if given.get("explorer") in ("shared", "leader") and given["comm_fraction"] == 0.3 and K > 1:
        assert stats["ratio"] <= {"shared": 0.302, "leader": 0.316}[given["explorer"]]
    if K == 2 and not options:
        assert stats["ratio"] == pytest.approx(expected / stats["dense_bytes"], rel=0.01)
        assert stats["ratio"] <= 0.36


class Calls:
    """Listens to what is handed to Horovod by hvd_slim: (operation, bytes) of each call, texts to agree on aside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int]] = []
        self.texts: list[str] = []
        for name in ("allreduce_async_", "allgather_async", "broadcast_async_", "alltoall_async"):
            monkeypatch.setattr(horovod.torch, name, self._listened(name, getattr(horovod.torch, name)))

    def _listened(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def listened(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if "agreement" in kwargs["name"]:
                self.texts.append(operation)
            elif kwargs["name"].startswith("hvd_slim"):
                self.made.append((operation.split("_")[0], tensor.nbytes))
            return call(tensor, *args, **kwargs)

        return listened


def test_bytes_are_those_handed_to_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an estimate: each call's own bytes, times the factor of its kind, add up to the counters exactly."""
    calls = Calls(monkeypatch)
    case = Case("odd sizes", 31, {"comm_fraction": 0.37, "core_fraction": 0.2, "reselect_every": 4, "resync_every": 6})
    named = case.parameters()
    optimizer = slim(named, **case.options)
    train(named, optimizer, 20)

    K = hvd.size()  # noqa: N806
    factor = {"allreduce": 2 * (K - 1) / K, "allgather": K - 1, "broadcast": (K - 1) / K}
    expected = sum(factor[operation] * nbytes for operation, nbytes in calls.made)
    stats = optimizer.stats()
    assert stats["total_bytes_sent"] == stats["total_bytes_received"] == pytest.approx(expected, rel=1e-12)
    assert sum(stats["collectives"].values()) == len(calls.made)
    assert len(calls.made) > 0 or K == 1


def test_collectives_a_round_do_not_grow_with_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 43. 4 tensors or 400, the same number of numbers: the same calls with the same bytes in every round."""
    calls = Calls(monkeypatch)
    of_rounds = []
    for count in (4, 400):
        named = tensors(count, 4000)
        optimizer = slim(named, reselect_every=5, resync_every=4)
        rounds = []
        for _ in range(12):
            calls.made.clear()
            calls.texts.clear()
            train(named, optimizer, 1)
            rounds.append((list(calls.made), len(calls.texts)))
        of_rounds.append(rounds)
    few, many = of_rounds
    assert few == many
    if hvd.size() > 1:
        for number in (1, 2, 4):
            made, texts = few[number]
            assert [operation for operation, _ in made] == ["allreduce", "allgather"]
            assert texts == 0
        assert max(len(made) for made, _ in few) == 3  # with a core broadcast
