"""One small training run: models, optimizers and steps that the drop-in tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_slim as hvd

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "without closure": lambda p: WithoutClosure(p),
}
every_optimizer = pytest.mark.parametrize("kind", sorted(OPTIMIZERS))


class WithoutClosure(torch.optim.Optimizer):
    """What many people write: ``step`` takes nothing."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Plain gradient descent."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


def net() -> torch.nn.Module:
    """The same small model every time."""
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def slim(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None, **options: Any) -> Any:
    """``optimizer`` wrapped."""
    named = None if model is None else model.named_parameters()
    return hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=hvd.Compression.slim(**options))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Steps ``first`` to ``last`` of a fixed series of batches."""
    for step in range(first, last):
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
