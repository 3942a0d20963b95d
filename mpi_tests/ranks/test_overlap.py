"""overlap=True: rounds that are merged one step late, against the simulation of K ranks; and around them."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from oracle_overlap import OverlapOracle

import hvd_slim as hvd
from hvd_slim.transport.base import Pending
from ranks.support import Case, Named, core_of, flatten, gather, identical_on_all_ranks, set_gradients, slim

STEPS = 14
WAYS: list[dict[str, Any]] = [
    {"exchange": "allgather"},
    {"exchange": "allgather", "explorer": "greedy", "resync_every": 6, "restore_norm": True},
    {"exchange": "allgather", "explorer": "cyclic", "value_dtype": "int8", "warmup_rounds": 2},
    {"exchange": "alltoall", "warmup_rounds": 3, "warmup": "linear"},
    {"exchange": "alltoall", "local_rate": 0.25},
    {"exchange": "alltoall", "explorer": "greedy", "value_dtype": "bfloat16", "resync_every": 5},
    {"exchange": "allreduce", "explorer": "shared", "local_steps": 2},
    {"exchange": "allreduce", "explorer": "leader", "resync_every": 5},
    {"exchange": "allreduce", "explorer": "leader", "resync_every": 5, "local_rate": 0.3},
    {"exchange": "allreduce", "explorer": "leader", "value_dtype": "float16", "warmup_rounds": 3, "warmup": "linear"},
    {"exchange": "dense"},
    {"exchange": "dense", "value_dtype": "int8", "resync_every": 4},
]
COMMON = {"overlap": True, "comm_fraction": 0.3, "core_fraction": 0.1, "reselect_every": 4, "seed": 5}


def known_of_the_global_model(optimizer: Any) -> np.ndarray:
    """What this rank knows of w̄, without merging the round in flight."""
    return flatten(optimizer._slim.started._exchange.model.flat).astype(np.float32)


@pytest.mark.parametrize("transport", ["horovod", "mpi"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_round_is_the_oracles_one_step_late(options: dict[str, Any], transport: str) -> None:
    """The same coordinates; the same numbers to a few units in the last place, for what was learned in between is added
    in another order."""
    if transport == "mpi" and not hvd.mpi_enabled():
        pytest.skip("launched with Gloo: there is no MPI to carry bytes")
    case = Case("overlap", 11, {}, most=400)
    named = case.parameters()
    parameters = list(named.values())
    optimizer = slim(named, torch.optim.SGD(parameters, lr=0.125), transport=transport, **{**COMMON, **options})
    oracle_options = {name: value for name, value in {**COMMON, **options}.items() if name != "overlap"}
    oracle = OverlapOracle([flatten(parameters).astype(np.float32)] * hvd.size(), **oracle_options)
    near = 2e-6 / options.get("local_rate", 1.0)  # merged changes are stretched, and so is what rounding makes of them
    stepped: list[np.ndarray] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(gather(flatten(parameters)).astype(np.float32)))
    for step in range(STEPS):
        gradients = [case.gradient(rank, step, oracle.n) for rank in range(hvd.size())]
        set_gradients(parameters, gradients[hvd.rank()])
        optimizer.step()
        oracle.step(lambda k, _: (stepped[-1][k].copy(), gradients[k]))  # noqa: B023
        if hvd.size() == 1:
            np.testing.assert_array_equal(flatten(parameters), stepped[-1][0])
            continue
        if oracle.E:
            np.testing.assert_array_equal(core_of(optimizer), oracle.C)
        live, known = flatten(parameters), known_of_the_global_model(optimizer)
        np.testing.assert_allclose(live, oracle.w[hvd.rank()], rtol=near, atol=near)
        np.testing.assert_allclose(known, oracle.base[hvd.rank()], rtol=near, atol=near)
        # On from what the run has.
        oracle.w, oracle.base = list(gather(live).astype(np.float32)), list(gather(known).astype(np.float32))
        if oracle.launched is not None and oracle.local_rate < 1.0:
            # A difference of rounding that counts as learned would grow by 1 − 1/λ each time that it is merged.
            oracle.launched.w = list(oracle.w)
    assert hvd.size() == 1 or optimizer._slim.started._flight is not None
    optimizer._slim.renew()


def run(options: dict[str, Any], save_at: int | None = None, land_at: int | None = None) -> tuple[Named, Any]:
    """Parameters and optimizer after 14 steps; with ``save_at`` they are saved then, and others go on from there; with
    ``land_at`` the round in flight is merged before."""
    case = Case("overlap", 12, {}, most=200)
    named = case.parameters()
    optimizer = slim(named, torch.optim.SGD(named.values(), lr=0.1, momentum=0.9), **{**COMMON, **options})
    for step in range(STEPS):
        if step == land_at:
            optimizer.synchronize()
        if step == save_at:
            file = io.BytesIO()
            torch.save([{name: p.detach() for name, p in named.items()}, optimizer.state_dict()], file)
            file.seek(0)
            optimizer._slim.renew()
            weights, state = torch.load(file, weights_only=True)
            named = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
            optimizer = slim(named, torch.optim.SGD(named.values(), lr=0.1, momentum=0.9), **{**COMMON, **options})
            optimizer.load_state_dict(state)
        set_gradients(named.values(), case.gradient(hvd.rank(), step, len(flatten(named.values()))))
        optimizer.step()
    return named, optimizer


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_resumed_in_flight_to_the_same_bits(options: dict[str, Any]) -> None:
    """The round in flight is part of the checkpoint."""
    whole, optimizer = run(options)
    for save_at in (3, 6, 7):
        resumed, other = run(options, save_at)
        for name, parameter in whole.items():
            assert torch.equal(parameter, resumed[name]), (save_at, name)
        other._slim.renew()
    optimizer._slim.renew()


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_resumed_after_landing_to_the_same_bits(options: dict[str, Any]) -> None:
    """Saved after an evaluation, say: then nothing is in flight, but a leader may have chosen already."""
    for step in (3, 6, 7):
        whole, optimizer = run(options, land_at=step)
        resumed, other = run(options, save_at=step, land_at=step)
        for name, parameter in whole.items():
            assert torch.equal(parameter, resumed[name]), (step, name)
        for each in (optimizer, other):
            each._slim.renew()


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_synchronize_lands_the_round(options: dict[str, Any]) -> None:
    """Then nothing is in flight, nothing is lost, and a resync makes all replicas equal."""
    named, optimizer = run(options)
    before = flatten(named.values())
    pending = before - known_of_the_global_model(optimizer) if hvd.size() > 1 else 0 * before
    in_flight = copy.copy(optimizer._slim.started._flight)
    optimizer.synchronize()
    assert optimizer._slim.started._flight is None
    if in_flight is not None and options.get("value_dtype") is None:
        sent = np.abs(flatten(named.values()) - known_of_the_global_model(optimizer)) < np.abs(pending)
        assert sent.mean() > 0.05
    optimizer.resync()
    assert identical_on_all_ranks(list(named.values()))
    optimizer._slim.renew()


def test_evaluation_by_one_rank_alone() -> None:
    """At full width global_parameters() only waits: others need not take part, and w̄ stays the same on all."""
    named, optimizer = run({"exchange": "allgather"})
    if hvd.rank() == 0:
        with optimizer.global_parameters():
            pass
    hvd.barrier()
    with optimizer.global_parameters():
        assert identical_on_all_ranks(list(named.values()))
    optimizer._slim.renew()


def test_a_nan_is_raised_one_step_later_and_nothing_of_its_round_is_merged() -> None:
    named, optimizer = run({"exchange": "allgather"})
    if hvd.size() == 1:
        return
    optimizer.synchronize()
    good = known_of_the_global_model(optimizer)
    gradient = np.zeros(len(good))
    gradient[0] = np.nan if hvd.rank() == 1 else 0.0
    set_gradients(named.values(), gradient)
    optimizer.step()
    with pytest.raises(hvd.NonFiniteError, match="rank 1 has a NaN"):
        optimizer.step()
    np.testing.assert_array_equal(known_of_the_global_model(optimizer), good)
    with optimizer.global_parameters():
        np.testing.assert_array_equal(flatten(named.values()), good)
    optimizer._slim.renew()


@pytest.mark.parametrize(
    "options", [{"explorer": "leader", "exchange": "allreduce"}, {"exchange": "allgather"}], ids=str
)
def test_nothing_is_waited_for_in_the_step_that_launches_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first core is chosen; a leader's choice, too, has a step's time to arrive."""
    named, optimizer = run({"reselect_every": 1000, **options})
    if hvd.size() > 1:
        launched_in, waited_in = [], []
        now = [0]

        def watched(call: Any) -> Any:
            def collective(*args: Any) -> Pending[Any]:
                pending, number = call(*args), now[0]
                launched_in.append(number)

                def wait() -> Any:
                    waited_in.append((number, now[0]))
                    return pending.wait()

                return Pending(wait)

            return collective

        transport = optimizer._slim.started.transport
        for name in ("allreduce", "allgather", "broadcast"):
            monkeypatch.setattr(transport, name, watched(getattr(transport, name)))
        for step in range(4):
            now[0] = step
            set_gradients(named.values(), np.full(len(flatten(named.values())), 0.01 * (1 + step)))
            optimizer.step()
        assert launched_in == [0, 0, 1, 1, 2, 2, 3, 3]
        assert waited_in
        assert all(later == launched + 1 for launched, later in waited_in)
    optimizer._slim.renew()
