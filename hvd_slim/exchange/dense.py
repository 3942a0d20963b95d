"""The dense exchange: every pending update, reduced. Standard data parallelism on parameter updates (Plump-DP);
with narrow values, its quantised form (Quant-DP)."""

from __future__ import annotations

import functools

import torch

from hvd_slim.agreement import require_finite
from hvd_slim.exchange.base import Exchange
from hvd_slim.exchange.flight import Flight
from hvd_slim.exchange.reduction import MeanReduction
from hvd_slim.values import ValueCodec


class DenseExchange(Exchange):
    """Sends 2(K−1)/K·n values a round. State beyond the model: w̄ (n), and a buffer of n values, made once: memory
    that is new to a process costs as much as two passes over it."""

    @functools.cached_property
    def _reduction(self) -> MeanReduction:
        return _reduction_of_everything(self, self.codec, "dense", self.restore_norm)

    def launch(self, round_number: int, overlap: bool, draw_ahead: bool = False) -> Flight:
        """Send every pending update, in the width that the settings say. Collective, non-blocking."""
        reduction = self._reduction
        with self.stats.timed("pack"):
            u = self.model.pending_update_everywhere(reduction.update)
            flight = Flight(round_number, u.new_empty(0), pending_core=u.clone() if overlap else None)
            reduction.start(round_number, self.nonfinite)
        return flight

    def merge(self, flight: Flight) -> None:
        """w̄ += mean over ranks of u; w_k = w̄, and what rounding kept back or was learned since. Collective."""
        merge_everything(self, self._reduction, flight.pending_core)

    def in_flight(self) -> MeanReduction:
        """The reduction of everything."""
        return self._reduction

    def dense(self, phase: str, restore_norm: bool) -> None:
        """One round at full width. Collective."""
        self.__dict__.pop("_reduction", None)  # two of its size would be one too many
        exchange_everything(self, phase, restore_norm)


def exchange_everything(exchange: Exchange, phase: str, restore_norm: bool) -> None:
    """u = w_k − w̄ everywhere, at full width; w̄ += mean over ranks of u; w_k = w̄. Collective.

    For every path that keeps w̄ on all ranks.
    """
    reduction = _reduction_of_everything(exchange, exchange.exact_codec, phase, restore_norm)
    with exchange.stats.timed("pack"):
        exchange.model.pending_update_everywhere(reduction.update)
        reduction.start(0, exchange.nonfinite)
    merge_everything(exchange, reduction, None)


def _reduction_of_everything(exchange: Exchange, codec: ValueCodec, phase: str, restore_norm: bool) -> MeanReduction:
    n = exchange.arena.n
    return exchange.reduction(codec, n, phase, n if restore_norm else 0)


def merge_everything(exchange: Exchange, reduction: MeanReduction, at_launch: torch.Tensor | None) -> None:
    """Take in the mean of everything; ``at_launch`` as in ``pending_since``. Collective."""
    model, stats = exchange.model, exchange.stats
    with stats.timed("wait"):
        total, divisor = reduction.finish_sum()
    require_finite(exchange.transport, *reduction.nonfinite)
    with stats.timed("merge"):
        left, reduction.unsent = reduction.unsent, None
        if at_launch is not None:
            learned = model.pending_update_everywhere(torch.empty_like(at_launch)).sub_(at_launch)
            left = learned if left is None else learned.add_(left)
        if left is None:
            model.take_over_everywhere(total, divisor)
            return
        model.absorb_everywhere(total.div_(divisor))
        model.settle_everywhere(left)
