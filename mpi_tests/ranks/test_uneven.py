"""CASES 36: ranks with fewer batches than others. Horovod's join cannot gather; ``uneven_inputs`` can."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle
from torch.nn import Parameter

import hvd_slim as hvd
from ranks.support import (
    Case,
    Options,
    copies,
    flatten,
    gather,
    global_vector,
    identical_on_all_ranks,
    set_gradients,
    slim,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "allgather": {"exchange": "allgather"},
    "alltoall": {"exchange": "alltoall"},
    "leader": {"exchange": "allreduce", "explorer": "leader"},
    "greedy, every second step": {"exchange": "allgather", "explorer": "greedy", "local_steps": 2, "resync_every": 4},
    "dense": {"exchange": "dense"},
    "skip": {"exchange": "allgather", "on_nonfinite": "skip"},
    "warm-up": {"exchange": "alltoall", "warmup_rounds": 4},
}
#: batches of rank k: the k-th, cyclically
BATCHES: dict[str, Sequence[int]] = {
    "rank 0 first": (3, 9, 5, 7),
    "rank 0 last": (11, 2, 5, 4),
    "one has none": (6, 0, 3, 6),
    "as many": (5, 5, 5, 5),
    "none at all": (0, 0, 0, 0),
}


def train(named: dict[str, Parameter], optimizer: Any, case: Case, first: int, last: int) -> None:
    """Local gradients ``first`` to ``last`` (excluded) of this rank's."""
    n = sum(parameter.numel() for parameter in named.values())
    for step in range(first, last):
        set_gradients(named.values(), case.gradient(hvd.rank(), step, n))
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "batches"),
    [*zip(OPTIONS, itertools.cycle(BATCHES)), *(("allgather", batches) for batches in list(BATCHES)[1:])],
)
def test_all_take_part_until_all_are_out(options: str, batches: str) -> None:
    """Twice in a row, with even training in between: the same counts, and w̄ to the same bits, on every rank."""
    case = Case("uneven", 81, {"reselect_every": 3, **OPTIONS[options]}, most=300)
    named = case.parameters()
    optimizer = slim(named, torch.optim.SGD(named.values(), lr=2.0**-5, momentum=0.9), **case.options)
    most = max(BATCHES[batches][rank % 4] for rank in range(hvd.size()))
    mine = BATCHES[batches][hvd.rank() % 4]
    steps = 0
    for _ in range(2):
        with hvd.uneven_inputs(optimizer):
            train(named, optimizer, case, steps, steps + mine)
        steps += most
        assert optimizer.state_dict()["hvd_slim"]["steps"] == steps
        train(named, optimizer, case, steps, steps + 2)
        steps += 2
        with optimizer.global_parameters():
            assert identical_on_all_ranks(list(named.values()))
    optimizer.resync()
    assert identical_on_all_ranks(list(named.values()))
    assert np.isfinite(flatten(named.values())).all()


