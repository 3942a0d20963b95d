"""The global model w̄: the parameters that all ranks agree on, kept beside each rank's live parameters w_k.

The pending update u_k = w_k − w̄ is never stored: it is what lies between the two. Differences and sums are taken in
the arena's value dtype; w̄ itself has each parameter's own dtype, and every rank rounds alike.
"""

from __future__ import annotations

import torch

from hvd_slim.arena import Arena, Coordinates


class GlobalModel:
    """w̄ over an arena, equal to the live parameters when made.

    Memory: as many bytes as the trainable parameters.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.flat = [torch.empty(g.stop - g.start, dtype=g.dtype, device=g.device) for g in arena.groups]
        self.copy_from_live()

    def _views(self):  # type: ignore[no-untyped-def]
        for group, flat in zip(self.arena.groups, self.flat):
            for segment in group.segments:
                yield segment, flat[segment.start - group.start : segment.stop - group.start]

    def copy_from_live(self) -> None:
        """w̄ = w_k."""
        for segment, mean in self._views():
            mean.copy_(segment.read_all())

    def copy_to_live(self) -> None:
        """w_k = w̄: what was pending is dropped."""
        for segment, mean in self._views():
            segment.write_all(mean)

    def swap_with_live(self) -> None:
        """Exchange w̄ and w_k, to the bit. Twice is nothing."""
        for segment, mean in self._views():
            live = segment.read_all().clone()
            segment.write_all(mean)
            mean.copy_(live)

    # On a set of coordinates ---------------------------------------------------------------------------------------

    def pending_update(self, where: Coordinates, out: torch.Tensor) -> torch.Tensor:
        """u_k = w_k − w̄ at ``where``, into ``out`` of shape (count,), value dtype."""
        for piece in where.pieces:
            u = out[piece.begin : piece.end]
            u.copy_(piece.segment.memory.index_select(0, piece.address))
            u.sub_(self.flat[piece.group].index_select(0, piece.in_group))
        return out

    def absorb(self, where: Coordinates, change: torch.Tensor) -> None:
        """w̄ += change at ``where``."""
        for piece in where.pieces:
            mean = self.flat[piece.group]
            summed = mean.index_select(0, piece.in_group) + change[piece.begin : piece.end].to(mean.device)
            mean.scatter_(0, piece.in_group, summed.to(mean.dtype))

    def settle(self, where: Coordinates) -> None:
        """w_k = w̄ at ``where``: everything that was pending there has been sent."""
        for piece in where.pieces:
            mean = self.flat[piece.group]
            piece.segment.memory.scatter_(0, piece.address, mean.index_select(0, piece.in_group))

    def advance(self, where: Coordinates, change: torch.Tensor) -> None:
        """w̄ += change at ``where``, and w_k with it: w_k = w̄ + u_k, u_k unchanged."""
        for piece in where.pieces:
            mean, memory = self.flat[piece.group], piece.segment.memory
            delta = change[piece.begin : piece.end].to(mean.device)
            old = mean.index_select(0, piece.in_group)
            new = (old + delta).to(mean.dtype)
            pending = memory.index_select(0, piece.address).to(delta.dtype) - old
            mean.scatter_(0, piece.in_group, new)
            memory.scatter_(0, piece.address, (new + pending).to(memory.dtype))

    # On everything -------------------------------------------------------------------------------------------------

    def pending_update_everywhere(self, out: torch.Tensor) -> torch.Tensor:
        """u_k at every coordinate, into ``out`` of shape (n,), value dtype."""
        for segment, mean in self._views():
            u = out[segment.start : segment.stop]
            u.copy_(segment.read_all())
            u.sub_(mean)
        return out

    def absorb_everywhere(self, change: torch.Tensor) -> None:
        """w̄ += change at every coordinate."""
        for segment, mean in self._views():
            mean.copy_(mean + change[segment.start : segment.stop].to(mean.device))
