"""The oracle with ``overlap``: a round takes the state of its launch, and reaches the replicas one step later."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from oracle import Vector
from oracle_paths import PathOracle


@dataclasses.dataclass
class State:
    """w and base of every rank, and w̄."""

    w: list[Vector]
    base: list[Vector]
    w_bar: Vector

    @classmethod
    def of(cls, oracle: PathOracle) -> State:
        return cls([w.copy() for w in oracle.w], [base.copy() for base in oracle.base], oracle.w_bar.copy())

    def copy(self) -> State:
        return State([w.copy() for w in self.w], [base.copy() for base in self.base], self.w_bar.copy())

    def to(self, oracle: PathOracle) -> None:
        oracle.w, oracle.base, oracle.w_bar = self.w, self.base, self.w_bar


class OverlapOracle(PathOracle):
    """K replicas on any path, one round in flight."""

    delayed = True
    launched: State | None = None  # as it was at the launch
    landed: State | None = None  # what the round would make of it at once
    announcing: State | None = None  # as it was when the next round's leader chose
    under_way: Vector = np.arange(0)  # the explorers that had just been sent then

    def after_local_steps(self, gradients: Sequence[Vector]) -> None:
        """The round in flight is merged; one that is due is launched."""
        self.merge()
        if self.K > 1 and self.steps % self.local_steps == 0:
            self.launch(gradients)

    def merge(self) -> None:
        """What the round made of the state at its launch, and what each rank has learned since."""
        if self.launched is None or self.landed is None:
            return
        learned = [now - then for now, then in zip(self.w, self.launched.w)]
        self.landed.to(self)
        self.w = [w + more for w, more in zip(self.w, learned)]
        self.launched = self.landed = None

    def launch(self, gradients: Sequence[Vector]) -> None:
        """A round; a dense one of the warm-up and a resync are merged at once."""
        r, before = self.rounds, State.of(self)
        at_once = not self.is_slim(r) and not self.always_dense
        resync = self.resync_every > 0 and (r + 1) % self.resync_every == 0
        at_once = at_once or resync or (self.warmup == "dense" and r < self.warmup_rounds)
        self.round(gradients)
        if not at_once:
            self.launched, self.landed = before, State.of(self)
            before.copy().to(self)
        alike = self.is_slim(r + 1) and (r + 1) % self.reselect_every != 0 and r >= self.warmup_rounds
        self.announcing = before if alike and not at_once else None
        self.under_way = self.E[0] if self.E else np.arange(0)

    def is_slim(self, r: int) -> bool:
        """Whether round r is neither dense nor a resync."""
        if self.always_dense or (r < self.warmup_rounds and self.warmup == "dense"):
            return False
        if self.resync_every and (r + 1) % self.resync_every == 0:
            return False
        first = self.warmup_rounds if self.warmup == "dense" else 0
        return not (self.exchange == "alltoall" and r % self.reselect_every == 0 and r > first)

    def positions(self, k: int, outside: Vector) -> Vector | list[int]:
        """A leader chooses when the round before is launched, if that round has the same core."""
        if self.explorer != "leader" or self.announcing is None or self.explorer_size == 0:
            return super().positions(k, outside)
        who, then = self.rounds % self.K, self.announcing
        magnitude = np.abs(then.w[who][outside] - then.base[who][outside])
        magnitude[np.isin(outside, self.under_way)] = 0.0  # on its way already
        return np.sort(np.argsort(-magnitude, kind="stable")[: self.explorer_size])
