"""The slim exchange for few ranks: core by allreduce, explorers by allgather of value-offset pairs."""

from __future__ import annotations

import torch

from hvd_slim.arena import Coordinates
from hvd_slim.explorer import RandomExplorer
from hvd_slim.global_model import GlobalModel
from hvd_slim.transport.base import Transport
from hvd_slim.wire import PairFormat, index_dtype


class AllgatherExchange:
    """Slim-DP's round with w̄ replicated on every rank.

    A rank sends 2(K−1)/K·βn values and (K−1)·(α−β)n pairs a round, in two collectives (one if there are no
    explorers). State beyond the model: w̄ (n) and the lists of core and non-core coordinates (n indices).

    Args:
        global_model, transport: what is exchanged, and by whom.
        core_count, explorer_count: sizes of the two sets.
        seed: of the explorers' draws.
    """

    def __init__(
        self, global_model: GlobalModel, transport: Transport, core_count: int, explorer_count: int, seed: int
    ) -> None:
        arena = global_model.arena
        self._global_model, self._transport = global_model, transport
        self._explorer = RandomExplorer(arena.n - core_count, explorer_count, seed, arena.device)
        self._pairs = PairFormat(explorer_count, arena.value_dtype, self._explorer.offset_dtype)
        self._core_update = torch.empty(core_count, dtype=arena.value_dtype, device=arena.device)
        self._message = self._pairs.empty(arena.device)
        self._core: Coordinates | None = None
        self._outside = torch.empty(0)

    def set_core(self, core: torch.Tensor) -> None:
        """Use ``core``, the ascending coordinates of the core set, from now on."""
        arena = self._global_model.arena
        outside = torch.ones(arena.n, dtype=torch.bool, device=arena.device)
        outside[core.long()] = False
        self._outside = outside.nonzero().squeeze(1).to(index_dtype(arena.n))
        self._core = arena.locate(core)

    def exchange(self, round_number: int) -> None:
        """One round. Collective. Steps and order are those of the algorithm: core, then explorers in rank order."""
        model, transport, stats = self._global_model, self._transport, self._transport.stats
        core, explorers = self._core, self._explorer.count > 0
        assert core is not None, "set_core comes before the first round"

        with stats.timed("pack"):
            core_pending = transport.allreduce(model.pending_update(core, self._core_update), "core")
            if explorers:
                offsets = self._pairs.indices(self._message)
                offsets.copy_(self._explorer.draw(round_number, transport.rank))
                explored = self._explored(offsets, round_number, transport.rank)
                model.pending_update(explored, self._pairs.values(self._message))
                messages_pending = transport.allgather(self._message, "explorer")

        with stats.timed("wait"):
            core_sum = core_pending.wait()
            messages = messages_pending.wait() if explorers else ()

        with stats.timed("merge"):
            # Core: w̄[C] += mean of u[C]; all of u_k[C] was sent, so w_k[C] = w̄[C].
            model.absorb(core, core_sum.div_(transport.size))
            model.settle(core)
            # Explorers: w̄[E_j] += v_j / K and w_k with it, for every rank j in rank order;
            # all of u_k[E_k] was sent, so at the end w_k[E_k] = w̄[E_k].
            for rank, message in enumerate(messages):
                change = self._pairs.values(message).div_(transport.size)
                if rank == transport.rank:
                    model.absorb(explored, change)
                else:
                    theirs = self._explored(self._pairs.indices(message), round_number, rank)
                    model.advance(theirs, change)
            if explorers:
                model.settle(explored)

    def _explored(self, offsets: torch.Tensor, round_number: int, rank: int) -> Coordinates:
        positions = self._explorer.positions(offsets, round_number, rank)
        return self._global_model.arena.locate(self._outside.index_select(0, positions))
