"""Ranks that differ: every rank is told within seconds, with both values, and can still talk to the others."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import hvd_slim as hvd
from ranks.support import Named, copies, global_model, identical_on_all_ranks, slim

SECONDS = 50.0  # on a busy machine; Horovod would report a stall after 60


def make_model() -> Named:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (4, 3), "second": (5,), "third": (2, 3, 2, 2)}
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def give_gradients(named: Named) -> None:
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)


def other_shape(named: Named) -> Named:
    return {**named, "first": Parameter(torch.zeros(3, 4))}


def other_dtype(named: Named) -> Named:
    return {**named, "second": Parameter(torch.zeros(5, dtype=torch.float64))}


def other_order(named: Named) -> Named:
    return {name: named[name] for name in ("second", "first", "third")}


def other_name(named: Named) -> Named:
    return {"first" if name == "first" else "zweite" if name == "second" else name: p for name, p in named.items()}


def one_more(named: Named) -> Named:
    return {**named, "fourth": Parameter(torch.zeros(7))}


def one_less(named: Named) -> Named:
    return {name: named[name] for name in ("first", "second")}


def other_memory_order(named: Named) -> Named:
    return {**named, "third": Parameter(named["third"].detach().to(memory_format=torch.channels_last))}


MODELS: list[tuple[Callable[[Named], Named], str, str]] = [
    (other_shape, "shape 4x3", "shape 3x4"),
    (other_dtype, "dtype float32", "dtype float64"),
    (other_order, "'first'", "'second'"),
    (other_name, "'second'", "'zweite'"),
    (one_more, "nothing", "'fourth'|shape 7"),
    (one_less, "'third'|shape 2x3x2x2", "nothing"),
    (other_memory_order, r"\[0, 1, 2, 3\]", r"\[0, 2, 3, 1\]"),
]
OPTIONS: list[tuple[str, Any, Any]] = [
    ("comm_fraction", 0.3, 0.4),
    ("core_fraction", 0.15, 0.2),
    ("reselect_every", 20, 21),
    ("resync_every", 0, 5),
    ("local_steps", 1, 2),
    ("gradient_weight", 1.0, 0.5),
    ("normalize", True, False),
    ("exchange", "allgather", "dense"),
    ("seed", 0, 7),
]


def all_ranks_are_told(named: Named, optimizer: Any, value: str, other: str) -> None:
    """The first step raises on every rank, soon, and names both values; afterwards the ranks still communicate."""
    give_gradients(named)
    before = copies(named.values())
    begin = time.monotonic()
    with pytest.raises(hvd.RankMismatchError) as raised:
        optimizer.step()
    assert time.monotonic() - begin < SECONDS
    message = str(raised.value)
    assert re.search(value, message), message
    assert re.search(other, message), message
    assert f"ranks 0 and {hvd.size() - 1} " in message
    assert all(torch.equal(a, b) for a, b in zip(before, named.values())), "nothing is trained on a disagreement"

    hvd.barrier()
    named = make_model()
    optimizer = slim(named)
    give_gradients(named)
    optimizer.step()
    assert identical_on_all_ranks(global_model(optimizer, named.values()))


@pytest.mark.parametrize(("change", "value", "other"), MODELS, ids=[change.__name__ for change, _, _ in MODELS])
def test_another_model_on_the_last_rank(change: Callable[[Named], Named], value: str, other: str) -> None:
    """CASES 1."""
    named = make_model()
    if hvd.rank() == hvd.size() - 1:
        named = change(named)
    if hvd.size() == 1:
        give_gradients(named)
        slim(named).step()  # nobody to disagree with
        return
    all_ranks_are_told(named, slim(named), value, other)


@pytest.mark.parametrize(("option", "value", "other"), OPTIONS, ids=[option for option, _, _ in OPTIONS])
def test_another_option_on_the_last_rank(option: str, value: Any, other: Any) -> None:
    """CASES 1."""
    named = make_model()
    last = hvd.rank() == hvd.size() - 1
    optimizer = slim(named, **{option: other if last else value})
    if hvd.size() == 1:
        give_gradients(named)
        optimizer.step()
        return
    all_ranks_are_told(named, optimizer, rf"\b{option}\b.*{value!r}", rf"\b{option}\b.*{other!r}")


def test_unequal_initial_parameters_become_rank_0s(caplog: pytest.LogCaptureFixture) -> None:
    """With a warning on rank 0 alone. Gradients are zero, so that the first step shows what it started from."""
    named = make_model()
    of_rank_0 = copies(named.values())
    with torch.no_grad():
        named["second"].add_(hvd.rank())
    optimizer = slim(named)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    with caplog.at_level(logging.WARNING, logger="hvd_slim"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(of_rank_0, named.values()))
    warnings = [record.getMessage() for record in caplog.records if "different parameters" in record.getMessage()]
    assert len(warnings) == (hvd.size() > 1 and hvd.rank() == 0)
    assert all("rank 0's are broadcast" in warning for warning in warnings)


def test_equal_initial_parameters_are_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    named = make_model()
    optimizer = slim(named)
    give_gradients(named)
    with caplog.at_level(logging.WARNING, logger="hvd_slim"):
        optimizer.step()
    assert not caplog.records
    assert optimizer.stats()["bytes_sent"]["start"] == 0
