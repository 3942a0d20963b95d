"""local_rate: a rank steps with a part λ of the learning rate, and merged changes are divided by it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import hvd_slim as hvd
from hvd_slim.naming import trainable_parameters
from ranks.support import Case, Named, copies, flatten, gather, global_vector, set_gradients, slim

RATE = 0.125
LR = 0.5
CASE = Case("local rate", 3, {}, most=200)


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=LR)


def gradients(step: int, n: int) -> list[np.ndarray]:
    return [CASE.gradient(rank, step, n).astype(np.float64) for rank in range(hvd.size())]


def train(optimizer: Any, named: Named, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(named.values(), gradients(step, len(flatten(named.values())))[hvd.rank()])
        optimizer.step()


@pytest.mark.parametrize("path", [{"exchange": "dense"}, {"exchange": "alltoall", "resync_every": 1}], ids=str)
def test_a_rank_goes_a_part_of_the_way_and_the_global_model_all_of_it(path: dict[str, Any]) -> None:
    """Between rounds w_k = w̄ − λ·lr·g; a round of everything takes w̄ by −lr times the mean gradient.

    The steps are on a grid that float32 holds, but for the merged mean: a few roundings, each 2⁻²⁴ of a number below 4.
    """
    named = CASE.parameters(torch.float32)
    before = flatten(named.values())
    n = len(before)
    optimizer = slim(named, sgd(named), local_steps=2, local_rate=RATE, **path)
    train(optimizer, named, 0, 1)
    rate = RATE if hvd.size() > 1 else 1.0  # alone there is nothing to be near to
    np.testing.assert_allclose(flatten(named.values()), before - rate * LR * gradients(0, n)[hvd.rank()], atol=1e-6)
    if hvd.size() > 1:
        np.testing.assert_array_equal(global_vector(optimizer, named.values()), before)
    train(optimizer, named, 1, 2)
    if hvd.size() > 1:
        mean = np.mean([gradients(0, n), gradients(1, n)], axis=1).sum(axis=0)
        np.testing.assert_allclose(global_vector(optimizer, named.values()), before - LR * mean, atol=1e-5)
        assert np.abs(LR * mean).max() > 0.01
    optimizer._slim.renew()


def test_nothing_of_a_sparse_round_is_lost() -> None:
    """w̄ moved by (1/λ)·(what was sent)/K, so w̄ + mean(u)/λ is what dense training would have."""
    named = CASE.parameters(torch.float64)
    before = flatten(named.values())
    n = len(before)
    optimizer = slim(
        named, sgd(named), local_rate=RATE, exchange="allgather", comm_fraction=0.2, core_fraction=0.1, reselect_every=3
    )
    train(optimizer, named, 0, 12)
    w_bar = global_vector(optimizer, named.values())
    pending = gather(flatten(named.values()) - w_bar).mean(axis=0)
    moved = sum(np.mean(gradients(step, n), axis=0) for step in range(12)) * LR
    np.testing.assert_allclose(w_bar + pending / RATE, before - moved, atol=1e-9)
    assert hvd.size() == 1 or np.abs(pending).max() > 1e-3
    optimizer._slim.renew()


def test_the_users_learning_rate_stays_as_it_was() -> None:
    """Schedulers and logs see it, after each step and after one that raised; a hook may set another."""
    named = CASE.parameters()
    parameters = list(named.values())
    half = len(parameters) // 2
    groups: list[dict[str, Any]] = [
        {"params": parameters[:half], "lr": torch.tensor(0.3)},
        {"params": parameters[half:]},
    ]
    optimizer = slim(named, torch.optim.SGD([g for g in groups if g["params"]], lr=0.2), local_rate=0.3)
    rates = [group["lr"] for group in optimizer.param_groups]
    train(optimizer, named, 0, 2)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates))

    def fail(*_: Any) -> None:
        raise KeyError("a hook of the user's")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        train(optimizer, named, 2, 3)
    hook.remove()
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates))

    def halve(*_: Any) -> None:
        optimizer.param_groups[-1]["lr"] = 0.125

    optimizer.register_step_post_hook(halve)
    train(optimizer, named, 2, 3)
    assert optimizer.param_groups[-1]["lr"] == 0.125
    optimizer._slim.renew()


@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
def test_resumed_with_another_rate(exchange: str) -> None:
    """What was pending is worth as much as before: it is stretched with the rate, to float32 rounding."""
    options = {"exchange": exchange, "comm_fraction": 0.2, "core_fraction": 0.1, "reselect_every": 50}
    named = CASE.parameters()
    optimizer = slim(named, sgd(named), local_rate=0.5, **options)
    train(optimizer, named, 0, 7)
    if hvd.size() == 1:
        return
    base = flatten(optimizer._slim.started._exchange.model.flat)  # in the arena's order, which is that of one dtype
    live, state = copies(named.values()), optimizer.state_dict()
    pending = flatten(named.values()) - base

    again = CASE.parameters()
    with torch.no_grad():
        for parameter, value in zip(again.values(), live):
            parameter.copy_(value)
    resumed = slim(again, sgd(again), local_rate=0.25, **options)
    resumed.load_state_dict(state)
    synchronizer = resumed._slim.synchronizer()
    synchronizer.before_step(trainable_parameters(resumed, resumed._slim.named))
    stretched = flatten(again.values()) - base
    assert np.abs(pending).max() > 1e-3
    np.testing.assert_allclose(stretched, pending / 2, atol=2.0**-22 * max(1.0, float(np.abs(base).max())))
    for each in (optimizer, resumed):
        each._slim.renew()


def test_a_checkpoint_from_before_there_was_one() -> None:
    """It goes on to the same bits, its round in flight included."""
    ends = []
    for old in (False, True):
        named = CASE.parameters()
        options = {"exchange": "allgather", "comm_fraction": 0.2, "core_fraction": 0.1, "overlap": True}
        optimizer = slim(named, sgd(named), **options)
        train(optimizer, named, 0, 5)
        state = optimizer.state_dict()
        if old:
            state["hvd_slim"]["config"].pop("local_rate")
        resumed = slim(named, sgd(named), **options)
        resumed.load_state_dict(state)
        train(resumed, named, 5, 9)
        ends.append(flatten(named.values()))
        for each in (optimizer, resumed):
            each._slim.renew()
    np.testing.assert_array_equal(ends[0], ends[1])


def test_a_rate_of_one_over_the_ranks_sums() -> None:
    """λ = 1/K: merged changes are sums of what was sent."""
    named = CASE.parameters(torch.float64)
    before = flatten(named.values())
    n = len(before)
    optimizer = slim(named, sgd(named), local_rate=1 / hvd.size(), exchange="dense")
    train(optimizer, named, 0, 1)
    total = sum(gradients(0, n))
    np.testing.assert_allclose(flatten(named.values()), before - LR / hvd.size() * total, rtol=0, atol=1e-12)
    assert math.isclose(optimizer.param_groups[0]["lr"], LR)
    optimizer._slim.renew()
