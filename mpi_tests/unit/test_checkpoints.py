"""Copies and files: deepcopy, pickle, ``torch.save`` and ``state_dict`` of the slim optimizer, on one process."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unit.training import OPTIMIZERS, every_optimizer, net, same, slim, train

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("error")]


def trained(kind: str, steps: int = 5) -> tuple[torch.nn.Module, Any]:
    """A model and its slim optimizer after some steps."""
    model = net()
    optimizer = slim(OPTIMIZERS[kind](model.parameters()), model)
    train(model, optimizer, 0, steps)
    return model, optimizer


@every_optimizer
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_train_on(kind: str, copier: Callable[[Any], Any]) -> None:
    """CASES 9. deepcopy and pickle of model and optimizer together: the copy goes on exactly as the original does."""
    model, optimizer = trained(kind)
    model_copy, optimizer_copy = copier((model, optimizer))
    assert type(optimizer_copy) is type(optimizer)
    assert optimizer_copy.param_groups[0]["params"][0] is next(iter(model_copy.parameters()))
    train(model, optimizer, 5, 10)
    train(model_copy, optimizer_copy, 5, 10)
    assert same(model, model_copy)
    assert optimizer_copy.stats()["steps"] >= 5


def test_torch_save_of_the_optimizer_and_of_a_scheduler_that_holds_it() -> None:
    """CASES 9."""
    model, optimizer = trained("momentum")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    file = io.BytesIO()
    torch.save((model, optimizer, scheduler), file)
    file.seek(0)
    model_copy, optimizer_copy, scheduler_copy = torch.load(file, weights_only=False)
    assert scheduler_copy.optimizer is optimizer_copy
    train(model_copy, optimizer_copy, 5, 7)
    scheduler_copy.step()
    train(model, optimizer, 5, 7)
    scheduler.step()
    assert same(model, model_copy)
    assert optimizer_copy.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@every_optimizer
def test_state_dict_is_plain_data(kind: str) -> None:
    """``torch.load`` with ``weights_only=True`` reads it, and a fresh slim optimizer goes on from it."""
    model, optimizer = trained(kind)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net()
    again.load_state_dict(saved["model"])
    resumed = slim(OPTIMIZERS[kind](again.parameters()), again)
    resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, 5, 10)
    train(again, resumed, 5, 10)
    assert same(model, again)


@every_optimizer
def test_state_moves_to_the_bare_optimizer_and_back(kind: str) -> None:
    """CASES 31."""
    model, optimizer = trained(kind)
    plain = copy.deepcopy(model)
    bare = OPTIMIZERS[kind](plain.parameters())
    bare.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch loads tensors without a copy
    again = copy.deepcopy(model)
    wrapped = slim(OPTIMIZERS[kind](again.parameters()), again)
    wrapped.load_state_dict(copy.deepcopy(bare.state_dict()))
    for m, o in ((model, optimizer), (plain, bare), (again, wrapped)):
        train(m, o, 5, 10)
    assert same(model, plain)
    assert same(model, again)


def test_loading_leaves_the_given_state_alone() -> None:
    model, optimizer = trained("momentum")
    state = optimizer.state_dict()
    keys = set(state), set(state["hvd_slim"])
    optimizer.load_state_dict(state)
    assert (set(state), set(state["hvd_slim"])) == keys


def test_state_of_a_later_version_is_refused() -> None:
    _, optimizer = trained("momentum")
    state = optimizer.state_dict()
    state["hvd_slim"]["version"] = 99
    with pytest.raises(ValueError, match="version 99"):
        optimizer.load_state_dict(state)


def test_counters_go_on_where_they_stopped() -> None:
    model, optimizer = trained("SGD", 5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 5, 8)
    assert optimizer.state_dict()["hvd_slim"]["steps"] == 8
