"""What scripts do between steps: give parameters new memory, load another rank's checkpoint, resync at any time."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_slim as hvd
from ranks.support import (
    Case,
    Named,
    Options,
    copies,
    flatten,
    gather,
    global_model,
    identical_on_all_ranks,
    set_gradients,
    slim,
)  # fmt: skip

CASE = Case("between", 71, {}, most=300)
PATHS: list[Options] = [
    {"exchange": "allgather"},
    {"exchange": "alltoall"},
    {"exchange": "allreduce", "explorer": "leader"},
    {"exchange": "dense"},
]
every_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path["exchange"])
overlap_or_not = pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlap"])


class Assigns(torch.optim.Optimizer):
    """Gives parameters new memory in every step."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.125})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


def train(named: Named, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        set_gradients(named.values(), CASE.gradient(hvd.rank(), step, len(flatten(named.values()))))
        optimizer.step()


def save(named: Named, optimizer: Any) -> bytes:
    file = io.BytesIO()
    torch.save([{name: p.detach() for name, p in named.items()}, optimizer.state_dict()], file)
    return file.getvalue()


def load(data: bytes, **options: Any) -> tuple[Named, Any]:
    weights, state = torch.load(io.BytesIO(data), weights_only=True)
    named = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    optimizer = slim(named, **options)
    optimizer.load_state_dict(state)
    return named, optimizer


@every_path
@overlap_or_not
def test_an_optimizer_that_assigns_new_memory(path: Options, overlap: bool) -> None:
    """As one that writes into the old: the same bits."""
    ends = []
    for make in (Assigns, lambda parameters: torch.optim.SGD(parameters, lr=0.125)):
        named = CASE.parameters()
        optimizer = slim(named, make(named.values()), overlap=overlap, **path)
        train(named, optimizer, range(7))
        optimizer.resync()
        assert identical_on_all_ranks(list(named.values()))
        ends.append(flatten(named.values()))
        optimizer._slim.renew()
    np.testing.assert_array_equal(ends[0], ends[1])


@every_path
@overlap_or_not
def test_memory_exchanged_before_a_resync(path: Options, overlap: bool) -> None:
    named = CASE.parameters()
    optimizer = slim(named, overlap=overlap, **path)
    train(named, optimizer, range(3))
    for parameter in named.values():
        parameter.data = parameter.data.clone()
    optimizer.resync()
    assert identical_on_all_ranks(list(named.values()))
    assert identical_on_all_ranks(global_model(optimizer, named.values()))
    optimizer._slim.renew()


@every_path
@overlap_or_not
def test_all_ranks_load_the_file_of_rank_0(path: Options, overlap: bool) -> None:
    """After a resync, everything that matters is in it; what belongs to rank 0 alone is nobody else's."""
    named = CASE.parameters()
    optimizer = slim(named, overlap=overlap, **path)
    train(named, optimizer, range(5))
    optimizer.resync()
    equal = flatten(named.values())
    train(named, optimizer, range(5, 6) if overlap else ())
    data = hvd.broadcast_object(save(named, optimizer), name="file")
    optimizer._slim.renew()
    again, resumed = load(data, overlap=overlap, **path)
    if not overlap:
        np.testing.assert_array_equal(flatten(again.values()), equal)
    resumed.resync()
    assert identical_on_all_ranks(list(again.values()))
    if not overlap:
        np.testing.assert_allclose(flatten(again.values()), equal, atol=1e-6)
    train(again, resumed, range(6, 9))
    assert identical_on_all_ranks(global_model(resumed, again.values()))
    resumed._slim.renew()


@every_path
def test_a_state_in_flight_is_a_copy(path: Options) -> None:
    """Kept in memory while training goes on, and loaded twice."""
    named = CASE.parameters()
    optimizer = slim(named, overlap=True, **path)
    train(named, optimizer, range(4))
    weights, state = copies(named.values()), optimizer.state_dict()
    kept = copy.deepcopy(state)
    train(named, optimizer, range(4, 8))
    end = flatten(named.values())
    for taken in (state, state, kept):
        again = CASE.parameters()
        with torch.no_grad():
            for parameter, weight in zip(again.values(), weights):
                parameter.copy_(weight)
        resumed = slim(again, overlap=True, **path)
        resumed.load_state_dict(taken)
        train(again, resumed, range(4, 8))
        np.testing.assert_array_equal(flatten(again.values()), end)
        resumed._slim.renew()
    optimizer._slim.renew()


@every_path
def test_resumed_with_another_core(path: Options) -> None:
    """A new core is chosen at once; ranks that knew different parts of a spread w̄ are told all of it before."""
    named = CASE.parameters()
    optimizer = slim(named, reselect_every=50, **path)
    train(named, optimizer, range(5))
    data = save(named, optimizer)
    optimizer._slim.renew()
    again, resumed = load(data, reselect_every=50, core_fraction=0.05, checksum_every=1, **path)
    train(again, resumed, range(5, 9))
    assert identical_on_all_ranks(global_model(resumed, again.values()))
    resumed._slim.renew()


@every_path
def test_a_resync_looks_for_a_nan(path: Options) -> None:
    """Between rounds too; and forgets one that is gone."""
    if hvd.size() == 1:
        return
    named = CASE.parameters()
    optimizer = slim(named, local_steps=4, **path)
    train(named, optimizer, range(5))
    optimizer.resync()
    good = copies(named.values())
    if hvd.rank() == 1:
        next(p for p in named.values() if p.numel()).data.view(-1)[0] = float("nan")
    with pytest.raises(hvd.NonFiniteError, match="rank 1 has a NaN"):
        optimizer.resync()
    with torch.no_grad():
        for parameter, value in zip(named.values(), good):
            parameter.copy_(value)
    optimizer.resync()
    assert all(torch.equal(p, value) for p, value in zip(copies(named.values()), good))
    optimizer._slim.renew()


@every_path
def test_another_dtype_with_a_round_in_flight(path: Options) -> None:
    """The round is given up, and training goes on."""
    named = CASE.parameters()
    optimizer = slim(named, overlap=True, **path)
    train(named, optimizer, range(3))
    for parameter in named.values():
        parameter.data, parameter.grad = parameter.data.double(), None
    train(named, optimizer, range(3, 6))
    optimizer.resync()
    assert identical_on_all_ranks(list(named.values()))
    assert all(parameter.dtype == torch.float64 for parameter in named.values())
    optimizer._slim.renew()


@every_path
def test_right_after_a_checkpoint(path: Options) -> None:
    """global_parameters() shows the saved w̄ before any step, and a resync makes replicas equal."""
    named = CASE.parameters()
    optimizer = slim(named, **path)
    train(named, optimizer, range(5))
    data, w_bar = save(named, optimizer), global_model(optimizer, named.values())
    optimizer._slim.renew()
    again, resumed = load(data, **path)
    live = copies(again.values())
    if path["exchange"] == "alltoall" and hvd.size() > 1:
        with (
            pytest.raises(RuntimeError, match=r"call resync\(\) or step\(\) on every rank"),
            resumed.global_parameters(),
        ):
            pass
    else:
        with resumed.global_parameters():
            assert all(torch.equal(a, b) for a, b in zip(copies(again.values()), w_bar))
    assert all(torch.equal(a, b) for a, b in zip(copies(again.values()), live))
    resumed.resync()
    assert identical_on_all_ranks(list(again.values()))
    if path["exchange"] == "alltoall":
        resumed._slim.renew()
        return  # w_k lie around what each rank has seen of w̄
    rows = gather(np.concatenate([np.zeros(1), *(value.view(-1).numpy() for value in live)]))
    mean = np.concatenate([np.zeros(1), *(value.view(-1).numpy() for value in copies(again.values()))])
    np.testing.assert_allclose(mean, rows.mean(0), atol=1e-5)  # nothing that was pending is lost
    resumed._slim.renew()


def test_a_checkpoint_that_does_not_fit_on_one_rank() -> None:
    """Every rank raises at once."""
    if hvd.size() == 1:
        return
    named = {"w": torch.nn.Parameter(torch.ones(3, 4))}
    optimizer = slim(named)
    named["w"].grad = torch.ones(3, 4)
    optimizer.step()
    data = save(named, optimizer)
    optimizer._slim.renew()
    again, resumed = load(data)
    if hvd.rank() == 1:
        again = {"w": torch.nn.Parameter(torch.ones(4, 3).t())}
        resumed = slim(again)
        resumed.load_state_dict(torch.load(io.BytesIO(data), weights_only=True)[1])
    with pytest.raises(ValueError, match="whether the checkpoint is of this model|memory order"):
        resumed.step()
    resumed._slim.renew()


def test_resync_every_with_dense_narrow_values() -> None:
    """What rounding kept back is settled then."""
    named = CASE.parameters()
    optimizer = slim(named, exchange="dense", value_dtype="int4", resync_every=3)
    train(named, optimizer, range(3))
    assert identical_on_all_ranks(list(named.values()))
    train(named, optimizer, range(3, 5))
    assert identical_on_all_ranks(list(named.values())) == (hvd.size() == 1)
    optimizer._slim.renew()
