"""What a rank's own work takes, beside one copy of the parameters: the time that memory alone would take is the scale.

Work is measured with the classes that carry it out (``rehearsal``). Beside each figure stands the least that any
implementation must move through memory for it: every cache line that holds a coordinate of a set, read, and if it
changes written. A copy of n float32 parameters reads 4n bytes, and 4n of what it overwrites, and writes 4n.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from hvd_slim.arena import Arena
from hvd_slim.config import SlimConfig
from hvd_slim.rehearsal import Rehearsal, Sample

#: float32 parameters in a cache line
_LINE = 16
#: bytes that a copy moves for each parameter
_COPY = 12


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One piece of work.

    Attributes:
        n: parameters.
        name: what is done.
        copies: times in units of one copy of n, one for each repeat.
        least: bytes that it must move, in the same unit: those that a copy moves.
        seconds: median.
    """

    n: int
    name: str
    copies: list[float]
    least: float
    seconds: float


def kernels(n: int, config: SlimConfig, path: str, ranks: int, repeats: int) -> Iterator[Kernel]:
    """Re-selection, the explorers' draw or a leader's choice, and the rest of a round: pack and merge. Not collective.

    Args:
        n: parameters, float32, in 20 tensors on the CPU.
        config: the settings.
        path: of the exchange.
        ranks: K, made up.
        repeats: of each measurement; a copy is timed beside each.
    """
    arena = Arena([(f"tensor{i}", torch.zeros(n * (i + 1) // 20 - n * i // 20)) for i in range(20)])
    sample = Sample(arena, n)
    quiet = dataclasses.replace(config, on_nonfinite="ignore")
    rehearsal = Rehearsal(path, sample, quiet, ranks)
    source, target = torch.ones(n), torch.ones(n)

    def measured(name: str, least: float, *actions: Callable[[], None]) -> Kernel:
        """The first action's time, less the other one's, which is a part of it."""
        seconds, copies = [], []
        for repeat in range(repeats + 1):
            took = [rehearsal.seconds(action) for action in actions]
            begin = time.perf_counter()
            target.copy_(source)
            copy = time.perf_counter() - begin
            if repeat:  # the first time memory is allocated
                seconds.append(took[0] - sum(took[1:]))
                copies.append(seconds[-1] / copy)
        return Kernel(n, name, copies, least, statistics.median(seconds))

    def reselect() -> None:
        rehearsal.choose()
        rehearsal.look_up()

    core, explored = config.core_count(n) / n, config.explorer_count(n) / n
    # Significance from w and g; then w, w̄ and numbers are looked up: n/8 bytes of a bitmap, 4 a number.
    yield measured("re-selection", (8 + 1 / 8 + 4) / _COPY, reselect)
    if config.explorer == "leader":
        yield measured("leader's choice", (8 + 4 * explored) / _COPY, rehearsal.lead)
        drawing: tuple[Callable[[], None], ...] = ()
    else:
        drawing = (rehearsal.draw,)
        # Offsets, and the numbers of the coordinates outside the core where they lie.
        yield measured("explorers' draw", (4 * _lines(explored) + 4 * explored) / _COPY, rehearsal.draw)
    least = _round_bytes(path, ranks, core, explored) / _COPY
    yield measured("pack and merge", least, rehearsal.round, *drawing)


def _lines(fraction: float) -> float:
    """Of n parameters, the part in cache lines that hold a coordinate of a set spread at random."""
    return 1 - (1 - fraction) ** _LINE


def _round_bytes(path: str, ranks: int, core: float, explored: float) -> float:
    """Bytes a parameter: pack reads w and w̄ and writes a buffer; merge reads the buffer, reads and writes w and w̄.
    Numbers of coordinates are read each time. Of allgather, every rank's set is merged."""
    sent = core + explored
    packed = 2 * 4 * _lines(sent) + (4 + 4) * sent
    merged = core + ranks * explored if path == "allgather" else sent
    return packed + 4 * 4 * _lines(min(merged, 1.0)) + (4 + 4) * merged
