"""A real run beside the simulation of K ranks, round by round from the same state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from oracle import Vector, allreduce_bound
from oracle_paths import PathOracle
from torch.nn import Parameter

import hvd_slim as hvd
from ranks.support import core_of, flatten, gather, global_vector

#: γ is rounded to 12 binary digits: sums that differ in their last bits may rarely round to the neighbour
GAMMA_STEP = 2.0**-11


def check_rounds(
    parameters: Sequence[Parameter],
    optimizer: Any,
    oracle: PathOracle,
    steps: int,
    give_gradients: Callable[[int], list[Vector]],
    gamma_may_differ: bool = False,
) -> None:
    """Each round chooses the same coordinates and gives the same numbers as the oracle's, on every rank. Collective.

    To the bit, except where an allreduce has added in an order of its own: there within ``allreduce_bound``.

    Args:
        parameters: float32, in the optimizer's order.
        optimizer: slim, whose local steps the oracle takes over.
        oracle: with the same options, at the same parameters.
        steps: how many to take.
        give_gradients: puts this rank's gradients of a step in place, and returns every rank's.
        gamma_may_differ: allow a neighbouring γ where sums over ranks depend on their order.
    """
    stepped: list[Vector] = []
    hook = optimizer.register_step_post_hook(lambda *_: stepped.append(gather(flatten(parameters)).astype(np.float32)))
    for step in range(steps):
        gradients = give_gradients(step)
        optimizer.step()
        bases, w_bar_before = [base.copy() for base in oracle.base], oracle.w_bar.copy()
        oracle.step(lambda k, _: (stepped[-1][k].copy(), gradients[k]))  # noqa: B023
        if hvd.size() == 1:
            np.testing.assert_array_equal(flatten(parameters), stepped[-1][0])
            continue
        if oracle.E:
            np.testing.assert_array_equal(core_of(optimizer), oracle.C)
        bound = np.zeros(oracle.n)
        summed = oracle.exactly_summed
        # γ, up to √K, stretches the difference too.
        bound[summed] = allreduce_bound([w[summed] - b[summed] for w, b in zip(stepped[-1], bases)], bases[0][summed])
        bound *= np.sqrt(hvd.size())
        if gamma_may_differ and hvd.size() > 2:
            bound += GAMMA_STEP * np.abs(oracle.w_bar.astype(np.float64) - w_bar_before)
        w_bar = global_vector(optimizer, parameters)
        assert np.all(np.abs(w_bar - oracle.w_bar) <= bound)
        assert np.all(np.abs(flatten(parameters) - oracle.w[hvd.rank()]) <= bound)
        model = optimizer._slim.synchronizer()._exchange.model
        of_ranks = gather(np.concatenate([w_bar, flatten(model.flat), flatten(parameters)]))
        w_bars, bases_now, live = np.split(of_ranks, 3, axis=1)
        np.testing.assert_array_equal(w_bars, np.broadcast_to(w_bar, w_bars.shape))
        # On from what the run has, so that a difference of rounding is not counted twice.
        oracle.w_bar, oracle.base = w_bar.astype(np.float32), list(bases_now.astype(np.float32))
        oracle.w = list(live.astype(np.float32))
    hook.remove()
