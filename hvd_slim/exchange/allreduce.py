"""The slim exchange whose traffic is flat in the number of ranks: one explorer set for all, values by reduction."""

from __future__ import annotations

import torch

from hvd_slim.agreement import require_finite
from hvd_slim.config import SlimConfig
from hvd_slim.exchange.base import SlimExchange
from hvd_slim.exchange.dense import exchange_everything
from hvd_slim.exchange.reduction import MeanReduction
from hvd_slim.explorer import LeaderExplorer
from hvd_slim.global_model import GlobalModel
from hvd_slim.transport.base import Transport


class AllreduceExchange(SlimExchange):
    """Core and explorers in one reduction, for an explorer that all ranks share.

    A rank sends 2(K−1)/K·αn values a round, and a leader its set. State beyond the model: w̄ (n), and the core's and
    the other coordinates' numbers (n).
    """

    def __init__(self, model: GlobalModel, transport: Transport, config: SlimConfig, restore_norm: bool) -> None:
        super().__init__(model, transport, config, restore_norm)
        self._mean = self._make_reduction()

    def set_explorer_count(self, count: int) -> None:
        """Explore ``count`` coordinates from now on."""
        if count != self.explorer.count:
            super().set_explorer_count(count)
            self._mean = self._make_reduction()

    def _make_reduction(self) -> MeanReduction:
        arena, count = self.arena, self.core_count + self.explorer.count
        norm_count = self.core_count if self.restore_norm else 0
        return MeanReduction(self.transport, self.codec, count, arena.value_dtype, arena.device, "core", norm_count)

    def exchange(self, round_number: int) -> None:
        """One round. Collective."""
        model, mean, c = self.model, self._mean, self.core_count

        with self.stats.timed("pack"):
            explored = self.arena.locate(self.coordinates_at(self._positions(round_number)))
            model.pending_update(self.core, mean.update[:c])
            model.pending_update(explored, mean.update[c:])
            mean.start(round_number, self.nonfinite)

        with self.stats.timed("wait"):
            change = mean.finish()

        require_finite(self.transport, *mean.nonfinite)
        with self.stats.timed("merge"):
            # w̄ += mean of u on C and E; what was sent of u_k there is pending no longer.
            model.absorb(self.core, change[:c])
            model.absorb(explored, change[c:])
            model.settle(self.core, None if mean.unsent is None else mean.unsent[:c])
            model.settle(explored, None if mean.unsent is None else mean.unsent[c:])

    def _positions(self, round_number: int) -> torch.Tensor:
        """Everybody's explorer positions. Collective with a leader: its set is broadcast."""
        explorer, rank = self.explorer, self.transport.rank
        if not isinstance(explorer, LeaderExplorer) or explorer.count == 0:
            return explorer.draw(round_number, rank).positions if explorer.count else self._no_positions()
        leader = explorer.leader(round_number)
        if rank == leader:
            draw = explorer.draw(round_number, rank, self.magnitude())
            self.transport.broadcast(explorer.pack(draw, 0, explorer.count), leader, "explorer").wait()
            return draw.positions
        packed = torch.empty(explorer.index_nbytes(explorer.count), dtype=torch.uint8, device=self.arena.device)
        self.transport.broadcast(packed, leader, "explorer").wait()
        return explorer.positions(packed, 0, explorer.count, round_number, leader)

    def _no_positions(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int32, device=self.arena.device)

    def dense(self, phase: str, restore_norm: bool) -> None:
        """Every pending update at full width. Collective."""
        exchange_everything(self, self.exact_codec, 0, phase, restore_norm)
