"""One process: the slim optimizer is the wrapped one, to its class, state, hooks and schedulers."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import hvd_slim as hvd
from unit.training import OPTIMIZERS, every_optimizer, net, same, slim, train

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("error")]


# One rank is plain torch ---------------------------------------------------------------------------------------------


@every_optimizer
def test_one_rank_trains_as_plain_torch_does(kind: str) -> None:
    """CASES 20 and 41. Bit for bit, and nothing is sent."""
    plain, model = net(), net()
    train(plain, OPTIMIZERS[kind](plain.parameters()), 0, 10)
    optimizer = slim(OPTIMIZERS[kind](model.parameters()), model)
    train(model, optimizer, 0, 10)
    assert same(plain, model)
    assert optimizer.stats()["total_bytes_sent"] == 0
    assert sum(optimizer.stats()["collectives"].values()) == 0
    assert optimizer.stats()["steps"] == 10


@every_optimizer
def test_wrapping_in_the_middle_of_training_changes_nothing(kind: str) -> None:
    """CASES 8. Momentum and moments are kept: they are the same objects."""
    plain, model = net(), net()
    train(plain, OPTIMIZERS[kind](plain.parameters()), 0, 10)
    bare = OPTIMIZERS[kind](model.parameters())
    train(model, bare, 0, 5)
    state = {parameter: dict(values) for parameter, values in bare.state.items()}
    optimizer = slim(bare, model)
    assert optimizer is bare
    for parameter, values in state.items():
        assert all(optimizer.state[parameter][name] is value for name, value in values.items())
    train(model, optimizer, 5, 10)
    assert same(plain, model)


@every_optimizer
def test_class(kind: str) -> None:
    """CASES 9."""
    bare = OPTIMIZERS[kind](net().parameters())
    base, text = type(bare), repr(bare)
    optimizer = slim(bare)
    assert isinstance(optimizer, base)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer).__name__ == base.__name__
    assert repr(optimizer) == text
    assert type(optimizer) is type(slim(OPTIMIZERS[kind](net().parameters())))


@pytest.mark.parametrize(("kind", "explorer"), [("momentum", "random"), ("Adam", "shared")])
def test_what_was_left_open_is_decided_by_the_optimizer(kind: str, explorer: str) -> None:
    settings = slim(OPTIMIZERS[kind](net().parameters())).state_dict()["hvd_slim"]["config"]
    assert (settings["explorer"], settings["restore_norm"]) == (explorer, None)


def test_the_bare_class_is_left_alone() -> None:
    slim(OPTIMIZERS["momentum"](net().parameters()))
    plain, model = net(), net()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 0, 3)
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not hasattr(bare, "stats")
    train(model, bare, 0, 3)
    assert same(plain, model)


def test_a_subclass_of_the_returned_class() -> None:
    """CASES 10."""
    model, plain = net(), net()
    optimizer = slim(OPTIMIZERS["momentum"](model.parameters()), model)

    class Louder(type(optimizer)):  # type: ignore[misc]
        """Counts its steps."""

        calls = 0

        def step(self, closure: Any = None) -> Any:
            """As before."""
            self.calls += 1
            return super().step(closure)

    optimizer.__class__ = Louder
    train(model, optimizer, 0, 4)
    train(plain, OPTIMIZERS["momentum"](plain.parameters()), 0, 4)
    assert optimizer.calls == 4
    assert same(plain, model)


def test_other_compression_gives_plain_horovods_optimizer() -> None:
    import horovod.torch as horovod

    expected = type(horovod.DistributedOptimizer(OPTIMIZERS["SGD"](net().parameters())))
    for compression in (None, hvd.Compression.none, hvd.Compression.fp16):
        model = net()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), model.named_parameters(), compression=compression
        )
        assert type(optimizer).__mro__[1:] == expected.__mro__[1:]
        assert not hasattr(optimizer, "stats")
    assert hvd.Compression.none is horovod.Compression.none
    assert hvd.Compression.fp16 is horovod.Compression.fp16
    for name in ("allreduce", "rank", "size", "broadcast_", "Average", "barrier", "SyncBatchNorm"):
        assert getattr(hvd, name) is getattr(horovod, name)
        assert name in dir(hvd)
    with pytest.raises(AttributeError, match="neither hvd_slim nor horovod.torch has an attribute 'alreduce'"):
        hvd.alreduce  # noqa: B018


def test_global_generators_are_left_alone() -> None:
    """CASES 38."""
    model = net()
    optimizer = slim(OPTIMIZERS["SGD"](model.parameters()), model)
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    train(model, optimizer, 0, 3)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])


# Hooks, closures, gradients -----------------------------------------------------------------------------------------


def test_hooks_run_exactly_once_and_see_what_they_would_see() -> None:
    calls: list[tuple[str, Any, Any]] = []
    model = net()
    bare = OPTIMIZERS["momentum"](model.parameters())
    bare.register_step_pre_hook(lambda o, args, kwargs: calls.append(("before wrapping", args[1:], kwargs)))
    optimizer = slim(bare, model)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("pre", args[1:], kwargs)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("post", args[1:], kwargs)))
    every = register_optimizer_step_post_hook(lambda o, args, kwargs: calls.append(("global", args[1:], kwargs)))
    try:
        train(model, optimizer, 0, 1)
    finally:
        every.remove()
    assert calls == [(name, (), {}) for name in ("before wrapping", "pre", "post", "global")]


def test_a_pre_hook_may_change_the_arguments() -> None:
    model = net()
    optimizer = slim(OPTIMIZERS["SGD"](model.parameters()), model)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((args[0], lambda: 42.0), {}))
    assert optimizer.step() == 42.0


def test_state_dict_hooks_run() -> None:
    calls: list[str] = []
    optimizer = slim(OPTIMIZERS["SGD"](net().parameters()))
    optimizer.register_state_dict_post_hook(lambda o, state: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saved", "loaded"]


@pytest.mark.parametrize("by_name", [True, False])
def test_closure(by_name: bool) -> None:
    """CASES 14. Evaluated once, in the local step; its loss is what ``step`` returns."""
    model, calls = net(), 0
    optimizer = slim(OPTIMIZERS["momentum"](model.parameters()), model)

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        return loss

    before = copy.deepcopy(model)
    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert calls == 1
    assert torch.equal(loss, before(torch.ones(4, 6)).square().mean())
    assert not same(model, before)


def test_zero_grad_is_torchs() -> None:
    """CASES 11."""
    model = net()
    optimizer = slim(OPTIMIZERS["SGD"](model.parameters()), model)
    optimizer.zero_grad()  # before any backward pass
    model(torch.ones(1, 6)).sum().backward()
    optimizer.zero_grad()  # between backward and step
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad.eq(0).all() for parameter in model.parameters() if parameter.grad is not None)
    assert type(optimizer).zero_grad is torch.optim.Optimizer.zero_grad


def test_horovods_clipping_recipe() -> None:
    """CASES 13."""
    model = net()
    optimizer = slim(OPTIMIZERS["SGD"](model.parameters()), model)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert optimizer.stats()["steps"] == 1


def test_sparse_as_dense() -> None:
    table, plain = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Embedding(5, 3)
    plain.load_state_dict(table.state_dict())
    table(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        torch.optim.Adam(table.parameters()).step()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(table.parameters()), compression=hvd.Compression.slim(), sparse_as_dense=True
    )
    plain(torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    torch.optim.Adam(plain.parameters()).step()
    assert torch.equal(table.weight, plain.weight)


def test_sparse_gradient_stays_sparse() -> None:
    """CASES 26."""
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = slim(torch.optim.SparseAdam(table.parameters()))
    table(torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse


def test_parameters_that_join_later() -> None:
    """CASES 15. ``add_param_group`` and thawing after wrapping, as in torch."""
    models = net(), net()
    for number, model in enumerate(models):
        first, last = model[0], model[2]  # type: ignore[index]
        first.bias.requires_grad_(False)
        optimizer: Any = torch.optim.SGD(first.parameters(), lr=0.1)
        if number:
            optimizer = slim(optimizer, model)
        train(model, optimizer, 0, 3)
        first.bias.requires_grad_(True)
        optimizer.add_param_group({"params": last.parameters(), "lr": 0.05})
        train(model, optimizer, 3, 6)
    assert same(*models)


def test_two_optimizers_with_equal_names() -> None:
    """CASES 17. A GAN: the generator's loss goes through the discriminator, each has its optimizer, names collide."""
    results = []
    for wrapped in (False, True):
        generator, discriminator = net(), torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Linear(5, 1))
        with torch.no_grad():
            for parameter in discriminator.parameters():
                parameter.fill_(0.1)
        optimizers: list[Any] = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, discriminator)]
        if wrapped:
            optimizers = [slim(o, m) for o, m in zip(optimizers, (generator, discriminator))]
        for step in range(5):
            noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            optimizers[0].zero_grad()
            discriminator(generator(noise)).mean().backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (-discriminator(generator(noise).detach())).mean().backward()
            optimizers[1].step()
        results.append(torch.nn.ModuleList([generator, discriminator]))
    assert same(*results)


def test_global_parameters_on_one_rank() -> None:
    model = net()
    optimizer = slim(OPTIMIZERS["momentum"](model.parameters()), model)
    for steps in (0, 3):
        train(model, optimizer, 0, steps)
        before = copy.deepcopy(model)
        with optimizer.global_parameters():
            assert same(model, before)
        optimizer.resync()
        assert same(model, before)


def test_one_rank_keeps_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """CASES 41."""
    model = net()
    optimizer = slim(torch.optim.SGD(model.parameters(), lr=0.1), model, resync_every=2)
    with caplog.at_level(logging.INFO, "hvd_slim"):
        train(model, optimizer, 0, 6)
    assert [record.getMessage() for record in caplog.records] == [
        "one rank: nothing is exchanged, training runs as without hvd_slim"
    ]
    assert optimizer._slim.synchronizer()._exchange is None
    assert not any(optimizer.stats()["collectives"].values())
