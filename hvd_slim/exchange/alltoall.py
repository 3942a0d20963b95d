"""The slim exchange for many ranks and private explorers: the paper's parameter server, spread over the ranks.

Rank j owns slice j of the index space: it alone holds w̄ there. Ranks push value-index pairs to the owners and pull
back the merged value of the same coordinates. base_k is the global model as rank k last saw it, u_k = w_k − base_k.
On the core every rank sees every round, so base_k = w̄ there; a new core therefore comes with a resync.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_slim.agreement import require_finite
from hvd_slim.config import SlimConfig
from hvd_slim.exchange.base import SlimExchange
from hvd_slim.exchange.flight import Flight
from hvd_slim.exchange.reduction import MeanReduction, norm_factor, sum_of_squares
from hvd_slim.explorer import Draw
from hvd_slim.global_model import GlobalModel, OwnedSlice, slice_nbytes
from hvd_slim.transport.base import Transport
from hvd_slim.wire import PairFormat, aligned


class AlltoallExchange(SlimExchange):
    """Slim-DP's round with w̄ spread over the ranks.

    A rank sends 2(K−1)/K·βn values, (K−1)/K·(α−β)n pairs and (K−1)/K·(α−β)n merged values a round. Merged values are
    those of w̄, always at full width. State beyond the model: base_k (n), a slice of w̄ (n/K), and the core's and the
    other coordinates' numbers (n).
    """

    replicated = False
    resync_at_reselection = True

    def __init__(self, model: GlobalModel, transport: Transport, config: SlimConfig, restore_norm: bool) -> None:
        super().__init__(model, transport, config, restore_norm)
        arena, size = self.arena, transport.size
        norm_count = self.core_count if restore_norm else 0
        self._core_mean = self.reduction(self.codec, self.core_count, "core", norm_count)
        self._bounds = [arena.n * rank // size for rank in range(size + 1)]
        self.owned = OwnedSlice(model, self._bounds[transport.rank], self._bounds[transport.rank + 1])

    def launch(self, round_number: int, overlap: bool, draw_ahead: bool = False) -> Flight:
        """Send the core's pending updates, and the pairs of E_k to their owners. Collective, non-blocking."""
        core_mean = self._core_mean
        with self.stats.timed("pack"):
            u = self.pending_update(self.core, core_mean.update)
            flight = Flight(round_number, self.no_coordinates(), pending_core=u.clone() if overlap else None)
            core_mean.start(round_number, self.nonfinite)
            if self.explorer.count:
                self._push(flight, overlap)
        return flight

    def _push(self, flight: Flight, overlap: bool) -> None:
        draw = self.explorer.draw(flight.round_number, self.transport.rank, self.largest_updates())
        flight.explored = self.coordinates_at(draw.positions)
        u = torch.empty(self.explorer.count, dtype=self.arena.value_dtype, device=self.arena.device)
        self.pending_update(self.arena.locate(flight.explored), u)
        flight.lengths = self._lengths_by_owner(flight.explored)
        pairs = PairFormat(self.codec, self.explorer.index_nbytes)
        messages, flight.unsent = self._pushes(pairs, draw, u, flight.lengths, flight.round_number)
        flight.pending_explored = u if overlap else None
        # Equal shares take most bytes; a few more for what is rounded up.
        owners = self.transport.size
        most = owners * (pairs.nbytes(-(-self.explorer.count // owners)) + pairs.nbytes(1))
        counts = [message.numel() for message in messages]
        flight.brought = self.transport.alltoall(torch.cat(messages), counts, most, "explorer")

    def merge(self, flight: Flight) -> None:
        """Take in a round: core, then explorers in rank order, by their owner. Collective: owners answer."""
        model, owned, core_mean = self.model, self.owned, self._core_mean

        with self.stats.timed("wait"):
            core_change = core_mean.finish()
            pushed = flight.brought.wait() if flight.brought else None

        require_finite(self.transport, *core_mean.nonfinite)
        with self.stats.timed("merge"):
            explored = self.arena.locate(flight.explored)
            with self.sweep() as steps:
                core_left = self.pending_since(steps, self.core, flight.pending_core, core_mean.unsent)
                left = self.pending_since(steps, explored, flight.pending_explored, flight.unsent)
                # Core: w̄[C] += mean of u[C]; what was sent of u_k[C] is pending no longer.
                steps.merge(self.core, core_change, core_left)
            owned.copy_from(model, self.core)
        if pushed is not None:
            merged = self._merge_and_reply(pushed, flight.lengths, flight.round_number)
            with self.stats.timed("merge"), self.sweep() as steps:
                # What I see of w̄[E_k] is new; what was sent of u_k[E_k] is pending no longer.
                steps.replace(explored, merged)
                steps.settle(explored, left)

    def in_flight(self) -> MeanReduction:
        """The core's mean."""
        return self._core_mean

    def _lengths_by_owner(self, coordinates: torch.Tensor) -> list[int]:
        """How many of the ascending ``coordinates`` each rank owns."""
        # By the last coordinate of each: the ends themselves may not fit the dtype of the coordinates.
        last = torch.tensor([end - 1 for end in self._bounds], device=coordinates.device).to(coordinates.dtype)
        return torch.searchsorted(coordinates, last, right=True).diff().tolist()

    def _pushes(
        self, pairs: PairFormat, draw: Draw, u: torch.Tensor, lengths: list[int], round_number: int
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """One message to every owner, and what rounding kept back."""
        messages, kept, begin = [], [], 0
        for owner, length in enumerate(lengths):
            end = begin + length
            message = torch.zeros(pairs.nbytes(length), dtype=torch.uint8, device=u.device)
            indices = self.explorer.pack(draw, begin, end)
            first = (draw.first + begin) % self.explorer.count
            draw_id = (round_number, self.transport.rank, self.first_message + owner)
            pairs.write(message, u[begin:end], indices, first, *draw_id)
            if not self.codec.exact:
                kept.append(u[begin:end] - pairs.read(message)[0])
            messages.append(message)
            begin = end
        return messages, torch.cat(kept) if kept else None

    def _merge_and_reply(
        self, pushed: tuple[torch.Tensor, list[int]], lengths: list[int], round_number: int
    ) -> torch.Tensor:
        """Merge what was pushed to this owner, answer everyone, and return the answers to this rank's own push."""
        owned, size = self.owned, self.transport.size
        pairs = PairFormat(self.codec, self.explorer.index_nbytes)
        asked = []
        with self.stats.timed("merge"):
            # w̄[E_j] += v_j / K on the slice owned here, for every rank j in rank order.
            for j, message in enumerate(pushed[0].split(pushed[1])):
                v, indices, first = pairs.read(message)
                positions = self.explorer.positions(indices, first, v.numel(), round_number, j)
                asked.append(self.coordinates_at(positions))
                owned.add(asked[-1], v.div_(size).mul_(self._core_mean.factor))
            replies = [_padded(owned.read(coordinates)) for coordinates in asked]
            counts = [reply.numel() for reply in replies]
        width = owned.reply_dtype.itemsize
        with self.stats.timed("wait"):
            # To every rank, an owner answers at most its whole slice, and no more than was asked.
            longest = max(b - a for a, b in zip(self._bounds, self._bounds[1:]))
            most = size * aligned(width * min(longest, self.explorer.count))
            answers, received = self.transport.alltoall(torch.cat(replies), counts, most, "explorer").wait()
        parts = answers.split(received)
        return torch.cat([part[: width * n].view(owned.reply_dtype) for part, n in zip(parts, lengths)])

    def dense(self, phase: str, restore_norm: bool) -> None:
        """Every pending update at full width, to its owner and back as w̄. Collective.

        2(K−1)/K·n values, as a reduction of everything; sums in rank order.
        """
        arena, size = self.arena, self.transport.size
        lengths = [end - begin for begin, end in zip(self._bounds, self._bounds[1:])]
        with self.stats.timed("pack"):
            update = torch.empty(arena.n, dtype=arena.value_dtype, device=arena.device)
            self.model.pending_update_everywhere(update)
            counts = [length * update.element_size() for length in lengths]
            pushed = self.transport.alltoall(update.view(torch.uint8), counts, sum(counts), phase)
        with self.stats.timed("wait"):
            data, received = pushed.wait()
        with self.stats.timed("merge"):
            mean = torch.zeros(lengths[self.transport.rank], dtype=arena.value_dtype, device=arena.device)
            for part in data.split(received):
                mean += part.view(arena.value_dtype)
            mean /= size
        factor = self._agree(update, mean, phase)
        stretch = (factor if restore_norm else 1.0) / self.config.local_rate
        if stretch != 1.0:
            mean *= stretch
        self.owned.add_everywhere(mean)
        whole = self.whole_model(phase)
        with self.stats.timed("merge"):
            for mine, seen in zip(self.model.tensors(), whole.tensors()):
                mine.copy_(seen)
            self.model.settle_everywhere()

    def _agree(self, update: torch.Tensor, own_mean: torch.Tensor, phase: str) -> float:
        """γ over everything, and whether all is finite: every rank tells three numbers. Collective."""
        mine = [sum_of_squares(update), sum_of_squares(own_mean), float(self.nonfinite)]
        raw = torch.tensor(mine, dtype=torch.float64, device=self.arena.device).view(torch.uint8)
        of_rank = self.transport.allgather(raw, phase).wait().view(torch.float64).tolist()
        bad = [rank for rank, numbers in enumerate(of_rank) if numbers[2]]
        require_finite(self.transport, len(bad), sum(bad))
        updates, means = (sum(numbers[i] for numbers in of_rank) for i in (0, 1))
        return norm_factor(updates / self.transport.size, means, self.transport.size)

    def replicated_values(self) -> list[torch.Tensor]:
        """w̄ on the core."""
        return [self.model.flat[piece.group].index_select(0, piece.in_group) for piece in self.core.pieces]

    def whole_model(self, phase: str = "resync") -> GlobalModel:
        """w̄, gathered from its owners into a model of its own. Collective."""
        longest = max(slice_nbytes(self.arena, a, b) for a, b in zip(self._bounds, self._bounds[1:]))
        rows = self.transport.allgather(self.owned.to_bytes(aligned(longest)), phase).wait()
        whole = self.model.empty_like()
        for rank, row in enumerate(rows):
            OwnedSlice(whole, self._bounds[rank], self._bounds[rank + 1], share=True).from_bytes(row)
        return whole

    def state(self) -> dict[str, Any]:
        """This rank's slice of w̄."""
        return {"owned": [tensor.clone() for tensor in self.owned.tensors()]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back this rank's slice of w̄; without one, what the rank knows of w̄ stands."""
        for mine, saved in zip(self.owned.tensors(), state.get("owned", ())):
            mine.copy_(saved)


def _padded(values: torch.Tensor) -> torch.Tensor:
    raw = torch.zeros(aligned(values.nbytes), dtype=torch.uint8, device=values.device)
    raw[: values.nbytes] = values.view(torch.uint8)
    return raw
