"""Telling adaptive optimizers, whose averaged updates are too short, from those that are linear in the gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_slim.adaptive import follows_learning_rate, is_adaptive

LINEAR: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, all options": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, no step": lambda p: torch.optim.SGD(p, lr=0.0),
    "SGD, maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}
ADAPTIVE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p),
    "Adam, all options": lambda p: torch.optim.Adam(p, lr=1.0, weight_decay=0.1, amsgrad=True, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, weight_decay=1.0),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW, lr as tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


class Demanding(torch.optim.Optimizer):
    """An optimizer that cannot be tried out: it wants more than parameters."""

    def __init__(self, parameters: Any, schedule: Callable[[int], float]) -> None:
        self.schedule = schedule
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


class Rooted(torch.optim.SGD):
    """Steps with the square root of its rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Down the gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] ** 0.5)


def found(make: Callable[[Any], torch.optim.Optimizer]) -> bool:
    optimizer = make([torch.nn.Parameter(torch.zeros(3, 2))])
    return is_adaptive(type(optimizer), optimizer.defaults)


@pytest.mark.parametrize("name", sorted(LINEAR))
def test_linear(name: str) -> None:
    assert not found(LINEAR[name])


@pytest.mark.parametrize("name", sorted(ADAPTIVE))
def test_adaptive(name: str) -> None:
    assert found(ADAPTIVE[name])


@pytest.mark.parametrize("name", sorted({**LINEAR, **ADAPTIVE}))
def test_proportional_to_the_learning_rate(name: str) -> None:
    """All that torch has."""
    optimizer = {**LINEAR, **ADAPTIVE}[name]([torch.nn.Parameter(torch.zeros(3, 2))])
    assert follows_learning_rate(type(optimizer), optimizer.defaults)


def test_not_proportional_to_the_learning_rate() -> None:
    """One that makes of its rate what it likes."""
    assert not follows_learning_rate(Rooted, {"lr": 0.1})


def test_one_whose_rate_cannot_be_tried_out(caplog: pytest.LogCaptureFixture) -> None:
    """It counts as proportional, and a line says what to do if it is not."""
    with caplog.at_level(logging.WARNING, logger="hvd_slim"):
        assert follows_learning_rate(Demanding, {})
    (record,) = caplog.records
    assert "Demanding" in record.getMessage()
    assert "local_rate" in record.getMessage()


def test_one_that_cannot_be_tried_out(caplog: pytest.LogCaptureFixture) -> None:
    """It counts as linear, and a line says how to set it."""
    with caplog.at_level(logging.WARNING, logger="hvd_slim"):
        assert not found(lambda p: Demanding(p, lambda step: 0.1))
    (record,) = caplog.records
    assert "Demanding" in record.getMessage()
    assert "restore_norm" in record.getMessage()


def test_trying_out_is_nobodys_business() -> None:
    """Hooks on every optimizer of the process see no step that the user did not take; generators stand still."""
    seen: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append(optimizer))
    state = torch.get_rng_state()
    try:
        found(ADAPTIVE["Adam"])
    finally:
        hook.remove()
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)