@pytest.mark.parametrize("batches", ["rank 0 first", "rank 0 last", "one has none"])
def test_a_rank_without_data_is_one_that_learns_nothing(batches: str) -> None:
    """The oracle's rank without data takes no local step; nothing else is different.

    One or two ranks: an allreduce of two numbers is exact in either order, so to the bit.
    """
    options: Options = {"comm_fraction": 0.3, "core_fraction": 0.1, "reselect_every": 50}
    case = Case("uneven oracle", 82, options, most=300)
    named = case.parameters()
    start = flatten(named.values()).astype(np.float32)
    oracle = Oracle([start] * hvd.size(), **options)
    optimizer = slim(named, torch.optim.SGD(named.values(), lr=2.0**-5), **options)
    of_rank = [BATCHES[batches][rank % 4] for rank in range(hvd.size())]
    with hvd.uneven_inputs(optimizer):
        train(named, optimizer, case, 0, of_rank[hvd.rank()])

    for step in range(max(of_rank)):

        def local_step(k: int, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            # Of a rank that is out, the last gradient is still there when a core is chosen.
            last = min(step, of_rank[k] - 1)  # noqa: B023
            gradient = case.gradient(k, last, oracle.n) if of_rank[k] else np.zeros(oracle.n, np.float32)
            return (w - np.float32(2.0**-5) * gradient if step < of_rank[k] else w), gradient  # noqa: B023

        oracle.step(local_step)
    if hvd.size() <= 2:
        np.testing.assert_array_equal(flatten(named.values()), oracle.w[hvd.rank()])
    np.testing.assert_allclose(flatten(named.values()), oracle.w[hvd.rank()], rtol=0, atol=1e-5)
    if hvd.size() > 1:
        np.testing.assert_allclose(global_vector(optimizer, named.values()), oracle.w_bar, rtol=0, atol=1e-5)


def test_nothing_is_lost() -> None:
    """With everything sent each step, w̄ is the start plus the mean over ranks of all that was learned."""
    case = Case("uneven dense", 83, {"exchange": "dense"}, most=300)
    named = case.parameters()
    optimizer = slim(named, torch.optim.SGD(named.values(), lr=2.0**-5), **case.options)
    start = flatten(named.values())
    mine = 2 + 3 * hvd.rank()
    with hvd.uneven_inputs(optimizer):
        train(named, optimizer, case, 0, mine)
    learned = gather(-(2.0**-5) * np.sum([case.gradient(hvd.rank(), step, len(start)) for step in range(mine)], axis=0))
    np.testing.assert_allclose(flatten(named.values()), start + learned.mean(axis=0), rtol=0, atol=1e-4)
    assert identical_on_all_ranks(list(named.values()))


@pytest.mark.parametrize("fewest", [0, 2])
def test_two_optimizers_in_any_rhythm(fewest: int) -> None:
    """A rank that is out learns from the others whose turn it is: here two steps of one and one of the other."""
    cases = [Case("uneven first", 84, {}, most=200), Case("uneven second", 85, {}, most=200)]
    models = [case.parameters() for case in cases]
    optimizers = [slim(named, torch.optim.SGD(named.values(), lr=0.01)) for named in models]
    with hvd.uneven_inputs(*optimizers):
        for batch in range(fewest + 2 * hvd.rank()):
            train(models[0], optimizers[0], cases[0], 2 * batch, 2 * batch + 2)
            train(models[1], optimizers[1], cases[1], batch, batch + 1)
    most = fewest + 2 * (hvd.size() - 1)
    assert [optimizer.state_dict()["hvd_slim"]["steps"] for optimizer in optimizers] == [2 * most, most]
    for named, optimizer in zip(models, optimizers):
        with optimizer.global_parameters():
            assert identical_on_all_ranks(list(named.values()))


def test_with_a_grad_scaler() -> None:
    """It votes before each step, and an overflow on one rank leaves the step out on all: also on those without data."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        hvd.Compression.slim(exchange="allgather"),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    last, batches = hvd.size() - 1, 4 + 3 * hvd.rank()
    with hvd.uneven_inputs(optimizer):
        for batch in range(batches):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            if hvd.rank() == last and batch in (1, batches - 2):
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert optimizer.state_dict()["hvd_slim"]["steps"] == 4 + 3 * last - 2
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    with optimizer.global_parameters():
        assert identical_on_all_ranks(list(model.parameters()))


def train_and_raise(named: dict[str, Parameter], optimizer: Any, case: Case) -> None:
    train(named, optimizer, case, 1, 2)
    raise ZeroDivisionError


def test_an_exception_goes_through() -> None:
    """A rank that raises does not wait; and the block can be opened again afterwards."""
    case = Case("uneven raising", 86, {}, most=200)
    named = case.parameters()
    optimizer = slim(named)
    train(named, optimizer, case, 0, 1)
    with pytest.raises(ZeroDivisionError), hvd.uneven_inputs(optimizer):
        train_and_raise(named, optimizer, case)
    with hvd.uneven_inputs(optimizer):
        train(named, optimizer, case, 2, 3 + hvd.rank())
    train(named, optimizer, case, 50, 51)
    assert optimizer.state_dict()["hvd_slim"]["steps"] == 3 + hvd.size()


def test_what_cannot_be_waited_for_says_so() -> None:
    named = Case("uneven refused", 87, {}, most=200).parameters()
    optimizer, bare = slim(named), torch.optim.SGD(named.values(), lr=1.0)
    with pytest.raises(TypeError, match=r"uneven_inputs\(SGD\)"), hvd.uneven_inputs(bare):
        pass
    with pytest.raises(TypeError, match=r"uneven_inputs\(SGD, SGD\)"), hvd.uneven_inputs(optimizer, bare):
        pass
    with pytest.raises(TypeError, match=r"uneven_inputs\(\)"), hvd.uneven_inputs():
        pass
    with (
        hvd.uneven_inputs(optimizer),
        pytest.raises(RuntimeError, match="open for one of these"),
        hvd.uneven_inputs(optimizer),
    ):
        pass


def test_horovods_join() -> None:
    """With Horovod's own optimizer the block is Horovod's join; with a slim one join itself says what to do instead."""
    model = torch.nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    plain = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    with hvd.uneven_inputs(plain):
        for _ in range(1 + hvd.rank()):
            plain.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            plain.step()
    case = Case("uneven join", 88, {}, most=200)
    named = case.parameters()
    optimizer = slim(named)
    assert isinstance(hvd.join(), int)
    train(named, optimizer, case, 0, 2)
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match="uneven_inputs"):
            hvd.join()
    train(named, optimizer, case, 2, 3)
    assert copies(named.values())
