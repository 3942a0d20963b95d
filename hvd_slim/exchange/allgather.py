"""The slim exchange for few ranks: core by reduction, private explorers by allgather of value-index pairs."""

from __future__ import annotations

import torch

from hvd_slim.agreement import require_finite
from hvd_slim.config import SlimConfig
from hvd_slim.exchange.base import SlimExchange
from hvd_slim.exchange.dense import exchange_everything
from hvd_slim.exchange.flight import Flight
from hvd_slim.exchange.reduction import MeanReduction
from hvd_slim.global_model import GlobalModel
from hvd_slim.transport.base import Transport
from hvd_slim.wire import PairFormat

#: messages whose coordinates are in memory at one time
_AT_ONCE = 4


class AllgatherExchange(SlimExchange):
    """Slim-DP's round with w̄ replicated on every rank.

    A rank sends 2(K−1)/K·βn values and (K−1)·(α−β)n pairs a round. State beyond the model: w̄ (n), and the core's and
    the other coordinates' numbers (n).
    """

    def __init__(self, model: GlobalModel, transport: Transport, config: SlimConfig, restore_norm: bool) -> None:
        super().__init__(model, transport, config, restore_norm)
        norm_count = self.core_count if restore_norm else 0
        self._core_mean = self.reduction(self.codec, self.core_count, "core", norm_count)

    def launch(self, round_number: int, overlap: bool, draw_ahead: bool = False) -> Flight:
        """Send the core's pending updates, and the pairs of E_k. Collective, non-blocking."""
        core_mean = self._core_mean
        with self.stats.timed("pack"):
            u = self.pending_update(self.core, core_mean.update)
            flight = Flight(round_number, self.no_coordinates(), pending_core=u.clone() if overlap else None)
            core_mean.start(round_number, self.nonfinite)
            if self.explorer.count:
                self._send_explorers(flight, overlap)
        return flight

    def _send_explorers(self, flight: Flight, overlap: bool) -> None:
        round_number, rank, count = flight.round_number, self.transport.rank, self.explorer.count
        draw = self.explorer.draw(round_number, rank, self.largest_updates())
        flight.explored = self.coordinates_at(draw.positions)
        u = torch.empty(count, dtype=self.arena.value_dtype, device=self.arena.device)
        self.pending_update(self.arena.locate(flight.explored), u)
        pairs = PairFormat(self.codec, self.explorer.index_nbytes)
        message = torch.zeros(pairs.nbytes(count), dtype=torch.uint8, device=self.arena.device)
        indices = self.explorer.pack(draw, 0, count)
        pairs.write(message, u, indices, draw.first, round_number, rank, self.first_message)
        flight.unsent = None if self.codec.exact else u - pairs.read(message)[0]
        flight.pending_explored = u if overlap else None
        flight.brought = self.transport.allgather(message, "explorer")

    def merge(self, flight: Flight) -> None:
        """Take in a round. The order is the algorithm's: core, then explorers in rank order."""
        core_mean, size = self._core_mean, self.transport.size

        with self.stats.timed("wait"):
            core_change = core_mean.finish()
            messages = flight.brought.wait() if flight.brought else ()

        require_finite(self.transport, *core_mean.nonfinite)
        with self.stats.timed("merge"), self.sweep() as steps:
            explored = self.arena.locate(flight.explored)
            core_left = self.pending_since(steps, self.core, flight.pending_core, core_mean.unsent)
            left = self.pending_since(steps, explored, flight.pending_explored, flight.unsent)
            # Core: w̄[C] += mean of u[C]; what was sent of u_k[C] is pending no longer.
            steps.merge(self.core, core_change, core_left)
            # Explorers: w̄[E_j] += v_j / K and w_k with it, for every rank j in rank order; then w_k[E_k] -= v_k.
            pairs = PairFormat(self.codec, self.explorer.index_nbytes)
            for j, message in enumerate(messages):
                v, indices, first = pairs.read(message)
                change = v.div_(size).mul_(core_mean.factor)
                if j == self.transport.rank:
                    steps.absorb(explored, change)
                else:
                    positions = self.explorer.positions(indices, first, v.numel(), flight.round_number, j)
                    steps.advance(self.arena.locate(self.coordinates_at(positions)), change)
                if (j + 1) % _AT_ONCE == 0:
                    steps.flush()
            steps.settle(explored, left)

    def in_flight(self) -> MeanReduction:
        """The core's mean."""
        return self._core_mean

    def dense(self, phase: str, restore_norm: bool) -> None:
        """Every pending update at full width. Collective."""
        exchange_everything(self, phase, restore_norm)
