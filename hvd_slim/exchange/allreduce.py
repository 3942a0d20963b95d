"""The slim exchange whose traffic is flat in the number of ranks: one explorer set for all, values by reduction."""

from __future__ import annotations

from typing import Any

import torch

from hvd_slim.agreement import require_finite
from hvd_slim.config import SlimConfig
from hvd_slim.exchange.base import SlimExchange
from hvd_slim.exchange.dense import exchange_everything
from hvd_slim.exchange.flight import Flight
from hvd_slim.exchange.reduction import MeanReduction
from hvd_slim.explorer import LeaderExplorer
from hvd_slim.global_model import GlobalModel
from hvd_slim.transport.base import Pending, Transport

#: (the round for which a leader's set was announced, the broadcast)
_NOTHING_AHEAD: tuple[int, Pending[torch.Tensor] | None] = (-1, None)


class AllreduceExchange(SlimExchange):
    """Core and explorers in one reduction, for an explorer that all ranks share.

    A rank sends 2(K−1)/K·αn values a round, and a leader its set. State beyond the model: w̄ (n), and the core's and
    the other coordinates' numbers (n).
    """

    def __init__(self, model: GlobalModel, transport: Transport, config: SlimConfig, restore_norm: bool) -> None:
        super().__init__(model, transport, config, restore_norm)
        self._mean = self._make_reduction()
        self._ahead = _NOTHING_AHEAD

    def set_explorer_count(self, count: int) -> None:
        """Explore ``count`` coordinates from now on."""
        if count != self.explorer.count:
            super().set_explorer_count(count)
            self._mean = self._make_reduction()

    def _make_reduction(self) -> MeanReduction:
        norm_count = self.core_count if self.restore_norm else 0
        return self.reduction(self.codec, self.core_count + self.explorer.count, "core", norm_count)

    def launch(self, round_number: int, overlap: bool, draw_ahead: bool = False) -> Flight:
        """Send the pending updates of core and explorers. Collective; waits for a leader's choice if it was not made
        a round ahead."""
        mean, c = self._mean, self.core_count
        with self.stats.timed("pack"):
            explored = self.coordinates_at(self._positions(round_number))
            with self.sweep() as steps:
                steps.pending_update(self.core, mean.update[:c])
                steps.pending_update(self.arena.locate(explored), mean.update[c:])
            flight = Flight(round_number, explored, pending_core=mean.update.clone() if overlap else None)
            mean.start(round_number, self.nonfinite)
            if draw_ahead and isinstance(self.explorer, LeaderExplorer) and self.explorer.count:
                self._ahead = round_number + 1, self._announce(self.explorer, round_number + 1, explored)
        return flight

    def merge(self, flight: Flight) -> None:
        """Take in a round."""
        mean, c = self._mean, self.core_count

        with self.stats.timed("wait"):
            change = mean.finish()

        require_finite(self.transport, *mean.nonfinite)
        with self.stats.timed("merge"), self.sweep() as steps:
            sets = ((self.core, slice(0, c)), (self.arena.locate(flight.explored), slice(c, None)))
            for where, part in sets:
                at_launch = None if flight.pending_core is None else flight.pending_core[part]
                left = self.pending_since(steps, where, at_launch, None if mean.unsent is None else mean.unsent[part])
                # w̄ += mean of u; what was sent of u_k is pending no longer.
                steps.merge(where, change[part], left)

    def _positions(self, round_number: int) -> torch.Tensor:
        """Everybody's explorer positions. Collective with a leader: its set is broadcast."""
        explorer = self.explorer
        if explorer.count == 0:
            return torch.empty(0, dtype=torch.int32, device=self.arena.device)
        if not isinstance(explorer, LeaderExplorer):
            return explorer.draw(round_number, self.transport.rank).positions
        number, announced = self._ahead
        self._ahead = _NOTHING_AHEAD
        if announced is None or number != round_number:
            announced = self._announce(explorer, round_number)
        packed = announced.wait()
        return explorer.positions(packed, 0, explorer.count, round_number, explorer.leader(round_number))

    def _announce(
        self, explorer: LeaderExplorer, round_number: int, under_way: torch.Tensor | None = None
    ) -> Pending[torch.Tensor]:
        """Launch the broadcast of the set that the leader of ``round_number`` chooses now. Collective.

        Args:
            under_way: coordinates whose pending updates have just been sent: there is nothing more to tell.
        """
        leader = explorer.leader(round_number)
        if self.transport.rank == leader:
            draw = explorer.draw(round_number, leader, self.largest_updates(under_way))
            packed = explorer.pack(draw, 0, explorer.count)
        else:
            packed = torch.empty(explorer.index_nbytes(explorer.count), dtype=torch.uint8, device=self.arena.device)
        return self.transport.broadcast(packed, leader, "explorer")

    def set_core(self, core: torch.Tensor) -> None:
        """Use ``core``, ascending coordinates, as the core set from now on."""
        super().set_core(core)
        self._ahead = _NOTHING_AHEAD  # positions are counted outside the core

    def in_flight(self) -> MeanReduction:
        """The mean of core and explorers."""
        return self._mean

    def announced(self) -> dict[str, Any]:
        """The set announced for the next round, for a checkpoint. Not collective; waits for it."""
        number, announced = self._ahead
        return {} if announced is None else {"round_number": number, "packed": announced.arrive().clone()}

    def resume_announced(self, state: dict[str, Any]) -> None:
        """Take up what ``announced`` gave. Not collective."""
        if state:
            packed = state["packed"].to(self.arena.device, copy=True)
            self._ahead = state["round_number"], Pending(lambda: packed)

    def dense(self, phase: str, restore_norm: bool) -> None:
        """Every pending update at full width. Collective."""
        exchange_everything(self, phase, restore_norm)
