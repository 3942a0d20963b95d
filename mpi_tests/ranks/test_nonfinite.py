"""CASES 37: a NaN or an infinity on one rank is everybody's business, whether or not its coordinate would travel."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest

import hvd_slim as hvd
from ranks.support import (
    Case,
    Named,
    Options,
    copies,
    flatten,
    global_model,
    identical_on_all_ranks,
    set_gradients,
    slim,
)

CASE = Case("non-finite", 37, {}, most=200)
PATHS: list[Options] = [
    {"explorer": "random", "exchange": "allgather"},
    {"explorer": "greedy", "exchange": "alltoall"},
    {"explorer": "leader", "exchange": "allreduce"},
    {"exchange": "dense"},
    {"exchange": "allgather", "value_dtype": "int8"},
    {"exchange": "alltoall", "warmup_rounds": 100},
    {"exchange": "allgather", "resync_every": 1},
]
every_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: "-".join(map(str, path.values())))
values = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
LAST = hvd.size() - 1


def begin(on_nonfinite: str, path: Options) -> tuple[Named, Any]:
    """Three good steps."""
    named = CASE.parameters()
    options = {"comm_fraction": 0.1, "core_fraction": 0.05, "reselect_every": 100, **path}
    optimizer = slim(named, on_nonfinite=on_nonfinite, **options)
    for step in range(3):
        take(named, optimizer, step)
    return named, optimizer


def take(named: Named, optimizer: Any, step: int, coordinate: int | None = None, value: float = 0.0) -> None:
    """A step; with ``value`` in the last rank's gradient at ``coordinate``, if that is given."""
    gradient = CASE.gradient(hvd.rank(), step, len(flatten(named.values())))
    if coordinate is not None and hvd.rank() == LAST:
        gradient[coordinate] = value
    set_gradients(named.values(), gradient)
    optimizer.step()


def coordinates(named: Named) -> list[int]:
    """From all over the model: at a tenth of it sent, some travel and most do not."""
    return np.linspace(0, len(flatten(named.values())) - 1, 5).astype(int).tolist()


@every_path
@values
def test_raise(path: Options, value: float) -> None:
    """On every rank, with the rank's name; w̄ stays to the bit, for a checkpoint."""
    if hvd.size() == 1:
        pytest.skip("one rank: the optimizer is plain torch's")
    for coordinate in coordinates(CASE.parameters()):
        named, optimizer = begin("raise", path)
        before = global_model(optimizer, named.values())
        with pytest.raises(hvd.NonFiniteError, match=f"rank {hvd.rank()}: rank {LAST} has"):
            take(named, optimizer, 3, coordinate, value)
        after = global_model(optimizer, named.values())
        assert all((a == b).all() for a, b in zip(before, after))
        optimizer._slim.renew()


@every_path
@values
def test_skip(path: Options, value: float) -> None:
    """No rank takes the step; then training goes on, finite."""
    named, optimizer = begin("skip", path)
    for number, coordinate in enumerate(coordinates(named)):
        before, stats = copies(named.values()), optimizer.stats()
        take(named, optimizer, 3 + number, coordinate, value)
        assert all((a == b).all() for a, b in zip(before, copies(named.values())))
        assert optimizer.stats()["steps"] == stats["steps"]
        take(named, optimizer, 3 + number)
        assert optimizer.stats()["steps"] == stats["steps"] + 1
    assert np.isfinite(flatten(named.values())).all()
    optimizer.resync()
    assert identical_on_all_ranks(list(named.values()))
    optimizer._slim.renew()


@every_path
def test_ignore(path: Options, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is looked at, nobody waits: the rounds go on with what there is."""
    named, optimizer = begin("ignore", path)
    with caplog.at_level(logging.WARNING, "hvd_slim"):
        for step in range(3, 6):
            take(named, optimizer, step, 0, math.nan)
    assert optimizer.stats()["steps"] == 6
    assert hvd.rank() != LAST or np.isnan(flatten(named.values())).any()
    optimizer._slim.renew()
