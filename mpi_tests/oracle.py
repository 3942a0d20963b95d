"""Slim-DP as one reads it: K ranks in one process, in plain NumPy, slow and obvious.

Every real run on K processes is compared with this one, coordinate by coordinate. In the words of the method:

    K, k        ranks, one rank                          n           coordinates
    w[k]        live parameters of rank k                w_bar       w̄, the global model, equal on all ranks
    u           w[k] − w̄, learned and not yet sent       v           what is sent of it (here: all of it)
    C           core set, ⌈βn⌉ coordinates, ascending    E[k]        explorer set of rank k, ⌈αn⌉ − ⌈βn⌉ coordinates
    α, β        comm_fraction, core_fraction             c           gradient_weight
    p, q        local_steps, reselect_every              S           significance

Arithmetic is float32, in the order of the real thing, with one exception: an allreduce adds K numbers in an order of
its own, and here they are added in rank order. ``allreduce_bound`` says how much that can matter: nothing for K ≤ 2,
where both orders give the same float, and a few units in the last place beyond. Everything else agrees to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

Vector = np.ndarray
#: (k, w[k]) → (w[k] after the optimizer's step, the gradient it was made from)
LocalStep = Callable[[int, Vector], tuple[Vector, Vector]]

UNIT_ROUNDOFF = 2.0**-24  # a float32 operation is exact to this relative error


class Oracle:
    """K replicas that train together.

    Args:
        initial: one float32 vector of n parameters for each rank. If they differ, rank 0's counts.
        The options have the names, defaults and meaning of ``Compression.slim``.
    """

    def __init__(
        self,
        initial: Sequence[Vector],
        *,
        comm_fraction: float = 0.3,
        core_fraction: float = 0.15,
        reselect_every: int = 20,
        resync_every: int = 0,
        local_steps: int = 1,
        gradient_weight: float = 1.0,
        normalize: bool = True,
        explorer: str = "random",
        exchange: str = "allgather",
        seed: int = 0,
    ) -> None:
        self.K, self.n = len(initial), len(initial[0])
        self.w_bar = initial[0].astype(np.float32)
        self.w = [self.w_bar.copy() for _ in range(self.K)]
        self.core_size = ceil_exactly(core_fraction, self.n)
        self.explorer_size = ceil_exactly(comm_fraction, self.n) - self.core_size
        self.reselect_every, self.resync_every, self.local_steps = reselect_every, resync_every, local_steps
        self.gradient_weight, self.normalize, self.seed = gradient_weight, normalize, seed
        self.explore = EXPLORERS[explorer]
        self.always_dense = {"dense": True, "allgather": self.core_size == self.n}[exchange]
        self.steps = self.rounds = self.selections = 0
        self.C: Vector = np.arange(0)
        self.E: list[Vector] = []  # of the latest slim round
        self.slack = math.inf  # smallest distance in S, over all selections, between the last one in and the first out

    def step(self, local_step: LocalStep) -> None:
        """One optimizer step on every rank, and a round after every p of them."""
        gradients = []
        for k in range(self.K):
            self.w[k], gradient = local_step(k, self.w[k])
            gradients.append(gradient)
        self.steps += 1
        self.after_local_steps(gradients)

    def after_local_steps(self, gradients: Sequence[Vector]) -> None:
        """A round, when it is due."""
        if self.K > 1 and self.steps % self.local_steps == 0:
            self.round(gradients)

    def round(self, gradients: Sequence[Vector]) -> None:
        """Round r = 0, 1, 2, …: choose the core when due, then exchange: everything, or core and explorers."""
        if not self.always_dense and self.rounds % self.reselect_every == 0:
            self.choose_core(gradients)
        resync = self.resync_every > 0 and (self.rounds + 1) % self.resync_every == 0
        if self.always_dense or resync:
            self.exchange_among_all(np.arange(self.n))
        else:
            self.exchange_among_all(self.C)
            self.exchange_explorers()
        self.rounds += 1

    def choose_core(self, gradients: Sequence[Vector]) -> None:
        """The ranks take turns to choose, each from its own parameters and gradient; the others are told."""
        k = self.selections % self.K
        S = significance(self.w[k], gradients[k], self.gradient_weight, self.normalize)  # noqa: N806
        by_significance = np.argsort(-S, kind="stable")  # stable: of equals the lower index comes first
        chosen, left_out = np.split(by_significance, [self.core_size])
        self.C = np.sort(chosen)
        self.slack = min(self.slack, float(S[chosen[-1]]) - float(S[left_out[0]]))
        self.selections += 1

    def exchange_among_all(self, where: Vector) -> None:
        """All ranks send u at the same coordinates: w̄ += mean of u, and with nothing left to send, w = w̄."""
        u = [w[where] - self.w_bar[where] for w in self.w]
        self.w_bar[where] += mean(u)
        for w in self.w:
            w[where] = self.w_bar[where]

    def exchange_explorers(self) -> None:
        """Every rank sends u at coordinates of its own; each rank's share is merged in rank order, everywhere.

        Where a rank has not sent, its u stays as it was: w = w̄_new + (w − w̄_old). Where it has, w = w̄.
        """
        outside = np.setdiff1d(np.arange(self.n), self.C)
        self.E = [outside[self.explore(self, k, len(outside))] for k in range(self.K)]
        v = [w[E] - self.w_bar[E] for w, E in zip(self.w, self.E)]
        for j, E_j in enumerate(self.E):  # noqa: N806
            old = self.w_bar[E_j]
            new = old + v[j] / np.float32(self.K)
            self.w_bar[E_j] = new
            for w in self.w:
                w[E_j] = new + (w[E_j] - old)
        for w, E_k in zip(self.w, self.E):  # noqa: N806
            w[E_k] = self.w_bar[E_k]


def ceil_exactly(fraction: float, n: int) -> int:
    """⌈fraction·n⌉ for the decimal that the user wrote: 0.1 of 10 is 1, although the float 0.1 is above 1/10."""
    return math.ceil(Fraction(repr(fraction)) * n)


def mean(vectors: Sequence[Vector]) -> Vector:
    """Added in rank order, then divided."""
    return total_of(vectors) / np.float32(len(vectors))


def total_of(vectors: Sequence[Vector]) -> Vector:
    """Added in rank order."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


