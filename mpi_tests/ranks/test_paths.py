"""Every explorer on every path, at every width, over both transports, against the simulation of K ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from oracle_paths import PathOracle

import hvd_slim as hvd
from hvd_slim.config import VALUE_DTYPES
from ranks.against_oracle import check_rounds
from ranks.support import Case, flatten, set_gradients, slim

ROUNDS = 8
PATHS = [
    *itertools.product(("random", "cyclic", "greedy"), ("allgather", "alltoall")),
    ("shared", "allreduce"),
    ("leader", "allreduce"),
    ("random", "dense"),
]
WIDTHS = [*((name, "nearest") for name in VALUE_DTYPES), ("int8", "stochastic"), ("int4", "stochastic")]
TRANSPORTS = ["horovod", "mpi"]


def options_for(explorer: str, exchange: str, value_dtype: str, rounding: str) -> dict[str, Any]:
    """The combination, with the other options drawn from a seed made of its names."""
    rng = np.random.default_rng(list(f"{explorer}{exchange}{value_dtype}{rounding}".encode()))
    comm = float(rng.choice([0.1, 0.3, 0.5]))
    return {
        "explorer": explorer,
        "exchange": exchange,
        "value_dtype": value_dtype,
        "rounding": rounding,
        "comm_fraction": comm,
        "core_fraction": comm * float(rng.choice([0.2, 0.5])),
        "reselect_every": int(rng.choice([3, 4])),
        "resync_every": int(rng.choice([0, 5])),
        "restore_norm": bool(rng.integers(2)),
        "local_rate": float(rng.choice([1.0, 0.25, 0.3])),
        "warmup_rounds": int(rng.choice([0, 2])),
        "warmup": str(rng.choice(["dense", "linear"])),
        "seed": int(rng.integers(2**40)),
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("value_dtype", "rounding"), WIDTHS, ids=["-".join(width) for width in WIDTHS])
@pytest.mark.parametrize(("explorer", "exchange"), PATHS, ids=["-".join(path) for path in PATHS])
def test_every_round_is_the_oracles(
    explorer: str, exchange: str, value_dtype: str, rounding: str, transport: str
) -> None:
    """From the same state, each round chooses the same coordinates and gives the same numbers, on every rank."""
    if transport == "mpi" and not hvd.mpi_enabled():
        pytest.skip("launched with Gloo: there is no MPI to carry bytes")
    options = options_for(explorer, exchange, value_dtype, rounding)
    case = Case("paths", 7, options, most=500)
    named = case.parameters()
    parameters = list(named.values())
    optimizer = slim(named, torch.optim.SGD(parameters, lr=0.125), transport=transport, **options)
    oracle = PathOracle([flatten(parameters).astype(np.float32)] * hvd.size(), **options)

    def give_gradients(step: int) -> list[np.ndarray]:
        gradients = [case.gradient(rank, step, oracle.n) for rank in range(hvd.size())]
        set_gradients(parameters, gradients[hvd.rank()])
        return gradients

    check_rounds(parameters, optimizer, oracle, ROUNDS, give_gradients)
    optimizer._slim.renew()


def test_both_transports_choose_and_give_the_same() -> None:
    """Where no allreduce is involved, the same bits."""
    if not hvd.mpi_enabled():
        pytest.skip("launched with Gloo: there is no MPI to carry bytes")
    ends = []
    for transport in TRANSPORTS:
        case = Case("transports", 3, {})
        named = case.parameters()
        optimizer = slim(named, transport=transport, exchange="alltoall", value_dtype="bfloat16", reselect_every=4)
        for step in range(10):
            set_gradients(named.values(), case.gradient(hvd.rank(), step, len(flatten(named.values()))))
            optimizer.step()
        ends.append(flatten(named.values()))
        optimizer._slim.renew()
    np.testing.assert_array_equal(ends[0], ends[1])
