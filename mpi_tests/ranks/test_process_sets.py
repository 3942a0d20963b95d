"""CASES 35: disjoint process sets train side by side, each as if it were alone; who is in none returns at once.

Ranks of different sets run different numbers of collectives, so those among all ranks need names: Horovod numbers what
has none by a counter that every operation of a rank moves.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle
from torch.nn import Parameter

import hvd_slim as hvd
from ranks.support import Case, core_of, flatten, set_gradients, slim

PATHS: dict[str, dict[str, Any]] = {
    "allgather": {"exchange": "allgather"},
    "alltoall": {"exchange": "alltoall"},
    "leader": {"exchange": "allreduce", "explorer": "leader"},
    "dense": {"exchange": "dense"},
    "int8": {"exchange": "allgather", "value_dtype": "int8"},
}
every_path = pytest.mark.parametrize("path", PATHS)


@pytest.fixture
def halves() -> Iterator[list[Any]]:
    """Even and odd ranks. A rank may be a set of its own; the set of all ranks is there already."""
    if hvd.size() == 1:
        yield [hvd.global_process_set]
        return
    sets = [hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in range(2)]
    yield sets
    for process_set in sets:
        hvd.remove_process_set(process_set)


def own(halves: list[Any]) -> tuple[int, Any]:
    """Number and set of this rank's half."""
    return hvd.rank() % 2, halves[hvd.rank() % 2]


def train(named: dict[str, Parameter], optimizer: Any, case: Case, place: int, steps: range) -> None:
    """``place`` is the rank whose gradients are taken: the rank within the set."""
    n = sum(parameter.numel() for parameter in named.values())
    for step in steps:
        set_gradients(named.values(), case.gradient(place, step, n))
        optimizer.step()


def agree(values: Any, process_set: Any) -> bool:
    """Whether the members have equal arrays. Collective among them."""
    return len(set(hvd.allgather_object(np.asarray(values).tobytes(), process_set=process_set))) == 1