def allreduce_bound(u: Sequence[Vector], w_bar: Vector) -> Vector:
    """How far w̄ + mean(u), so rounded, may lie from the same with the K numbers added in any other order.

    A sum of K floats has K − 1 roundings, each at most η·Σ|u| (η = 2⁻²⁴): two orders differ by 2(K−1)·η·Σ|u|, their
    quotients by K by 2(K−1)·η·mean|u| and twice the quotient's own rounding, η·mean|u|; adding w̄ rounds once more on
    either side, η·|result|. The last factor covers the terms of second order.
    """
    K = len(u)  # noqa: N806
    if K <= 2:
        return np.zeros_like(w_bar, dtype=np.float64)
    mean_size = np.mean(np.abs(u), axis=0, dtype=np.float64)
    return 1.001 * UNIT_ROUNDOFF * (2 * K * mean_size + 2 * (np.abs(w_bar) + mean_size))


def significance(w: Vector, g: Vector, c: float, normalize: bool) -> Vector:
    """S = |w| / rms(w) + c·|g| / rms(g), or |w| + c·|g|; a term that is zero everywhere stays zero."""
    w, g = np.abs(w), np.abs(g)
    if normalize:
        w = w / np.float32(rms(w) or 1.0)
        c = c / (rms(g) or 1.0)
    return w + g * np.float32(c)


def rms(x: Vector) -> float:
    """Root mean square, in float64."""
    return math.sqrt(float(np.mean(np.square(x, dtype=np.float64))))


# Explorers: (oracle, k, m) → positions of rank k's explorer set in the ascending list of the m coordinates outside C.


def random_explorer(oracle: Oracle, k: int, m: int) -> list[int]:
    """The list, rotated by a random shift, is cut into strata of equal length (to ±1); one uniform draw in each.

    Draws are raw Philox words for (seed, round, rank): the first is the shift, the halves of the others the draws.
    """
    e = oracle.explorer_size
    key = np.array([oracle.seed, 1], dtype=np.uint64)
    counter = np.array([0, 0, oracle.rounds, k], dtype=np.uint64)
    shift, *words = (int(word) for word in np.random.Philox(key=key, counter=counter).random_raw(1 + (e + 1) // 2))
    draws = [half for word in words for half in (word % 2**32, word // 2**32)]
    positions = []
    for s in range(e):
        start, stop = s * m // e, (s + 1) * m // e
        offset = draws[s] * (stop - start) // 2**32
        positions.append((start + offset + shift) % m)
    return sorted(positions)


EXPLORERS: dict[str, Callable[[Oracle, int, int], list[int]]] = {"random": random_explorer}
