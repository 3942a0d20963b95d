"""The dense exchange: every pending update, reduced. Standard data parallelism on parameter updates (Plump-DP);
with narrow values, its quantised form (Quant-DP)."""

from __future__ import annotations

from hvd_slim.agreement import require_finite
from hvd_slim.exchange.base import Exchange
from hvd_slim.exchange.reduction import MeanReduction
from hvd_slim.values import ValueCodec


class DenseExchange(Exchange):
    """Sends 2(K−1)/K·n values a round. State beyond the model: w̄ (n); while a round runs, a buffer of n values."""

    def exchange(self, round_number: int) -> None:
        """One round, in the width that the settings say. Collective."""
        exchange_everything(self, self.codec, round_number, "dense", self.restore_norm)

    def dense(self, phase: str, restore_norm: bool) -> None:
        """One round at full width. Collective."""
        exchange_everything(self, self.exact_codec, 0, phase, restore_norm)


def exchange_everything(
    exchange: Exchange, codec: ValueCodec, round_number: int, phase: str, restore_norm: bool
) -> None:
    """u = w_k − w̄ everywhere; w̄ += mean over ranks of u; w_k = w̄ (and what rounding kept back). Collective.

    For every path that keeps w̄ on all ranks.
    """
    arena, model, stats = exchange.arena, exchange.model, exchange.stats
    norm_count = arena.n if restore_norm else 0
    with stats.timed("pack"):
        reduction = MeanReduction(
            exchange.transport, codec, arena.n, arena.value_dtype, arena.device, phase, norm_count
        )
        model.pending_update_everywhere(reduction.update)
        reduction.start(round_number, exchange.nonfinite)
    with stats.timed("wait"):
        mean = reduction.finish()
    require_finite(exchange.transport, *reduction.nonfinite)
    with stats.timed("merge"):
        model.absorb_everywhere(mean)
        model.settle_everywhere(reduction.unsent)
