"""A path's rounds with nobody else: what a rank's own work takes, on a sample of the parameters.

A round is rehearsed with the same classes that carry it out, so whatever they do is measured as it is. Only the
collectives are made up: every other rank sends what this one sends, at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hvd_slim import sets, significance
from hvd_slim.arena import Arena
from hvd_slim.config import SHARED_EXPLORERS, SlimConfig
from hvd_slim.exchange import PATHS
from hvd_slim.exchange.base import SlimExchange
from hvd_slim.explorer import Explorer, LeaderExplorer
from hvd_slim.global_model import GlobalModel
from hvd_slim.memory import PROBED, REHEARSED_RANKS, SWEPT
from hvd_slim.own_work import OwnWork, Rehearsed
from hvd_slim.planner import allowed_paths
from hvd_slim.stats import Stats
from hvd_slim.transport.base import Pending, Received, Result, Transport

#: calls an action, which returns the seconds that count, a few times, and returns the time that is typical of all
#: ranks; with ``alone`` one rank acts while the others wait
Timed = Callable[[Callable[[], float], bool], float]


def rehearse(arena: Arena, config: SlimConfig, size: int, timed: Timed) -> Rehearsed:
    """Own work on every path that ``config`` allows. Collective if ``timed`` is.

    Args:
        arena: the run's parameters, which are left alone: a sample has their shapes and dtypes.
        config: the settings.
        size: K.
    """
    sample = Sample(arena)
    paths: dict[str, OwnWork] = {}
    selection: float | None = None
    for path in allowed_paths(config, arena.n):
        rehearsal = Rehearsal(path, sample, config, min(size, REHEARSED_RANKS) if path == "allgather" else size)
        if path != "dense" and selection is None:
            selection = rehearsal.selection(timed)  # on any path the same
        usual = rehearsal.usual(timed)
        if path == "allgather" and size > REHEARSED_RANKS:
            # What others send costs as much for each; of very many it would take too long to find out.
            few = REHEARSED_RANKS // 2
            of_few = Rehearsal(path, sample, config, few).usual(timed)
            usual += (size - REHEARSED_RANKS) * max(usual - of_few, 0.0) / (REHEARSED_RANKS - few)
        if path == "dense":
            paths[path] = OwnWork(usual, usual, 0.0)
        else:
            resyncs = config.resync_every > 0 or PATHS[path].resync_at_reselection
            paths[path] = OwnWork(usual, rehearsal.everything(timed) if resyncs else 0.0, selection or 0.0)
    return Rehearsed(sample.arena.n, paths)


class Sample:
    """Random numbers in the shapes, dtypes and places of the first parameters, the last one cut off, as parameters.

    Args:
        arena: whose parameters are stood in for.
        most: parameters that there may be.
    """

    def __init__(self, arena: Arena, most: int = PROBED) -> None:
        named, left = [], most
        for segment in arena.segments():
            real = segment.real
            cut = real.numel() > left
            named.append((segment.name, real.new_zeros(left) if cut else torch.zeros_like(real)))
            left -= named[-1][1].numel()
            if not left:
                break
        self.arena = Arena(named)
        generator = torch.Generator().manual_seed(0)
        self._learned = []
        for _, parameter in named:
            change = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(change)
            parameter.grad = change
            self._learned.append(change)
        device = self.arena.device
        self._swept = torch.zeros(SWEPT, dtype=torch.uint8) if device.type == "cpu" else None

    def step(self) -> None:
        """What a training step does: the parameters change, and the processor's caches hold something else."""
        for segment, change in zip(self.arena.segments(), self._learned):
            segment.real.add_(change, alpha=2.0**-6)
        if self._swept is not None:
            self._swept.add_(1)


