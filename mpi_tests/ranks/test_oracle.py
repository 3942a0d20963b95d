"""Real runs against the simulation of K ranks in one process, coordinate by coordinate, for fifty rounds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from oracle import UNIT_ROUNDOFF, Oracle, allreduce_bound

import hvd_slim as hvd
from ranks.support import (
    Case,
    MomentumSGD,
    core_of,
    explored_by,
    flatten,
    gather,
    global_vector,
    random_options,
    set_gradients,
    slim,
)

ROUNDS = 50
ENOUGH_SLACK = 1e-4  # in S; ten times what differed at most between simulation and run after fifty rounds

CASES = [
    Case("reference setting", 1, {}),
    *(Case(f"random {seed}", seed, random_options(np.random.default_rng(seed))) for seed in (4, 6, 9, 26, 28, 38)),
    Case("no explorers", 10, {"comm_fraction": 0.2, "core_fraction": 0.2, "reselect_every": 4}),
    Case("one explorer", 11, {"comm_fraction": 0.0015, "core_fraction": 0.0005, "reselect_every": 3}, most=900),
    Case("all explored by all", 12, {"comm_fraction": 1.0, "core_fraction": 0.25, "reselect_every": 5}),
    Case("dense", 13, {"exchange": "dense"}),
    Case("fractions 1", 14, {"comm_fraction": 1.0, "core_fraction": 1.0, "resync_every": 4}),
]
TIES = Case(
    "ties",
    15,
    {"comm_fraction": 0.9, "core_fraction": 0.7, "normalize": False, "reselect_every": 1, "resync_every": 9},
    grid=1.0,
)


def name_of(case: Case) -> str:
    return case.name.replace(" ", "-")


@pytest.mark.parametrize("case", [*CASES, TIES], ids=name_of)
def test_every_round_is_the_oracles(case: Case) -> None:
    """From the same live parameters, each round chooses the same coordinates and gives the same numbers.

    Before each round the oracle is told what the optimizers made of all ranks' parameters. Then it predicts: index
    sets exactly; values to the bit where no allreduce was involved, and within ``allreduce_bound`` where one was.
    """
    named = case.parameters()
    parameters = list(named.values())
    optimizer = slim(named, MomentumSGD.torch(parameters), **case.options)
    initial = flatten(parameters).astype(np.float32)
    oracle = Oracle([initial] * hvd.size(), **case.options)
    stepped: list[np.ndarray] = []
    # Runs between the local step and the round.
    optimizer.register_step_post_hook(lambda *_: stepped.append(gather(flatten(parameters)).astype(np.float32)))

    for step in range(ROUNDS * oracle.local_steps):
        gradients = [case.gradient(rank, step, oracle.n) for rank in range(hvd.size())]
        set_gradients(parameters, gradients[hvd.rank()])
        optimizer.step()
        rounds_before, old = oracle.rounds, oracle.w_bar.copy()  # the oracle works in place
        oracle.step(lambda k, _: (stepped[-1][k].copy(), gradients[k]))  # noqa: B023
        if oracle.rounds == rounds_before:
            np.testing.assert_array_equal(flatten(parameters), stepped[-1][hvd.rank()])  # no round, no exchange
            continue

        check_sets(oracle, optimizer)
        bound = np.zeros(oracle.n)
        among_all = np.arange(oracle.n) if was_dense(oracle) else oracle.C
        bound[among_all] = allreduce_bound([w[among_all] - old[among_all] for w in stepped[-1]], old[among_all])
        w_bar = global_vector(optimizer, parameters)
        assert np.all(np.abs(w_bar - oracle.w_bar) <= bound)
        assert np.all(np.abs(flatten(parameters) - oracle.w[hvd.rank()]) <= bound)
        w_bars = gather(w_bar)
        np.testing.assert_array_equal(w_bars, np.broadcast_to(w_bar, w_bars.shape))
        oracle.w_bar = w_bar.astype(np.float32)
    assert case is not TIES or hvd.size() == 1 or oracle.slack == 0.0, "no choice was between equals"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_fifty_rounds_are_the_oracles(case: Case) -> None:
    """Left to themselves from the same start, simulation and run stay together, each coordinate for itself.

    On one and two ranks to the bit. On more, an allreduce adds in its own order. A difference once made in w̄ or in a
    pending update u is carried along, never amplified: what is sent moves from the u's, each divided by K, into w̄.
    So the differences of all rounds at most add up. In a round a number is rounded at most 5p + 4K + 4 times (five
    in a step of SGD; for each rank's share: divide, add to w̄, subtract w̄, add it again; core: subtract, add, divide,
    add), in the simulation and in the run, each time by at most η = 2⁻²⁴ times a difference of two values that the
    coordinate has had: 4η times the largest of them.

    The oracle's own choices must not hang on a difference of that kind: a seed with which they do is passed over.
    """
    case, starts = next(decided(case))
    named = case.parameters()
    parameters = list(named.values())
    optimizer = slim(named, MomentumSGD.torch(parameters), **case.options)
    oracle, sgd = Oracle(starts, **case.options), MomentumSGD(hvd.size())
    largest = np.zeros(oracle.n)

    for step in range(ROUNDS * oracle.local_steps):
        set_gradients(parameters, case.gradient(hvd.rank(), step, oracle.n))
        optimizer.step()
        advance(oracle, sgd, case, step)
        if oracle.steps % oracle.local_steps == 0 and hvd.size() > 1:
            check_sets(oracle, optimizer)
        largest = np.abs(np.stack([largest, oracle.w_bar, *oracle.w])).max(axis=0)

    roundings = ROUNDS * (5 * oracle.local_steps + 4 * hvd.size() + 4)
    bound = (0.0 if hvd.size() <= 2 else 4 * UNIT_ROUNDOFF * roundings) * largest
    assert np.all(np.abs(flatten(parameters) - oracle.w[hvd.rank()]) <= bound)
    if hvd.size() > 1:
        assert np.all(np.abs(global_vector(optimizer, parameters) - oracle.w_bar) <= bound)


def decided(case: Case) -> Iterator[tuple[Case, list[np.ndarray]]]:
    """The case, with the next seeds at which no choice of the oracle's is a matter of rounding."""
    for attempt in range(50):
        candidate = Case(case.name, case.seed + 1000 * attempt, case.options, case.most // 2)
        starts = [flatten(candidate.parameters().values()).astype(np.float32)] * hvd.size()
        oracle, sgd = Oracle(starts, **case.options), MomentumSGD(hvd.size())
        for step in range(ROUNDS * oracle.local_steps if hvd.size() > 2 else 0):
            advance(oracle, sgd, candidate, step)
            if oracle.slack < ENOUGH_SLACK:
                break
        else:
            yield candidate, starts
    raise AssertionError(f"no seed of {case.name} keeps its choices clear of rounding")


def advance(oracle: Oracle, sgd: MomentumSGD, case: Case, step: int) -> None:
    """One step of the simulation, optimizers included."""

    def local_step(k: int, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gradient = case.gradient(k, step, oracle.n)
        return sgd.step(k, w, gradient), gradient

    oracle.step(local_step)


def check_sets(oracle: Oracle, optimizer: object) -> None:
    """The coordinates that the oracle's latest round chose are those of the run."""
    np.testing.assert_array_equal(core_of(optimizer), oracle.C)
    if not was_dense(oracle):
        for k, explored in enumerate(oracle.E):
            np.testing.assert_array_equal(explored_by(optimizer, oracle.rounds - 1, k), explored)


def was_dense(oracle: Oracle) -> bool:
    """Whether the oracle's latest round sent everything."""
    return oracle.always_dense or (oracle.resync_every > 0 and oracle.rounds % oracle.resync_every == 0)
