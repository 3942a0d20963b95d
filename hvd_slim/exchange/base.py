"""What every path of a round has in common: the two coordinate sets, and who holds the global model."""

from __future__ import annotations

import abc
import contextlib
from typing import Any

import torch

from hvd_slim.arena import Coordinates
from hvd_slim.chunks import others, take
from hvd_slim.config import SlimConfig
from hvd_slim.exchange.flight import Flight
from hvd_slim.exchange.reduction import MeanReduction
from hvd_slim.explorer import EXPLORERS, Explorer, Largest
from hvd_slim.global_model import GlobalModel
from hvd_slim.significance import largest_updates
from hvd_slim.sweep import Sweep, sweep
from hvd_slim.transport.base import Transport
from hvd_slim.values import ValueCodec, make_codec


class Exchange(abc.ABC):
    """One way in which a round moves.

    Args:
        model: what this rank knows of the global model, beside its live parameters.
        transport: carries the bytes.
        config: the settings.
        restore_norm: scale merged changes by γ.
    """

    #: whether every rank holds all of w̄
    replicated = True
    #: whether a new core must come with a dense exchange of everything
    resync_at_reselection = False

    def __init__(self, model: GlobalModel, transport: Transport, config: SlimConfig, restore_norm: bool) -> None:
        self.model, self.transport, self.stats = model, transport, transport.stats
        self.config, self.restore_norm = config, restore_norm
        self.arena = model.arena
        #: set before a round: whether this rank's parameters hold a NaN or an infinity
        self.nonfinite = False
        self.codec = make_codec(config.value_dtype, self.arena.value_dtype, config.rounding, config.seed)
        self.exact_codec = make_codec("float32", self.arena.value_dtype, "nearest", config.seed)

    def reduction(self, codec: ValueCodec, count: int, phase: str, norm_count: int) -> MeanReduction:
        """A reduction over all ranks, as ``MeanReduction`` describes it."""
        arena = self.arena
        return MeanReduction(
            self.transport, codec, count, arena.value_dtype, arena.device, phase, norm_count, 1 / self.config.local_rate
        )

    def exchange(self, round_number: int) -> None:
        """One round: launched, and merged at once. Collective."""
        self.merge(self.launch(round_number, overlap=False))

    @abc.abstractmethod
    def launch(self, round_number: int, overlap: bool, draw_ahead: bool = False) -> Flight:
        """Send what a round sends. Collective, non-blocking but for what receivers cannot do without.

        Args:
            overlap: parameters may change before the round is merged.
            draw_ahead: the next round is a slim one on the same core, and its explorers may be chosen now.
        """

    @abc.abstractmethod
    def merge(self, flight: Flight) -> None:
        """Take in what a round has brought. Collective; on the allgather, allreduce and dense paths with full-width
        values it only waits for what was launched."""

    def announced(self) -> dict[str, Any]:
        """What ranks have told each other of the next round already, for a checkpoint. Not collective."""
        return {}

    def resume_announced(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take up what ``announced`` gave. Not collective."""

    @abc.abstractmethod
    def in_flight(self) -> MeanReduction:
        """The reduction that a flight waits for."""

    def flight_state(self, flight: Flight) -> dict[str, Any]:
        """A flight for a checkpoint; waits for what was launched. Not collective."""
        return {**flight.state(), "reduction": self.in_flight().in_flight()}

    def resume_flight(self, state: dict[str, Any]) -> Flight:
        """Take up what ``flight_state`` gave. Not collective."""
        state = dict(state)
        self.in_flight().resume(state["round_number"], state.pop("reduction"))
        return Flight.from_state(state, self.arena.device)

    @abc.abstractmethod
    def dense(self, phase: str, restore_norm: bool) -> None:
        """Exchange every pending update at full width; all replicas are equal afterwards. Collective."""

    def replicated_values(self) -> list[torch.Tensor]:
        """What of w̄ every rank holds, and must hold to the same bits. Not collective."""
        return self.model.tensors()

    def whole_model(self) -> GlobalModel:
        """w̄, entire. Not collective where every rank holds it; collective where each holds a slice."""
        return self.model

    def sweep(self) -> contextlib.AbstractContextManager[Sweep]:
        """Steps on sets of coordinates, in one pass over memory where that can be."""
        return sweep(self.model)

    def pending_update(self, where: Coordinates, out: torch.Tensor) -> torch.Tensor:
        """u_k = w_k − w̄ at ``where``, into ``out``."""
        with self.sweep() as steps:
            return steps.pending_update(where, out)

    def pending_since(
        self, steps: Sweep, where: Coordinates, at_launch: torch.Tensor | None, unsent: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What stays pending at ``where`` when what was sent of ``at_launch`` is merged; None for nothing.

        That is what rounding kept back, and what the rank has learned since the launch (None: merged at once).
        """
        if at_launch is None:
            return unsent
        return steps.pending_update(where, torch.empty_like(at_launch), at_launch, unsent)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beyond ``model``, as tensors. Not collective."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take back what ``state`` gave."""


class SlimExchange(Exchange):
    """A round of core and explorers; ``set_core`` comes before the first."""

    def __init__(self, model: GlobalModel, transport: Transport, config: SlimConfig, restore_norm: bool) -> None:
        super().__init__(model, transport, config, restore_norm)
        self.core_count = config.core_count(self.arena.n)
        #: of explorer messages, for stochastic rounding; a reduction numbers its own from 0 to K
        self.first_message = transport.size + 1
        self._outside = self._core_indices = torch.empty(0, dtype=torch.int32)
        self.core = self.arena.locate(self._core_indices)
        self._layout_version = 0
        self.explorer = self._make_explorer(config.explorer_count(self.arena.n))

    def set_core(self, core: torch.Tensor) -> None:
        """Use ``core``, ascending coordinates, as the core set from now on."""
        self._core_indices = core.to(self.arena.device)
        self._locate_core()
        self._outside = others(self._core_indices, self.arena.n, self._outside)

    def _locate_core(self) -> None:
        self.core = self.arena.locate(self._core_indices)
        self._layout_version = self.arena.layout_version

    def follow_layout(self) -> None:
        """Find the core again if parameters' memory was exchanged. Not collective."""
        if self._layout_version != self.arena.layout_version:
            self._locate_core()

    def set_explorer_count(self, count: int) -> None:
        """Explore ``count`` coordinates from now on."""
        if count != self.explorer.count:
            self.explorer = self._make_explorer(count)

    def _make_explorer(self, count: int) -> Explorer:
        arena, config = self.arena, self.config
        make = EXPLORERS[config.explorer]
        return make(arena.n - self.core_count, count, config.seed, self.transport.size, arena.device)

    def coordinates_at(self, positions: torch.Tensor) -> torch.Tensor:
        """The coordinates outside the core at ``positions`` of their ascending list."""
        return take(self._outside, positions)

    def no_coordinates(self) -> torch.Tensor:
        """An empty explorer set."""
        return self._outside[:0]

    def largest_updates(self, sent: torch.Tensor | None = None) -> Largest:
        """Finds the positions with the largest |u_k|; 0 at the ascending coordinates ``sent``, which are on their way.

        Reads every parameter.
        """
        return lambda count: largest_updates(self.model, count, self._core_indices, sent)