class Rehearsal:
    """One path's rounds on a sample.

    Args:
        path: of the exchange.
        sample: the parameters.
        config: the settings.
        size: K.
    """

    def __init__(self, path: str, sample: Sample, config: SlimConfig, size: int) -> None:
        self._sample, self._arena, self._config = sample, sample.arena, config
        self._transport = _Echo(size)
        model = GlobalModel(self._arena)
        self._exchange = PATHS[path](model, self._transport, config, bool(config.restore_norm))
        self._core = torch.empty(0)
        self._has_leader = False
        sample.step()
        if isinstance(self._exchange, SlimExchange):
            self.choose()
            self.look_up()
            explorer = self._exchange.explorer
            if config.explorer not in SHARED_EXPLORERS:
                _draw_alike(explorer)
            self._has_leader = isinstance(explorer, LeaderExplorer) and explorer.count > 0
            if self._has_leader:
                # Rounds are rehearsed as one whom the leader tells: its choice is measured by itself.
                self.lead()
                self._transport.rank = 1

    @property
    def _slim(self) -> SlimExchange:
        assert isinstance(self._exchange, SlimExchange)
        return self._exchange

    def usual(self, timed: Timed) -> float:
        """A round of the path's own kind."""
        seconds = timed(lambda: self.seconds(self.round), False)
        if self._has_leader:
            seconds += timed(lambda: self.seconds(self.lead), True)
        return seconds

    def everything(self, timed: Timed) -> float:
        """A dense exchange at full width."""
        return timed(lambda: self.seconds(self._everything), False)

    def selection(self, timed: Timed) -> float:
        """One rank chooses a core, and all take it up."""
        choice = timed(lambda: self.seconds(self.choose), True)
        return choice + timed(lambda: self.seconds(self.look_up), False)

    def seconds(self, action: Callable[[], object]) -> float:
        """Of one call after a step, what was started on the device included, what collectives bring not."""
        self._sample.step()
        self._synchronize()
        self._transport.seconds = 0.0
        begin = time.perf_counter()
        action()
        self._synchronize()
        return time.perf_counter() - begin - self._transport.seconds

    def _synchronize(self) -> None:
        if self._arena.device.type == "cuda":
            torch.cuda.synchronize(self._arena.device)

    # What is timed ---------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """All of a round, but for the collectives and a leader's choice."""
        self._is_finite()
        flight = self._exchange.launch(0, self._config.overlap)
        # Owners answer as many as they were asked for: not quite alike.
        self._transport.least = self._arena.value_dtype.itemsize * max(flight.lengths, default=0)
        self._exchange.merge(flight)
        self._transport.least = 0

    def _everything(self) -> None:
        self._is_finite()
        self._exchange.dense("resync", restore_norm=False)

    def _is_finite(self) -> None:
        if self._config.on_nonfinite == "raise":
            self._arena.is_finite()

    def draw(self) -> None:
        """This rank finds out its explorers' coordinates, which is a part of a round."""
        self._slim.coordinates_at(self._slim.explorer.draw(0, self._transport.rank).positions)

    def lead(self) -> None:
        """A leader chooses the explorers of a round."""
        exchange = self._slim
        draw = exchange.explorer.draw(0, 0, exchange.largest_updates())
        self._transport.told = exchange.explorer.pack(draw, 0, exchange.explorer.count)

    def choose(self) -> None:
        """One rank chooses a core."""
        config, count = self._config, self._slim.core_count
        core = significance.most_significant(self._arena, config.gradient_weight, config.normalize, count)
        self._core = sets.pack_indices(core, self._arena.n)

    def look_up(self) -> None:
        """All take up a core."""
        self._slim.set_core(sets.unpack_indices(self._core, self._slim.core_count, self._arena.n))


def _draw_alike(explorer: Explorer) -> None:
    """What any rank has drawn is what rank 0 has drawn."""
    positions = explorer.positions

    def of_rank_0(indices: torch.Tensor, first: int, count: int, round_number: int, rank: int) -> torch.Tensor:
        return positions(indices, first, count, round_number, 0)

    explorer.positions = of_rank_0  # type: ignore[method-assign]


class _Echo(Transport):
    """Brings of every other rank what this one sends, as far as its form goes. Sums are left as they are.

    Attributes:
        seconds: spent in here so far, which in a run is the collectives'.
        told: what a broadcast brings; None for what is sent.
        least: bytes that a message between two ranks has at least.
    """

    def __init__(self, size: int) -> None:
        super().__init__(0, size, Stats())
        self.seconds, self.least = 0.0, 0
        self.told: torch.Tensor | None = None

    def _timed(self, bring: Callable[[], Result]) -> Pending[Result]:
        begin = time.perf_counter()
        brought = bring()
        self.seconds += time.perf_counter() - begin
        return Pending(lambda: brought)

    def _allreduce(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return Pending(lambda: tensor)

    def _allgather(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return self._timed(lambda: tensor.repeat(self.size, 1))

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Pending[torch.Tensor]:
        told = self.told
        return self._timed(lambda: tensor if told is None else tensor.copy_(told))

    def _alltoall(self, tensor: torch.Tensor, counts: list[int], name: str) -> Pending[Received]:
        def bring() -> Received:
            mine = tensor.split(counts)[self.rank]
            if mine.numel() < self.least:
                mine = torch.cat([mine, mine.new_zeros(self.least - mine.numel())])
            return mine.repeat(self.size), [mine.numel()] * self.size

        return self._timed(bring)

    def gather_texts(self, text: str) -> list[str]:
        """The same text of every rank."""
        return [text] * self.size
