"""Learning-rate schedulers made before or after wrapping, on one process: as in torch, and without a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unit.training import net, same, slim, train

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("error")]

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


def scheduled(kind: str, wrap: str) -> tuple[list[float], torch.nn.Module]:
    """Learning rates and model of a run whose scheduler is made before or after wrapping, or that is not wrapped."""
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if wrap == "before the scheduler":
        optimizer = slim(optimizer, model)
    scheduler = SCHEDULERS[kind](optimizer)
    if wrap == "after the scheduler":
        optimizer = slim(optimizer, model)
    rates = []
    for step in range(15):
        train(model, optimizer, step, step + 1)
        scheduler.step(1.0) if kind == "ReduceLROnPlateau" else scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, model


@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
@pytest.mark.parametrize("wrap", ["before the scheduler", "after the scheduler"])
def test_schedulers(kind: str, wrap: str) -> None:
    """As without wrapping, and (warnings are errors here) without "lr_scheduler.step() before optimizer.step()".

    CASES 9.
    """
    rates, model = scheduled(kind, wrap)
    plain_rates, plain = scheduled(kind, "never")
    assert rates == plain_rates
    assert len(set(rates)) > 1
    assert same(model, plain)


@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.filterwarnings("default")
def test_the_schedulers_own_warning_still_works(wrapped_first: bool) -> None:
    """A schedule that is stepped before the optimizer ever was is a mistake of the user's, and torch says so."""
    optimizer: Any = torch.optim.SGD(net().parameters(), lr=0.1)
    if wrapped_first:
        optimizer = slim(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if not wrapped_first:
        optimizer = slim(optimizer)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
