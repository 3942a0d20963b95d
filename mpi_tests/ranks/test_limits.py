"""Two limits in which Slim-DP is something else: everything sent is dense data parallelism, one rank is plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_slim as hvd
from ranks.support import Options, copies, flatten, gather, identical_on_all_ranks, slim

EVERYTHING: list[Options] = [
    {"exchange": "dense"},
    {"comm_fraction": 1.0, "core_fraction": 1.0},
    {"comm_fraction": 1.0, "core_fraction": 1.0, "reselect_every": 3, "resync_every": 4},
    {"comm_fraction": 0.1, "core_fraction": 0.05, "resync_every": 1},
    {"exchange": "dense", "local_rate": 0.3},
    {"exchange": "alltoall", "resync_every": 1, "local_rate": 0.25},
    {"comm_fraction": 0.1, "core_fraction": 0.05, "warmup_rounds": 100},
]


def make_model(dtype: torch.dtype) -> torch.nn.Module:
    """The same on every rank."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, 4))
    return model.to(dtype)


def train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    """On data that differ from rank to rank."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    for _ in range(steps):
        images = torch.randn(4, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
        labels = torch.randint(4, (4,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("options", EVERYTHING, ids=str)
@pytest.mark.parametrize("nesterov", [False, True], ids=["momentum", "nesterov"])
def test_everything_sent_is_dense_data_parallelism(options: Options, nesterov: bool) -> None:
    """Averaging the updates of SGD is averaging the gradients: plain Horovod's trajectory, to float64 rounding.

    Both are smooth functions of the same data; 25 steps of a few dozen roundings, relative 1e-16 each and amplified
    less than tenfold by training, stay far below 1e-12.

    CASES 39.
    """
    slim_model, dense_model = make_model(torch.float64), make_model(torch.float64)
    settings: Options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": nesterov}
    ours = torch.optim.SGD(slim_model.parameters(), **settings)
    dense = torch.optim.SGD(dense_model.parameters(), **settings)
    train(slim_model, slim(dict(slim_model.named_parameters()), ours, **options), 25)
    train(dense_model, hvd.DistributedOptimizer(dense, named_parameters=dense_model.named_parameters()), 25)

    assert np.abs(flatten(slim_model.parameters()) - flatten(dense_model.parameters())).max() < 1e-12
    assert np.abs(flatten(slim_model.parameters()) - flatten(make_model(torch.float64).parameters())).max() > 0.05
    assert identical_on_all_ranks(list(slim_model.parameters()))


def test_slim_is_not_dense() -> None:
    """The test above can tell: at the reference setting the trajectory is another one."""
    slim_model, dense_model = make_model(torch.float64), make_model(torch.float64)
    train(slim_model, slim(dict(slim_model.named_parameters()), torch.optim.SGD(slim_model.parameters(), lr=0.05)), 25)
    dense = torch.optim.SGD(dense_model.parameters(), lr=0.05)
    train(dense_model, hvd.DistributedOptimizer(dense, named_parameters=dense_model.named_parameters()), 25)
    difference = np.abs(flatten(slim_model.parameters()) - flatten(dense_model.parameters())).max()
    assert difference == 0.0 if hvd.size() == 1 else difference > 1e-4


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam], ids=lambda c: c.__name__)
def test_one_rank_is_plain_torch(make: Callable[..., torch.optim.Optimizer]) -> None:
    """CASES 41. To the bit, and nothing is sent: every rank alone in a process set of its own."""
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())] if hvd.size() > 1 else [None]
    try:
        slim_model = make_model(torch.float32)
        plain_model = copy.deepcopy(slim_model)
        options = {"reselect_every": 2, "resync_every": 3, "restore_norm": True}
        named = dict(slim_model.named_parameters())
        optimizer = slim(named, make(named.values(), lr=0.05), alone[hvd.rank()], **options)
        train(slim_model, optimizer, 20)
        train(plain_model, make(plain_model.parameters(), lr=0.05), 20)

        for ours, plain in zip(slim_model.parameters(), plain_model.parameters()):
            assert torch.equal(ours, plain)
        optimizer.resync()
        live = copies(named.values())
        with optimizer.global_parameters():
            assert all(torch.equal(a, b) for a, b in zip(live, named.values()))
        stats = optimizer.stats()
        assert stats.pop("steps") == 20
        assert not any(flat_values(stats)), stats
    finally:
        for process_set in alone:
            if process_set is not None:
                hvd.remove_process_set(process_set)


def flat_values(stats: dict[str, Any]) -> list[Any]:
    """Every number in the counters."""
    values: list[Any] = []
    for value in stats.values():
        values += flat_values(value) if isinstance(value, dict) else [value]
    return values


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "SGD"])
def test_restored_norm(kind: str) -> None:
    """A merged change is as long as the ranks' own, in the mean of squares, at most √K times the plain mean.

    By itself for adaptive optimizers, and not for SGD, whose plain mean is data parallelism already. γ has 12 digits.
    """
    for restore_norm in (None, True, False):
        model = make_model(torch.float64)
        parameters = list(model.parameters())
        optimizer = slim(
            dict(model.named_parameters()),
            getattr(torch.optim, kind)(parameters, lr=0.01),
            comm_fraction=1.0,
            core_fraction=1.0,
            restore_norm=restore_norm,
        )
        stepped: list[np.ndarray] = []
        optimizer.register_step_post_hook(lambda *_: stepped.append(flatten(parameters)))  # noqa: B023
        for step in range(5):
            before = flatten(parameters)
            train(model, optimizer, 1)
            moved = gather(stepped[step] - before)
            mean, merged = moved.mean(axis=0), flatten(parameters) - before
            plain = float(np.linalg.norm(mean))
            wanted = min(float(np.sqrt(np.square(moved).sum(axis=1).mean())), np.sqrt(hvd.size()) * plain)
            if restore_norm is False or (restore_norm is None and kind == "SGD"):
                wanted = plain
            assert abs(np.linalg.norm(merged) / wanted - 1) < 2.0**-11
            assert mean @ merged > 0.999999 * plain * np.linalg.norm(merged), "the direction is the mean's"
            if hvd.size() > 1 and kind != "SGD" and restore_norm is not False:
                assert np.linalg.norm(merged) > 1.02 * plain, "Adam's mean of steps is shorter than its steps"
