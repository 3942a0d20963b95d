"""The slim exchange for few ranks: core by reduction, private explorers by allgather of value-index pairs."""

from __future__ import annotations

import torch

from hvd_slim.agreement import require_finite
from hvd_slim.arena import Coordinates
from hvd_slim.config import SlimConfig
from hvd_slim.exchange.base import SlimExchange
from hvd_slim.exchange.dense import exchange_everything
from hvd_slim.exchange.reduction import MeanReduction
from hvd_slim.global_model import GlobalModel
from hvd_slim.transport.base import Pending, Transport
from hvd_slim.wire import PairFormat


class AllgatherExchange(SlimExchange):
    """Slim-DP's round with w̄ replicated on every rank.

    A rank sends 2(K−1)/K·βn values and (K−1)·(α−β)n pairs a round. State beyond the model: w̄ (n), and the core's and
    the other coordinates' numbers (n).
    """

    def __init__(self, model: GlobalModel, transport: Transport, config: SlimConfig, restore_norm: bool) -> None:
        super().__init__(model, transport, config, restore_norm)
        arena = self.arena
        norm_count = self.core_count if restore_norm else 0
        self._core_mean = MeanReduction(
            transport, self.codec, self.core_count, arena.value_dtype, arena.device, "core", norm_count
        )

    def exchange(self, round_number: int) -> None:
        """One round. Collective. The order is the algorithm's: core, then explorers in rank order."""
        model, rank, size = self.model, self.transport.rank, self.transport.size

        with self.stats.timed("pack"):
            model.pending_update(self.core, self._core_mean.update)
            self._core_mean.start(round_number, self.nonfinite)
            pairs = PairFormat(self.codec, self.explorer.index_nbytes)
            explored, unsent, messages_pending = self._send_explorers(pairs, round_number)

        with self.stats.timed("wait"):
            core_change = self._core_mean.finish()
            messages = messages_pending.wait() if messages_pending else ()

        require_finite(self.transport, *self._core_mean.nonfinite)
        with self.stats.timed("merge"):
            # Core: w̄[C] += mean of u[C]; what was sent of u_k[C] is pending no longer.
            model.absorb(self.core, core_change)
            model.settle(self.core, self._core_mean.unsent)
            # Explorers: w̄[E_j] += v_j / K and w_k with it, for every rank j in rank order; then w_k[E_k] -= v_k.
            for j, message in enumerate(messages):
                v, indices, first = pairs.read(message)
                change = v.div_(size).mul_(self._core_mean.factor)
                if j == rank:
                    model.absorb(explored, change)
                else:
                    positions = self.explorer.positions(indices, first, v.numel(), round_number, j)
                    model.advance(self.arena.locate(self.coordinates_at(positions)), change)
            model.settle(explored, unsent)

    def _send_explorers(
        self, pairs: PairFormat, round_number: int
    ) -> tuple[Coordinates, torch.Tensor | None, Pending[torch.Tensor] | None]:
        """Launch the gathering of all pairs: (E_k, what rounding kept back of u_k there, the messages to come)."""
        count, rank = self.explorer.count, self.transport.rank
        if count == 0:
            return Coordinates(0, ()), None, None
        draw = self.explorer.draw(round_number, rank, self.magnitude())
        explored = self.arena.locate(self.coordinates_at(draw.positions))
        u = torch.empty(count, dtype=self.arena.value_dtype, device=self.arena.device)
        self.model.pending_update(explored, u)
        message = torch.zeros(pairs.nbytes(count), dtype=torch.uint8, device=self.arena.device)
        indices = self.explorer.pack(draw, 0, count)
        pairs.write(message, u, indices, draw.first, round_number, rank, self.first_message)
        unsent = None if self.codec.exact else u - pairs.read(message)[0]
        return explored, unsent, self.transport.allgather(message, "explorer")

    def dense(self, phase: str, restore_norm: bool) -> None:
        """Every pending update at full width. Collective."""
        exchange_everything(self, self.exact_codec, 0, phase, restore_norm)
