"""The dense exchange: every pending update by allreduce. All replicas are equal afterwards."""

from __future__ import annotations

import torch

from hvd_slim.global_model import GlobalModel
from hvd_slim.transport.base import Transport


class DenseExchange:
    """Standard data parallelism on parameter updates; also what a resync does.

    Sends 2(K−1)/K·n values a round. State beyond the model: w̄ (n); while a round runs, one buffer of n values.
    """

    def __init__(self, global_model: GlobalModel, transport: Transport) -> None:
        self._global_model, self._transport = global_model, transport

    def exchange(self, phase: str = "dense") -> None:
        """One round. Collective.

        u = w_k − w̄ everywhere; w̄ += mean over ranks of u; w_k = w̄.
        """
        arena, stats = self._global_model.arena, self._transport.stats
        with stats.timed("pack"):
            update = torch.empty(arena.n, dtype=arena.value_dtype, device=arena.device)
            self._global_model.pending_update_everywhere(update)
            pending = self._transport.allreduce(update, phase)
        with stats.timed("wait"):
            total = pending.wait()
        with stats.timed("merge"):
            self._global_model.absorb_everywhere(total.div_(self._transport.size))
            self._global_model.copy_to_live()