def test_each_half_follows_its_own_oracle(halves: list[Any]) -> None:
    """Other models, other settings, other numbers of steps at the same time; to the bit in sets of up to two ranks."""
    number, process_set = own(halves)
    of_half: list[dict[str, Any]] = [
        {"reselect_every": 3},
        {"comm_fraction": 0.5, "core_fraction": 0.1, "local_steps": 2},
    ]
    options = of_half[number]
    case = Case(f"half {number}", 91 + number, options, most=200 + 150 * number)
    named = case.parameters()
    start = flatten(named.values()).astype(np.float32)
    oracle = Oracle([start] * process_set.size(), **options)
    optimizer = slim(named, torch.optim.SGD(named.values(), lr=2.0**-5), process_set=process_set, **options)
    for step in range(8 + 12 * number):
        train(named, optimizer, case, process_set.rank(), range(step, step + 1))

        def local_step(k: int, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            gradient = case.gradient(k, step, oracle.n)  # noqa: B023
            return w - np.float32(2.0**-5) * gradient, gradient

        oracle.step(local_step)
    error = np.abs(flatten(named.values()) - oracle.w[process_set.rank()]).max()
    assert error <= (0.0 if process_set.size() <= 2 else 1e-5)
    assert optimizer.stats()["rounds"] == (0 if process_set.size() == 1 else [8, 10][number])


@every_path
def test_every_path_in_a_set(path: str, halves: list[Any]) -> None:
    """Roots are places within the set, whatever the ranks' numbers; a resume and a broadcast stay within it, too."""
    number, process_set = own(halves)
    case = Case("set", 93 + number, {"reselect_every": 3, **PATHS[path]}, most=200)

    def begin() -> tuple[dict[str, Parameter], Any]:
        named = case.parameters()
        bare = torch.optim.SGD(named.values(), lr=2.0**-5, momentum=0.9)
        return named, slim(named, bare, process_set=process_set, **case.options)

    named, optimizer = begin()
    place, root = process_set.rank(), process_set.ranks[-1]
    with torch.no_grad():
        next(iter(named.values())).add_(place)  # unequal starts are made equal within the set
    train(named, optimizer, case, place, range(5))
    named_copy, twin = copy.deepcopy((named, optimizer))
    for n, o in ((named, optimizer), (named_copy, twin)):
        train(n, o, case, place, range(5, 9 + 3 * number))
    assert np.array_equal(flatten(named.values()), flatten(named_copy.values()))

    named, fresh = begin()
    if hvd.rank() == root:
        fresh.load_state_dict(optimizer.state_dict())
        for parameter, trained in zip(named.values(), named_copy.values()):
            parameter.data.copy_(trained)
    hvd.broadcast_parameters(named, root_rank=root, process_set=process_set)
    hvd.broadcast_optimizer_state(fresh, root_rank=root)
    assert agree(flatten(named.values()), process_set)
    train(named, fresh, case, place, range(20, 24))
    with fresh.global_parameters():
        assert agree(flatten(named.values()), process_set)
    assert agree(core_of(fresh), process_set)
    fresh.resync()
    assert agree(flatten(named.values()), process_set)


def test_who_is_in_none_returns_at_once() -> None:
    """Nothing waits for ranks that never take part: rank 0 is alone outside, and first does everything by itself."""
    if hvd.size() == 1:
        pytest.skip("one rank is in every set")
    process_set = hvd.add_process_set(list(range(1, hvd.size())))
    case = Case("outside", 95, {"resync_every": 2}, most=200)
    named = case.parameters()
    twins = copy.deepcopy(named)
    bare = torch.optim.SGD(twins.values(), lr=0.125)
    optimizer = slim(named, process_set=process_set, **case.options)

    def everything() -> None:
        train(named, optimizer, case, 0, range(4))
        optimizer.resync()
        with optimizer.global_parameters():
            pass
        hvd.broadcast_parameters(named, root_rank=1, process_set=process_set)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert hvd.broadcast_object(hvd.rank(), root_rank=1, process_set=process_set) == max(0, min(hvd.rank(), 1))
        members = [0] if hvd.rank() == 0 else list(range(1, hvd.size()))
        assert hvd.allgather_object(hvd.rank(), process_set=process_set) == members
        hvd.average_buffers(torch.nn.BatchNorm1d(3 if hvd.rank() else 4), process_set=process_set)
        with hvd.uneven_inputs(optimizer):
            pass
        assert pickle.loads(pickle.dumps(optimizer)).state_dict()["hvd_slim"]["steps"] == 4

    if hvd.rank() == 0:
        everything()  # if it waited for the others, which wait for it below, it would for ever
        train(twins, bare, case, 0, range(4))
        assert np.array_equal(flatten(named.values()), flatten(twins.values()))  # it trained by itself
        assert optimizer.stats()["total_bytes_sent"] == 0
    hvd.broadcast_object(None, name="rank 0 is done")
    if hvd.rank() > 0:
        everything()
    hvd.remove_process_set(process_set)


def test_a_root_outside_the_set_is_refused(halves: list[Any]) -> None:
    _, process_set = own(halves)
    if process_set.size() == 1:
        pytest.skip("alone, there is nothing to send")
    stranger = 1 - hvd.rank() % 2
    with pytest.raises(ValueError, match=f"root_rank={stranger} is not one of the ranks that take part"):
        hvd.broadcast_object(1, root_rank=stranger, process_set=process_set)


def test_optimizers_of_overlapping_sets_on_one_rank(halves: list[Any]) -> None:
    """One optimizer among all ranks, one within the half: taking turns, as with a shared and a private model."""
    number, process_set = own(halves)
    cases = [Case("all", 96, {}, most=200), Case("half", 97 + number, {"explorer": "greedy"}, most=200)]
    models = [case.parameters() for case in cases]
    optimizers = [slim(models[0]), slim(models[1], process_set=process_set, explorer="greedy")]
    for step in range(6):
        train(models[0], optimizers[0], cases[0], hvd.rank(), range(step, step + 1))
        if step % (1 + number) == 0:
            train(models[1], optimizers[1], cases[1], process_set.rank(), range(step, step + 1))
    for named, optimizer, members in zip(models, optimizers, (None, process_set)):
        with optimizer.global_parameters():
            assert agree(flatten(named.values()), members)
