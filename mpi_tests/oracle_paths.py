"""The oracle's other explorers and paths, narrow values, γ and warm-up: again K ranks in one process, in plain NumPy.

Beyond the words of ``oracle``:

    base[k]     what rank k last saw of w̄; equal to w̄ on every path but alltoall
    r           what rounding kept back of u: it stays pending
    γ           how much longer a merged change is made (``restore_norm``)
    λ           part of the learning rate of a local step (``local_rate``); merged changes are divided by it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import EXPLORERS as RANDOM
from oracle import Oracle, Vector, ceil_exactly, mean, total_of
from oracle_values import decode, encode


class PathOracle(Oracle):
    """K replicas on any path. Options as in ``Compression.slim``."""

    delayed = False  # whether rounds are merged later than they are launched

    def __init__(
        self,
        initial: Sequence[Vector],
        *,
        explorer: str = "random",
        exchange: str = "allgather",
        value_dtype: str = "float32",
        rounding: str = "nearest",
        restore_norm: bool = False,
        local_rate: float = 1.0,
        warmup_rounds: int = 0,
        warmup: str = "dense",
        **options: Any,
    ) -> None:
        super().__init__(initial, **options)
        self.explorer, self.exchange = explorer, exchange
        self.value_dtype, self.rounding, self.restore_norm = value_dtype, rounding, restore_norm
        self.local_rate, self.warmup_rounds, self.warmup = local_rate, warmup_rounds, warmup
        self.comm_fraction = options.get("comm_fraction", 0.3)
        self.always_dense = exchange == "dense" or self.core_size == self.n
        if self.always_dense:
            self.exchange = "dense"  # also when the core is everything: no path of its own is left
        self.base = [self.w_bar.copy() for _ in range(self.K)]
        self.exactly_summed: Vector = np.arange(0)  # coordinates of the latest round whose sum an allreduce made
        self.chose = False

    def round(self, gradients: Sequence[Vector]) -> None:
        """Round r = 0, 1, 2, …"""
        self.E = []
        if self.rounds < self.warmup_rounds and self.warmup == "dense":
            self.exchange_everything("float32", self.restore_norm)
        elif self.always_dense:
            resync = self.resync_every > 0 and (self.rounds + 1) % self.resync_every == 0
            if resync and (self.delayed or self.value_dtype != "float32"):  # else the round is one
                self.exchange_everything("float32", restore_norm=False)
            else:
                self.exchange_everything(self.value_dtype, self.restore_norm)
        else:
            due = not self.chose or self.rounds % self.reselect_every == 0
            new_core_of_a_spread_model = due and self.chose and self.exchange == "alltoall"
            if due:
                self.choose_core(gradients)
                self.chose = True
            resync = self.resync_every > 0 and (self.rounds + 1) % self.resync_every == 0
            if resync or new_core_of_a_spread_model:
                self.exchange_everything("float32", restore_norm=False)
            else:
                self.explorer_size = ceil_exactly(self.fraction(), self.n) - self.core_size
                self.slim()
        self.rounds += 1

    def fraction(self) -> float:
        """α, or what a linear warm-up has come down to."""
        if self.rounds >= self.warmup_rounds:
            return self.comm_fraction
        return 1.0 - (1.0 - self.comm_fraction) * self.rounds / self.warmup_rounds

    # Rounds ---------------------------------------------------------------------------------------------------------

    def exchange_everything(self, value_dtype: str, restore_norm: bool) -> None:
        """w̄ += γ/λ · mean of u everywhere; w = w̄ + r."""
        u = [w - base for w, base in zip(self.w, self.base)]
        if self.exchange == "alltoall":  # each owner sums its slice in rank order and tells it to all
            change = np.add.reduce(u) / np.float32(self.K)
            factor = 1.0
            if restore_norm:
                squares = [float(np.dot(x.astype(np.float64), x)) for x in u]
                slices = np.split(change, self.slices(self.n)[1:-1])
                factor = self.gamma(sum(squares), sum(float(np.dot(s.astype(float), s)) for s in slices))
            change *= np.float32(factor / self.local_rate)
            r = [np.zeros(self.n, np.float32) for _ in u]
            self.exactly_summed = np.arange(0)
        else:
            change, r, _ = self.reduce(u, value_dtype, self.n if restore_norm else 0)
            self.exactly_summed = np.arange(self.n if value_dtype == "float32" else 0)
        self.w_bar = self.w_bar + change
        self.base = [self.w_bar.copy() for _ in range(self.K)]
        self.w = [self.w_bar + rest for rest in r]

    def slim(self) -> None:
        """Core and explorers."""
        outside = np.setdiff1d(np.arange(self.n), self.C)
        self.E = [outside[self.positions(k, outside)] for k in range(self.K)]
        if self.exchange == "allreduce":
            both = np.concatenate([self.C, self.E[0]])
            self.merge_among_all(both)
            return
        u = [w[E] - base[E] for w, base, E in zip(self.w, self.base, self.E)]
        factor = np.float32(self.merge_among_all(self.C))
        v = [self.as_sent(k, E, u[k]) for k, E in enumerate(self.E)]
        r = [a - b for a, b in zip(u, v)]
        for j, E_j in enumerate(self.E):  # noqa: N806
            old = self.w_bar[E_j]
            new = old + v[j] / np.float32(self.K) * factor
            self.w_bar[E_j] = new
            if self.exchange == "allgather":
                for k in range(self.K):
                    self.w[k][E_j] = new + (self.w[k][E_j] - old)
                    self.base[k][E_j] = new
        for k, E_k in enumerate(self.E):  # noqa: N806
            self.base[k][E_k] = self.w_bar[E_k]
            self.w[k][E_k] = self.base[k][E_k] + r[k]

    def merge_among_all(self, where: Vector) -> float:
        """w̄ += γ/λ · mean of u at ``where``, the core first; w = w̄ + r. Every rank has seen all of w̄ there."""
        u = [w[where] - base[where] for w, base in zip(self.w, self.base)]
        change, r, factor = self.reduce(u, self.value_dtype, self.core_size if self.restore_norm else 0)
        self.exactly_summed = where if self.value_dtype == "float32" else where[:0]
        self.w_bar[where] += change
        for k in range(self.K):
            self.base[k][where] = self.w_bar[where]
            self.w[k][where] = self.w_bar[where] + r[k]
        return factor

    # What a reduction gives -----------------------------------------------------------------------------------------

    def reduce(self, u: list[Vector], value_dtype: str, norm_count: int) -> tuple[Vector, list[Vector], float]:
        """(γ/λ · mean of u, what rounding kept back on each rank, γ/λ); γ is taken over the first ``norm_count``."""
        count = len(u[0])
        squares = [float(np.dot(x[:norm_count].astype(np.float64), x[:norm_count])) for x in u]
        if value_dtype == "float32":
            r = [np.zeros(count, np.float32) for _ in u]
            if not norm_count:
                stretch = 1 / self.local_rate
                return total_of(u) / np.float32(self.K / stretch), r, stretch
            average = mean(u)
            total = float(mean([np.array([square], np.float32) for square in squares])[0]) * self.K
        else:
            average, r = self.reduce_narrow(u, value_dtype)
            total = sum(squares)
        factor = 1 / self.local_rate
        if norm_count:
            core = average[:norm_count].astype(np.float64)
            factor = self.gamma(total, float(np.dot(core, core))) * factor
        return average * np.float32(factor), r, factor

    def reduce_narrow(self, u: list[Vector], value_dtype: str) -> tuple[Vector, list[Vector]]:
        """Rank j averages slice j of what all have sent, and sends its average; both times narrow."""
        bounds = self.slices(len(u[0]))
        average = np.empty_like(u[0])
        r = [np.empty_like(x) for x in u]
        for j in range(self.K):
            part = slice(bounds[j], bounds[j + 1])
            v = [self.through(x[part], value_dtype, k, number=j) for k, x in enumerate(u)]
            exact = np.add.reduce(v) / np.float32(self.K)
            average[part] = self.through(exact, value_dtype, j, number=self.K)
            for k in range(self.K):
                r[k][part] = u[k][part] - v[k]
            r[j][part] += (exact - average[part]) * np.float32(self.K)
        return average, r

    def as_sent(self, k: int, E: Vector, u: Vector) -> Vector:  # noqa: N803
        """v: one message to all, or one to the owner of each slice of the index space."""
        if self.exchange == "allgather":
            return self.through(u, self.value_dtype, k, number=self.K + 1)
        cuts = np.searchsorted(E, self.slices(self.n)[1:-1])
        parts = np.split(u, cuts)
        return np.concatenate(
            [self.through(part, self.value_dtype, k, number=self.K + 1 + owner) for owner, part in enumerate(parts)]
        )

    def through(self, values: Vector, value_dtype: str, k: int, number: int) -> Vector:
        """The values as a receiver reads them."""
        message = encode(values, value_dtype, self.rounding, self.seed, self.rounds, k, number)
        return decode(message, len(values), value_dtype)

    def slices(self, count: int) -> list[int]:
        """Where each rank's slice of ``count`` things begins, and the end."""
        return [count * k // self.K for k in range(self.K + 1)]

    def gamma(self, squares: float, mean_square: float) -> float:
        """γ = sqrt(mean of ‖u_k‖² / ‖mean of u_k‖²) in [1, √K], to 12 binary digits."""
        if mean_square <= 0.0:
            return 1.0
        mantissa, exponent = math.frexp(math.sqrt(squares / self.K / mean_square))
        return min(max(round(mantissa * 2**12) / 2**12 * 2.0**exponent, 1.0), math.sqrt(self.K))

    # Explorers ------------------------------------------------------------------------------------------------------

    def positions(self, k: int, outside: Vector) -> Vector | list[int]:
        """Where rank k's explorer set lies in ``outside``, the ascending list of coordinates outside the core."""
        m, e = len(outside), self.explorer_size
        if e == 0:
            return np.arange(0)
        if self.explorer == "random":
            return RANDOM["random"](self, k, m)
        if self.explorer == "shared":
            return self.shared_positions(m, e)
        if self.explorer == "cyclic":
            return self.cyclic_positions(k, m, e)
        who = k if self.explorer == "greedy" else self.rounds % self.K
        magnitude = np.abs(self.w[who][outside] - self.base[who][outside])
        return np.sort(np.argsort(-magnitude, kind="stable")[:e])

    def shared_positions(self, m: int, e: int) -> list[int]:
        """The random draw, from a stream for all."""
        shift, *draws = halves([self.seed, 3], [0, 0, self.rounds, 0], e)
        bounds = [s * m // e for s in range(e + 1)]
        return sorted((a + d * (b - a) // 2**32 + shift) % m for a, b, d in zip(bounds, bounds[1:], draws))

    def cyclic_positions(self, k: int, m: int, e: int) -> list[int]:
        """Every rank walks through every stratum, ranks evenly apart."""
        first, *others = halves([self.seed, 4], [0, 0, 0, 0], max(0, e - 2))
        start = [first % 2**32, first // 2**32, *others][:e]
        bounds = [s * m // e for s in range(e + 1)]
        longest = -(-m // e)
        return [a + (h + self.rounds + k * longest // self.K) % (b - a) for a, b, h in zip(bounds, bounds[1:], start)]


def halves(key: list[int], counter: list[int], count: int) -> list[int]:
    """A Philox word, and the ``count`` 32-bit halves of the words after it, lower half first."""
    philox = np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64))
    first, *words = (int(word) for word in philox.random_raw(1 + (count + 1) // 2))
    return [first, *[half for word in words for half in (word % 2**32, word // 2**32)][:count]]
