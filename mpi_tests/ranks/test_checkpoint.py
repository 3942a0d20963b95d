"""Looking at w̄, making replicas equal, stopping and going on: to the bit."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_slim as hvd
from ranks.support import (
    Case,
    MomentumSGD,
    Named,
    copies,
    flatten,
    gather,
    global_model,
    identical_on_all_ranks,
    random_options,
    set_gradients,
    slim,
)

STEPS = 30
CASES = [
    Case("reference setting", 41, {}),
    Case("frequent", 42, {"reselect_every": 4, "resync_every": 7, "local_steps": 2, "seed": 5}),
    *(Case(f"random {seed}", seed, random_options(np.random.default_rng(seed))) for seed in (43, 45, 48)),
    Case("dense", 46, {"exchange": "dense"}),
]


def begin(case: Case) -> tuple[Named, Any]:
    """A fresh model and its optimizer, as a script makes them."""
    named = case.parameters()
    return named, slim(named, MomentumSGD.torch(named.values()), **case.options)


def train(case: Case, named: Named, optimizer: Any, first: int, last: int) -> None:
    """Steps ``first`` to ``last`` (excluded) of the case."""
    n = sum(parameter.numel() for parameter in named.values())
    for step in range(first, last):
        set_gradients(named.values(), case.gradient(hvd.rank(), step, n))
        optimizer.step()


def bits(named: Named, optimizer: Any) -> list[torch.Tensor]:
    """w_k and w̄."""
    return copies(named.values()) + global_model(optimizer, named.values())


def all_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others))


# Looking and making equal ---------------------------------------------------------------------------------------------


def test_global_parameters_are_equal_on_all_ranks_and_leave_no_trace() -> None:
    case = CASES[0]
    named, optimizer = begin(case)
    train(case, named, optimizer, 0, 10)
    live = copies(named.values())
    addresses = [parameter.data_ptr() for parameter in named.values()]
    sent = optimizer.stats()["total_bytes_sent"]
    with optimizer.global_parameters():
        assert identical_on_all_ranks(list(named.values()))
        inside = copies(named.values())
        if hvd.size() > 1:
            with pytest.raises(RuntimeError, match="global_parameters"):
                optimizer.step()
    assert all_equal(live, copies(named.values()))
    assert addresses == [parameter.data_ptr() for parameter in named.values()]
    assert optimizer.stats()["total_bytes_sent"] == sent
    assert all_equal(live, inside) == (hvd.size() == 1)

    with pytest.raises(ZeroDivisionError), optimizer.global_parameters():
        raise ZeroDivisionError
    assert all_equal(live, copies(named.values())), "also when the block raises"
    train(case, named, optimizer, 10, 12)
    assert identical_on_all_ranks(global_model(optimizer, named.values()))


def test_resync_makes_all_replicas_equal() -> None:
    """To the bit; and what they become is their mean, to float32 rounding of numbers of this size."""
    case = CASES[0]
    named, optimizer = begin(case)
    train(case, named, optimizer, 0, 10)
    assert identical_on_all_ranks(list(named.values())) == (hvd.size() == 1)
    replicas = gather(flatten(named.values()))
    optimizer.resync()
    assert identical_on_all_ranks(list(named.values()))
    assert all_equal(copies(named.values()), global_model(optimizer, named.values()))
    bound = 0.0 if hvd.size() == 1 else (2 * hvd.size() + 4) * 2.0**-24 * np.abs(replicas).max()
    assert np.abs(flatten(named.values()) - replicas.mean(axis=0)).max() <= bound


# Stopping and going on -----------------------------------------------------------------------------------------------


def through_a_file(named: Named, optimizer: Any) -> Callable[[Case], tuple[Named, Any]]:
    """torch.save of both state_dicts, then torch.load, as safe as torch can, into a fresh model and optimizer."""
    file = io.BytesIO()
    model = {name: parameter.detach() for name, parameter in named.items()}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, file)
    data = file.getvalue()

    def resume(case: Case) -> tuple[Named, Any]:
        named, optimizer = begin(case)
        saved = torch.load(io.BytesIO(data), weights_only=True)
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(saved["model"][name])
        optimizer.load_state_dict(saved["optimizer"])
        return named, optimizer

    return resume


def by_deepcopy(named: Named, optimizer: Any) -> Callable[[Case], tuple[Named, Any]]:
    copied = copy.deepcopy((named, optimizer))
    return lambda case: copied


def by_pickle(named: Named, optimizer: Any) -> Callable[[Case], tuple[Named, Any]]:
    data = pickle.dumps((named, optimizer))
    return lambda case: pickle.loads(data)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_resumed_is_uninterrupted(case: Case) -> None:
    """Stopped after a random step: re-selections and resyncs fall where they would have, and every bit is the same.

    CASES 30.
    """
    stop = int(np.random.default_rng(case.seed).integers(1, STEPS - 5))
    named, optimizer = begin(case)
    train(case, named, optimizer, 0, stop)
    resume = through_a_file(named, optimizer)
    train(case, named, optimizer, stop, STEPS)

    again, resumed = resume(case)
    train(case, again, resumed, stop, STEPS)
    assert all_equal(bits(named, optimizer), bits(again, resumed))
    ours, theirs = optimizer.state_dict()["hvd_slim"], resumed.state_dict()["hvd_slim"]
    assert [ours[key] for key in ("steps", "rounds", "selections")] == [
        theirs[key] for key in ("steps", "rounds", "selections")
    ]


@pytest.mark.parametrize("duplicate", [through_a_file, by_deepcopy, by_pickle], ids=lambda f: f.__name__)
@pytest.mark.parametrize("stop", [0, 11])
def test_a_duplicate_goes_on_like_the_original(duplicate: Callable[..., Any], stop: int) -> None:
    """Whether it was made before the first step or later; the original is not disturbed."""
    case = CASES[1]
    named, optimizer = begin(case)
    train(case, named, optimizer, 0, stop)
    other, twin = duplicate(named, optimizer)(case)
    assert type(twin) is type(optimizer)
    assert isinstance(twin, torch.optim.SGD)
    train(case, named, optimizer, stop, 20)
    train(case, other, twin, stop, 20)
    assert not any(a is b for a, b in zip(named.values(), other.values()))
    assert all_equal(bits(named, optimizer), bits(other, twin))


def test_one_rank_alone_may_save() -> None:
    """CASES 29: nothing of it waits for the others."""
    case = CASES[1]
    named, optimizer = begin(case)
    for steps in (0, 9):
        train(case, named, optimizer, 0, steps)
        if hvd.rank() == hvd.size() - 1:
            with optimizer.global_parameters():
                copies(named.values())
            torch.save({"optimizer": optimizer.state_dict(), "stats": optimizer.stats()}, io.BytesIO())
            pickle.dumps(optimizer)
            time.sleep(0.1)
    train(case, named, optimizer, 9, 12)
    assert identical_on_all_ranks(global_model(optimizer, named.values()))


@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
def test_resumed_on_another_number_of_ranks(exchange: str, caplog: pytest.LogCaptureFixture) -> None:
    """CASES 32: each takes what it has, one line says what is dropped, and all go on from one global model."""
    if hvd.size() < 3:
        pytest.skip("needs three ranks: all of them, then fewer")
    case = Case("fewer", 32, {"exchange": exchange, "reselect_every": 4})
    named, optimizer = begin(case)
    train(case, named, optimizer, 0, 10)
    state = copy.deepcopy(optimizer.state_dict())
    fewer = hvd.add_process_set(list(range(hvd.size() - 1)))
    if fewer.included():
        again = copy.deepcopy(named)
        resumed = slim(again, MomentumSGD.torch(again.values()), fewer, **case.options)
        resumed.load_state_dict(state)
        with caplog.at_level(logging.WARNING, "hvd_slim"):
            train(case, again, resumed, 10, 20)
        dropped = [record for record in caplog.records if "dropped" in record.getMessage()]
        assert len(dropped) == (hvd.rank() == 0), caplog.text
        assert all(f"written by {hvd.size()} ranks" in record.getMessage() for record in dropped)
        assert resumed.state_dict()["hvd_slim"]["rounds"] == 20
        resumed.resync()
        mine = b"".join(parameter.numpy().tobytes() for parameter in copies(again.values()))
        sums = hvd.allgather_object(mine, process_set=fewer)
        assert sums.count(sums[0]) == hvd.size() - 1
    hvd.barrier()
    assert hvd.remove_process_set(fewer)


def test_loads_into_the_bare_optimizer() -> None:
    """CASES 31. Momentum included: the bare optimizer's next step is the slim one's local step."""
    case = CASES[0]
    named, optimizer = begin(case)
    train(case, named, optimizer, 0, 9)
    twins = copy.deepcopy(named)
    bare = MomentumSGD.torch(twins.values())
    bare.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert next_local_step(case, named, optimizer) == next_local_step(case, twins, bare)


def test_loads_from_the_bare_optimizer() -> None:
    """Equal replicas with warm momentum go on as a slim run: local step from the loaded state, then rounds.

    CASES 31.
    """
    case = CASES[0]
    twins = case.parameters()
    bare = MomentumSGD.torch(twins.values())
    set_gradients(twins.values(), case.gradient(0, 0, len(flatten(twins.values()))))
    bare.step()
    named = copy.deepcopy(twins)
    optimizer = slim(named, MomentumSGD.torch(named.values()), **case.options)
    optimizer.load_state_dict(copy.deepcopy(bare.state_dict()))
    assert next_local_step(case, named, optimizer) == next_local_step(case, twins, bare)
    train(case, named, optimizer, 2, 12)
    assert identical_on_all_ranks(global_model(optimizer, named.values()))


def test_wrapping_keeps_warm_momentum() -> None:
    """CASES 8. The optimizer had trained before it was wrapped; the object stays the same one."""
    case = CASES[0]
    named = case.parameters()
    bare = MomentumSGD.torch(named.values())
    set_gradients(named.values(), case.gradient(0, 0, len(flatten(named.values()))))
    bare.step()
    twins = copy.deepcopy(named)
    twin = MomentumSGD.torch(twins.values())
    twin.load_state_dict(copy.deepcopy(bare.state_dict()))
    optimizer = slim(named, bare, **case.options)
    assert optimizer is bare
    assert next_local_step(case, named, optimizer) == next_local_step(case, twins, twin)


def next_local_step(case: Case, named: Named, optimizer: Any) -> bytes:
    """The bits of w_k after the optimizer's own step on a certain gradient, before any round."""
    seen: list[bytes] = []
    hook = optimizer.register_step_post_hook(lambda *_: seen.append(flatten(named.values()).tobytes()))
    set_gradients(named.values(), case.gradient(hvd.rank(), 1000, len(flatten(named.values()))))
    optimizer.step()
    hook.remove()
    return seen[0]
