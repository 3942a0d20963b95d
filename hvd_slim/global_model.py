"""The global model w̄: the parameters that all ranks agree on, kept beside each rank's live parameters w_k.

The pending update u_k = w_k − w̄ is never stored: it is what lies between the two. Differences and sums are taken in
the arena's value dtype; w̄ itself has each parameter's own dtype, and every rank rounds alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hvd_slim.arena import Arena, Coordinates, Segment


class GlobalModel:
    """w̄ over an arena, equal to the live parameters when made.

    Memory: as many bytes as the trainable parameters.
    """

    def __init__(self, arena: Arena, copy: bool = True) -> None:
        self.arena = arena
        self.flat = [torch.empty(g.stop - g.start, dtype=g.dtype, device=g.device) for g in arena.groups]
        if copy:
            self.copy_from_live()

    def _views(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        for group, flat in zip(self.arena.groups, self.flat):
            for segment in group.segments:
                yield (segment, flat[segment.start - group.start : segment.stop - group.start])

    def empty_like(self) -> GlobalModel:
        """Another model over the same arena, to be filled."""
        return GlobalModel(self.arena, copy=False)

    def copy_from_live(self) -> None:
        """w̄ = w_k."""
        for segment, mean in self._views():
            mean.copy_(segment.read_all())

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

    def replace(self, where: Coordinates, values: torch.Tensor) -> None:
        """w̄ = values at ``where``."""
        for piece in where.pieces:
            mean = self.flat[piece.group]
            mean.scatter_(0, piece.in_group, values[piece.begin : piece.end].to(mean.device, mean.dtype))

    def settle(self, where: Coordinates, unsent: torch.Tensor | None = None) -> None:
        """w_k = w̄ + unsent at ``where``: the rest of what was pending there has been sent; None for nothing left."""
        for piece in where.pieces:
            live = self.flat[piece.group].index_select(0, piece.in_group)
            if unsent is not None:
                left = unsent[piece.begin : piece.end].to(live.device)
                live = (live + left).to(live.dtype)
            piece.segment.memory.scatter_(0, piece.address, live)

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

    def settle_everywhere(self, unsent: torch.Tensor | None = None) -> None:
        """w_k = w̄ + unsent at every coordinate."""
        for segment, mean in self._views():
            left = None if unsent is None else unsent[segment.start : segment.stop].to(mean.device)
            segment.write_all(mean if left is None else mean + left)


class OwnedSlice:
    """w̄ at coordinates ``start`` to ``stop`` (excluded), which one rank holds for all.

    Args:
        model: where the values come from.
        share: be a view of ``model`` instead of a copy.

    Attributes:
        reply_dtype: in which values of w̄ travel: the parameters' own dtype, or the arena's if there are several.
    """

    def __init__(self, model: GlobalModel, start: int, stop: int, share: bool = False) -> None:
        arena = model.arena
        self.device = arena.device
        dtypes = {group.dtype for group in arena.groups}
        self.reply_dtype = dtypes.pop() if len(dtypes) == 1 else arena.value_dtype
        self.flat: list[torch.Tensor] = []
        self._spans: list[tuple[int, int, int]] = []  # group, first and last coordinate of it owned here
        for number, (group, flat) in enumerate(zip(arena.groups, model.flat)):
            begin, end = max(start, group.start), min(stop, group.stop)
            if begin < end:
                part = flat[begin - group.start : end - group.start]
                self.flat.append(part if share else part.clone())
                self._spans.append((number, begin, end))

    def _cut(self, coordinates: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """(part of w̄, where in it, which of the ascending coordinates)."""
        bounds = torch.tensor([span[2] for span in self._spans], dtype=coordinates.dtype, device=coordinates.device)
        begin = 0
        ends = torch.searchsorted(coordinates, bounds).tolist()
        for flat, (_, first, _), end in zip(self.flat, self._spans, ends):
            yield (flat, (coordinates[begin:end] - first).to(flat.device), slice(begin, end))
            begin = end

    def add(self, coordinates: torch.Tensor, change: torch.Tensor) -> None:
        """w̄ += change at ``coordinates``, ascending and distinct."""
        for flat, local, part in self._cut(coordinates):
            summed = flat.index_select(0, local) + change[part].to(flat.device)
            flat.scatter_(0, local, summed.to(flat.dtype))

    def read(self, coordinates: torch.Tensor) -> torch.Tensor:
        """w̄ at ``coordinates``, ascending: shape (count,), ``reply_dtype``."""
        out = torch.empty(coordinates.numel(), dtype=self.reply_dtype, device=self.device)
        for flat, local, part in self._cut(coordinates):
            out[part] = flat.index_select(0, local).to(out.device, out.dtype)
        return out

    def copy_from(self, model: GlobalModel, where: Coordinates) -> None:
        """Take over ``model``'s values at ``where``, as far as they are owned here."""
        for piece in where.pieces:
            for flat, (number, first, last) in zip(self.flat, self._spans):
                if number == piece.group:
                    group = model.arena.groups[number]
                    low, high = torch.searchsorted(
                        piece.in_group, torch.tensor([first - group.start, last - group.start]).to(piece.in_group)
                    ).tolist()
                    at = piece.in_group[low:high]
                    flat.scatter_(0, at - (first - group.start), model.flat[number].index_select(0, at))

    def add_everywhere(self, change: torch.Tensor) -> None:
        """w̄ += change on the whole slice."""
        begin = 0
        for flat in self.flat:
            flat.copy_(flat + change[begin : begin + flat.numel()].to(flat.device))
            begin += flat.numel()

    def to_bytes(self, nbytes: int) -> torch.Tensor:
        """The slice as uint8, shape (nbytes,), zeros behind it."""
        out = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        begin = 0
        for flat in self.flat:
            out[begin : begin + flat.nbytes] = flat.view(torch.uint8)
            begin += flat.nbytes
        return out

    def from_bytes(self, raw: torch.Tensor) -> None:
        """Fill the slice from ``to_bytes``."""
        begin = 0
        for flat in self.flat:
            flat.view(torch.uint8).copy_(raw[begin : begin + flat.nbytes])
            begin += flat.nbytes


def slice_nbytes(arena: Arena, start: int, stop: int) -> int:
    """Bytes of the parameters at coordinates ``start`` to ``stop`` (excluded)."""
    return sum(max(0, min(stop, group.stop) - max(start, group.start)) * group.dtype.itemsize for group in arena.groups)
