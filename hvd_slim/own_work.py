"""What a rank's own work in a round costs: everything between the collectives. Measured, or reckoned on paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch

from hvd_slim.config import SlimConfig
from hvd_slim.values import make_codec


@dataclasses.dataclass(frozen=True)
class OwnWork:
    """Seconds of a rank's own work on one path.

    Attributes:
        usual: in a round of the path's own kind.
        everything: in a dense exchange at full width, which a resync is; 0 if it was not measured, because the settings
            never resync.
        selection: to choose a new core and to look it up, while all wait for one rank to choose.
    """

    usual: float
    everything: float
    selection: float

    def scaled(self, factor: float) -> OwnWork:
        """The same with every time ``factor`` times as long."""
        return OwnWork(self.usual * factor, self.everything * factor, self.selection * factor)


class Work(Protocol):
    """Tells what a rank's own work costs."""

    def of_path(self, path: str, n: int, ranks: int, config: SlimConfig) -> OwnWork:
        """On ``path`` with ``n`` parameters on ``ranks`` ranks."""


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """Own work as it was measured, for one setting, one number of ranks and paths that it allows.

    Attributes:
        n: parameters with which it was measured. With more it takes longer in proportion.
        paths: what each path took.
    """

    n: int
    paths: Mapping[str, OwnWork]

    def of_path(self, path: str, n: int, ranks: int, config: SlimConfig) -> OwnWork:
        """As measured, for ``n`` parameters."""
        if path not in self.paths:
            raise ValueError(f"own work was measured for {', '.join(self.paths)}, not for exchange={path!r}")
        return self.paths[path].scaled(n / self.n)


@dataclasses.dataclass(frozen=True)
class Paper:
    """Own work reckoned from what each thing takes on some machine; by default on one core of 2020's.

    Attributes:
        stream: seconds a parameter to work out and merge a pending update of everything.
        touch: seconds a coordinate to do the same on a set of coordinates; and ``trip`` seconds for each set.
        draw: seconds a coordinate to find an explorer set.
        scan: seconds a parameter to find the coordinates where something is largest.
        code: seconds a value to write and read it in narrow form.
    """

    stream: float = 4e-9
    touch: float = 13e-9
    trip: float = 2e-4
    draw: float = 10e-9
    scan: float = 4e-9
    code: float = 2e-9

    def of_path(self, path: str, n: int, ranks: int, config: SlimConfig) -> OwnWork:
        """Summed up over what a round consists of."""
        exact = make_codec(config.value_dtype, torch.float32, config.rounding, config.seed).exact
        look_through = n * self.stream / 5 if config.on_nonfinite == "raise" else 0.0
        code = 0.0 if exact else self.code
        # To the owner and what the owners say; or with narrow values out and in.
        passes = 2 if path == "alltoall" else 1
        everything = look_through + n * passes * self.stream
        selection = self.trip + n * (self.scan + 2 * self.stream)
        if path == "dense":
            usual = look_through + n * ((1 if exact else 2) * self.stream + 2 * code)
        else:
            usual = look_through + self._slim(path, n, ranks, config, code)
        return OwnWork(usual, everything, selection)

    def _slim(self, path: str, n: int, ranks: int, config: SlimConfig, code: float) -> float:
        core, explored = config.core_count(n), config.explorer_count(n)
        greatest = config.explorer in ("greedy", "leader")
        work = (core * 2 + explored) * code + (self.scan * n if greatest else self.draw * explored)
        if path == "allreduce":
            return work + self._trips(2, core + explored) + explored * code
        if path == "allgather":
            # What others send is found again, and merged into w̄ and into the live parameters.
            others = (ranks - 1) * explored
            return work + self._trips(1 + ranks, core + explored + others) + others * (self.draw + code)
        # What was pushed is found again, merged, read for the reply; the reply is merged.
        return work + self._trips(4 + ranks, core + 2 * explored) + explored * code

    def _trips(self, number: float, coordinates: float) -> float:
        """Pending updates worked out and merged, of so many sets with so many coordinates in all."""
        return number * self.trip + coordinates * self.touch
