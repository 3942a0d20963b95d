"""What holds after every round, whatever is chosen: nothing is lost, nothing is counted twice, all ranks agree on w̄."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_slim as hvd
from ranks.support import (
    Case,
    MomentumSGD,
    core_of,
    explored_by,
    flatten,
    gather,
    global_vector,
    random_options,
    set_gradients,
    slim,
)

ROUNDS = 40
CASES = [
    Case("reference setting", 21, {}),
    *(Case(f"random {seed}", seed, random_options(np.random.default_rng(seed))) for seed in (22, 24, 27)),
    Case("all explored by all", 20, {"comm_fraction": 1.0, "core_fraction": 0.1, "reselect_every": 3}),
    Case("dense", 28, {"exchange": "dense"}),
]


def rounding(values: np.ndarray, operations: int) -> float:
    """What ``operations`` float64 operations on numbers of this size can be wrong by."""
    return operations * 2.0**-53 * float(np.abs(values).max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_pending_update_is_what_was_learned_and_not_yet_sent(case: Case) -> None:
    """Bookkeeping in float64 of what every rank learned (its optimizer's steps) and sent (u at C and E_k).

    After every round: w_k − w̄ = learned − sent; w̄ − w̄_0 = mean over ranks of sent; w̄ has the same bits everywhere.
    """
    named = case.parameters(torch.float64)
    parameters = list(named.values())
    optimizer = slim(named, MomentumSGD.torch(parameters), **case.options)
    stepped: list[np.ndarray] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(flatten(parameters)))  # before the round
    w_bar_0 = w_bar = flatten(parameters)
    learned, sent = np.zeros_like(w_bar), np.zeros_like(w_bar)

    for step in range(ROUNDS):
        before, rounds = flatten(parameters), optimizer.stats()["rounds"]
        set_gradients(parameters, case.gradient(hvd.rank(), step, len(w_bar)))
        optimizer.step()
        learned += stepped[-1] - before
        stats = optimizer.stats()
        if stats["rounds"] > rounds:
            where = sent_by_me(case, optimizer, len(w_bar))
            sent[where] += stepped[-1][where] - w_bar[where]
        w, w_bar = flatten(parameters), global_vector(optimizer, parameters)

        bound = rounding(np.stack([w, w_bar, learned, sent]), 20 * (step + 1) * hvd.size())
        sent_by_all, w_bars = np.split(gather(np.concatenate([sent, w_bar])), 2, axis=1)
        if hvd.size() > 1:
            assert np.abs((w - w_bar) - (learned - sent)).max() <= bound
            assert np.abs((w_bar - w_bar_0) - sent_by_all.mean(axis=0)).max() <= bound
        assert all(row.tobytes() == w_bar.tobytes() for row in w_bars)
    assert np.abs(learned).max() > 0.1
    assert np.abs(sent).max() > 0.1 or hvd.size() == 1


def sent_by_me(case: Case, optimizer: object, n: int) -> np.ndarray:
    """The coordinates that this rank sent in the latest round."""
    rounds = optimizer.stats()["rounds"]  # type: ignore[attr-defined]
    resync_every = case.options.get("resync_every", 0)
    if case.options.get("exchange") == "dense" or (resync_every and rounds % resync_every == 0):
        return np.arange(n)
    return np.concatenate([core_of(optimizer), explored_by(optimizer, rounds - 1, hvd.rank())])


class LambLike(torch.optim.Optimizer):
    """Scales each whole tensor's step by the ratio of two norms."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                w.sub_(w.grad, alpha=group["lr"] * float(w.norm() / w.grad.norm().clamp(min=1e-3)))


class MuonLike(torch.optim.Optimizer):
    """Steps along the nearest orthogonal matrix, for which it needs whole matrices."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                direction = w.grad
                if w.dim() > 1:
                    u, _, v = torch.linalg.svd(w.grad.flatten(1), full_matrices=False)
                    direction = (u @ v).view(w.shape)
                w.sub_(direction, alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Nesterov": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": torch.optim.AdamW,
    "Adam, foreach": functools.partial(torch.optim.Adam, foreach=True),
    "AdamW, fused": functools.partial(torch.optim.AdamW, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "LAMB-like": LambLike,
    "Muon-like": MuonLike,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_mean_of_the_replicas_moves_by_the_mean_of_their_steps(make: Callable[..., torch.optim.Optimizer]) -> None:
    """No exchange changes the mean over ranks of w_k, whatever the optimizer: it only moves between w̄ and the u's.

    A real model on data of each rank's own, with clipping; nothing here knows of index sets.

    CASES 20.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    model.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = list(model.parameters())
    optimizer = slim(
        dict(model.named_parameters()),
        make(parameters, lr=0.05),
        comm_fraction=0.2,
        core_fraction=0.1,
        reselect_every=4,
        restore_norm=False,
    )
    stepped: list[np.ndarray] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(flatten(parameters)))
    generator = torch.Generator().manual_seed(hvd.rank())
    expected = flatten(parameters)

    for step in range(20):
        images = torch.randn(8, 1, 6, 6, dtype=torch.float64, generator=generator)
        labels = torch.randint(5, (8,), generator=generator)
        before = flatten(parameters)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        expected += gather(stepped[-1] - before).mean(axis=0)
        replicas = gather(flatten(parameters))
        bound = rounding(replicas, 20 * (step + 1) * hvd.size())
        assert np.abs(replicas.mean(axis=0) - expected).max() <= bound
    assert hvd.size() == 1 or np.abs(replicas - replicas[0]).max() > 1e-3, "replicas of a slim run drift apart"
