"""Every explorer on every path, at every width, over both transports, against the simulation of K ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from oracle import allreduce_bound
from oracle_paths import PathOracle

import hvd_slim as hvd
from hvd_slim.config import VALUE_DTYPES
from ranks.support import Case, core_of, flatten, gather, global_vector, set_gradients, slim

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
    """From the same state, each round chooses the same coordinates and gives the same numbers, on every rank.

    To the bit, except where an allreduce has added in an order of its own: there within ``allreduce_bound``.
    """
    if transport == "mpi" and not hvd.mpi_enabled():
        pytest.skip("launched with Gloo: there is no MPI to carry bytes")
    options = options_for(explorer, exchange, value_dtype, rounding)
    case = Case("paths", 7, options, most=500)
    named = case.parameters()
    parameters = list(named.values())
    optimizer = slim(named, torch.optim.SGD(parameters, lr=0.125), transport=transport, **options)
    oracle = PathOracle([flatten(parameters).astype(np.float32)] * hvd.size(), **options)
    stepped: list[np.ndarray] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(gather(flatten(parameters)).astype(np.float32)))

    for step in range(ROUNDS):
        gradients = [case.gradient(rank, step, oracle.n) for rank in range(hvd.size())]
        set_gradients(parameters, gradients[hvd.rank()])
        optimizer.step()
        bases = [base.copy() for base in oracle.base]
        oracle.step(lambda k, _: (stepped[-1][k].copy(), gradients[k]))  # noqa: B023
        if hvd.size() == 1:
            np.testing.assert_array_equal(flatten(parameters), stepped[-1][0])
            continue
        if oracle.E:
            np.testing.assert_array_equal(core_of(optimizer), oracle.C)
        bound = np.zeros(oracle.n)
        summed = oracle.exactly_summed
        # γ, up to √K, stretches the difference too.
        bound[summed] = allreduce_bound([w[summed] - b[summed] for w, b in zip(stepped[-1], bases)], bases[0][summed])
        bound *= np.sqrt(hvd.size())
        w_bar = global_vector(optimizer, parameters)
        assert np.all(np.abs(w_bar - oracle.w_bar) <= bound)
        assert np.all(np.abs(flatten(parameters) - oracle.w[hvd.rank()]) <= bound)
        w_bars = gather(w_bar)
        np.testing.assert_array_equal(w_bars, np.broadcast_to(w_bar, w_bars.shape))
        # On from what the run has, so that a difference of rounding is not counted twice.
        seen = gather(flatten(optimizer._slim.synchronizer()._exchange.model.flat)).astype(np.float32)
        oracle.w_bar, oracle.base = w_bar.astype(np.float32), list(seen)
        oracle.w = list(gather(flatten(parameters)).astype(np.float32))
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
