"""Models and optimizers that users bring along, on several ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvd_slim as hvd
from ranks.support import Options, copies, global_model, identical_on_all_ranks

OPTIONS: Options = {"comm_fraction": 0.4, "core_fraction": 0.2, "reselect_every": 3, "exchange": "allgather"}


def wrapped(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.slim(**OPTIONS),
    )


def batch(step: int) -> torch.Tensor:
    """This rank's."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * hvd.rank() + step))


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))


def test_gan() -> None:
    """CASES 17: equal names, and the generator's backward through the discriminator exchanges no discriminator."""
    generator, discriminator = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 1), nn.Tanh())
    assert [name for name, _ in generator.named_parameters()] == [name for name, _ in discriminator.named_parameters()]
    for model in (generator, discriminator):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    of_generator, of_discriminator = wrapped(generator), wrapped(discriminator)
    for step in range(9):
        noise = batch(step)
        of_discriminator.zero_grad()
        loss = discriminator(generator(noise).detach()).mean() - discriminator(batch(100 + step)).mean()
        loss.backward()
        of_discriminator.step()
        before, stats = copies(discriminator.parameters()), of_discriminator.stats()
        of_generator.zero_grad()
        (-discriminator(generator(noise)).mean()).backward()
        of_generator.step()
        assert of_discriminator.stats() == stats
        assert all(torch.equal(a, b) for a, b in zip(before, discriminator.parameters()))
    for model, optimizer in ((generator, of_generator), (discriminator, of_discriminator)):
        assert optimizer.stats()["steps"] == 9
        assert identical_on_all_ranks(global_model(optimizer, model.parameters()))


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_models_that_run_otherwise(how: str) -> None:
    """CASES 21: a compiled model and activation checkpointing train to the same bits as the plain model."""
    plain = net(1)
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="eager") if how == "compiled" else None

    def forward(x: torch.Tensor) -> torch.Tensor:
        return compiled(x) if compiled is not None else checkpoint(other, x, use_reentrant=False)

    optimizers = wrapped(plain), wrapped(other)
    for step in range(6):
        runs: tuple[Any, ...] = (plain, forward)
        for optimizer, run in zip(optimizers, runs):
            optimizer.zero_grad()
            run(batch(step)).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters()))
    assert not any(torch.equal(a, b) for a, b in zip(plain.parameters(), net(1).parameters()))


def test_sparse_adam() -> None:
    """CASES 26: the gradient stays sparse, rows that no rank used stay as they are, and w̄ is the same everywhere."""
    torch.manual_seed(0)
    embedding = nn.Embedding(40, 4, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = wrapped(embedding, torch.optim.SparseAdam(embedding.parameters(), lr=0.05))
    for step in range(8):
        optimizer.zero_grad()
        embedding(torch.tensor([hvd.rank(), 10 + step])).square().sum().backward()
        optimizer.step()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.is_sparse
    optimizer.resync()
    assert identical_on_all_ranks([embedding.weight])
    assert torch.equal(embedding.weight[20:], before[20:])
    assert not torch.equal(embedding.weight[:10], before[:10])
