"""The global model w̄: the parameters that all ranks agree on, kept beside each rank's live parameters w_k.

The pending update u_k = w_k − w̄ is never stored: it is what lies between the two. Differences and sums are taken in
the arena's value dtype; w̄ itself has each parameter's own dtype, and every rank rounds alike.

With 16-bit parameters a mean over ranks is often less than half of what the dtype can tell apart, and would be lost
each time. What rounding takes from w̄ is therefore kept beside it, equal on all ranks, and added the next time: small
means add up. The live parameters do not see it, or every rank would send it back as if it were learning.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hvd_slim import native
from hvd_slim.arena import Arena, Coordinates, Segment


class GlobalModel:
    """w̄ over an arena, equal to the live parameters when made.

    Memory: as many bytes as the trainable parameters; for 16-bit ones twice as many.

    Attributes:
        flat: w̄ of each group of the arena, in the group's own dtype.
        rest: what rounding has kept back of each, in the same dtype; None where it is not kept.
    """

    def __init__(self, arena: Arena, copy: bool = True) -> None:
        self.arena = arena
        self.flat = [torch.empty(g.stop - g.start, dtype=g.dtype, device=g.device) for g in arena.groups]
        self.rest = [torch.zeros_like(flat) if _keeps_rest(flat.dtype) else None for flat in self.flat]
        if copy:
            self.copy_from_live()

    @property
    def compiled(self) -> bool:
        """Whether compiled passes can serve: all parameters float32, on the CPU, without gaps; fewer than 2^31."""
        return self.arena.plain and native.serves(*self.flat)

    def tensors(self) -> list[torch.Tensor]:
        """All that w̄ consists of: what must be equal on all ranks, and what a checkpoint holds."""
        return self.flat + [rest for rest in self.rest if rest is not None]

    def _views(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        return ((segment, mean) for segment, mean, _ in self._views_with_rest())

    def _views_with_rest(self) -> Iterator[tuple[Segment, torch.Tensor, torch.Tensor | None]]:
        for group, flat, rest in zip(self.arena.groups, self.flat, self.rest):
            for segment in group.segments:
                part = slice(segment.start - group.start, segment.stop - group.start)
                yield segment, flat[part], None if rest is None else rest[part]

    def empty_like(self) -> GlobalModel:
        """Another model over the same arena, to be filled."""
        return GlobalModel(self.arena, copy=False)

    def copy_from_live(self) -> None:
        """w̄ = w_k."""
        for segment, mean, rest in self._views_with_rest():
            mean.copy_(segment.read_all())
            if rest is not None:
                rest.zero_()

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
            u, memory = out[piece.begin : piece.end], piece.segment.memory
            if memory.dtype == u.dtype and memory.device == u.device:
                torch.index_select(memory, 0, piece.address, out=u)
            else:
                u.copy_(memory.index_select(0, piece.address))
            u.sub_(self.flat[piece.group].index_select(0, piece.in_group))
        return out

    def absorb(self, where: Coordinates, change: torch.Tensor) -> None:
        """w̄ += change at ``where``."""
        for piece in where.pieces:
            mean = self.flat[piece.group]
            delta = change[piece.begin : piece.end].to(mean.device)
            if mean.dtype == delta.dtype:
                mean.index_add_(0, piece.in_group, delta)  # half the time of reading, adding and writing
            else:
                _add_at(mean, self.rest[piece.group], piece.in_group, delta)

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
            old, new = _add_at(mean, self.rest[piece.group], piece.in_group, delta)
            pending = memory.index_select(0, piece.address).to(delta.dtype) - old
            memory.scatter_(0, piece.address, (new + pending).to(memory.dtype))

    # On everything -------------------------------------------------------------------------------------------------

    def pending_update_everywhere(self, out: torch.Tensor) -> torch.Tensor:
        """u_k at every coordinate, into ``out`` of shape (n,), value dtype."""
        for segment, mean in self._views():
            u, live = out[segment.start : segment.stop], segment.read_all()
            if live.dtype == u.dtype and live.device == u.device:
                torch.sub(live, mean, out=u)
            else:
                u.copy_(live)
                u.sub_(mean)
        return out

    def absorb_everywhere(self, change: torch.Tensor) -> None:
        """w̄ += change at every coordinate."""
        for segment, mean, rest in self._views_with_rest():
            _add(mean, rest, change[segment.start : segment.stop].to(mean.device))

    def settle_everywhere(self, unsent: torch.Tensor | None = None) -> None:
        """w_k = w̄ + unsent at every coordinate."""
        for segment, mean in self._views():
            left = None if unsent is None else unsent[segment.start : segment.stop].to(mean.device)
            segment.write_all(mean if left is None else mean + left)

    def stretch_pending_update(self, factor: float) -> None:
        """w_k = w̄ + factor·u_k at every coordinate."""
        update = torch.empty(self.arena.n, dtype=self.arena.value_dtype, device=self.arena.device)
        self.settle_everywhere(self.pending_update_everywhere(update).mul_(factor))

    def take_over_everywhere(self, total: torch.Tensor, divisor: float) -> None:
        """w̄ += total / divisor and w_k = w̄ at every coordinate. ``total`` is used up."""
        if self.compiled and native.serves(total):
            native.take_over(self.arena.memory_table(), self.flat[0], total, divisor)
            return
        self.absorb_everywhere(total.div_(divisor))
        self.settle_everywhere()


def _keeps_rest(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4


def _add(mean: torch.Tensor, rest: torch.Tensor | None, change: torch.Tensor) -> None:
    """mean += change, rounded; what rounding kept back before is added, what it keeps back now is kept."""
    if rest is None and mean.dtype == change.dtype:
        mean.add_(change)
        return
    summed = mean + change
    if rest is not None:
        summed += rest
    mean.copy_(summed)
    if rest is not None:
        rest.copy_(summed.sub_(mean))


def _add_at(
    mean: torch.Tensor, rest: torch.Tensor | None, at: torch.Tensor, change: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same at places ``at``; returns the old mean there and the new one."""
    old = mean.index_select(0, at)
    summed = old + change
    if rest is not None:
        summed += rest.index_select(0, at)
    new = summed.to(mean.dtype)
    mean.scatter_(0, at, new)
    if rest is not None:
        rest.scatter_(0, at, summed.sub_(new).to(rest.dtype))
    return old, new


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
        self.rest: list[torch.Tensor | None] = []
        self._spans: list[tuple[int, int, int]] = []  # group, first and last coordinate of it owned here
        for number, (group, flat, rest) in enumerate(zip(arena.groups, model.flat, model.rest)):
            begin, end = max(start, group.start), min(stop, group.stop)
            if begin < end:
                part = slice(begin - group.start, end - group.start)
                self.flat.append(flat[part] if share else flat[part].clone())
                self.rest.append(None if rest is None else rest[part] if share else rest[part].clone())
                self._spans.append((number, begin, end))

    def tensors(self) -> list[torch.Tensor]:
        """All that the slice consists of."""
        return self.flat + [rest for rest in self.rest if rest is not None]

    def _cut(self, coordinates: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, slice]]:
        """(number of the part of w̄, where in it, which of the ascending coordinates)."""
        # By the last coordinate of each: the ends themselves may not fit the dtype of the coordinates.
        last = torch.tensor([span[2] - 1 for span in self._spans], device=coordinates.device).to(coordinates.dtype)
        begin = 0
        ends = torch.searchsorted(coordinates, last, right=True).tolist()
        for number, ((_, first, _), end) in enumerate(zip(self._spans, ends)):
            yield number, (coordinates[begin:end] - first).to(self.flat[number].device), slice(begin, end)
            begin = end

    def add(self, coordinates: torch.Tensor, change: torch.Tensor) -> None:
        """w̄ += change at ``coordinates``, ascending and distinct."""
        for number, local, part in self._cut(coordinates):
            flat = self.flat[number]
            _add_at(flat, self.rest[number], local, change[part].to(flat.device))

    def read(self, coordinates: torch.Tensor) -> torch.Tensor:
        """w̄ at ``coordinates``, ascending: shape (count,), ``reply_dtype``."""
        out = torch.empty(coordinates.numel(), dtype=self.reply_dtype, device=self.device)
        for number, local, part in self._cut(coordinates):
            out[part] = self.flat[number].index_select(0, local).to(out.device, out.dtype)
        return out

    def copy_from(self, model: GlobalModel, where: Coordinates) -> None:
        """Take over ``model``'s values at ``where``, as far as they are owned here."""
        for piece in where.pieces:
            for flat, rest, (number, first, last) in zip(self.flat, self.rest, self._spans):
                if number == piece.group:
                    group = model.arena.groups[number]
                    low, high = torch.searchsorted(
                        piece.in_group, torch.tensor([first - group.start, last - group.start]).to(piece.in_group)
                    ).tolist()
                    at = piece.in_group[low:high]
                    for mine, theirs in ((flat, model.flat[number]), (rest, model.rest[number])):
                        if mine is not None and theirs is not None:
                            mine.scatter_(0, at - (first - group.start), theirs.index_select(0, at))

    def add_everywhere(self, change: torch.Tensor) -> None:
        """w̄ += change on the whole slice."""
        begin = 0
        for flat, rest in zip(self.flat, self.rest):
            _add(flat, rest, change[begin : begin + flat.numel()].to(flat.device))
            begin += flat.numel()

    def to_bytes(self, nbytes: int) -> torch.Tensor:
        """The slice as uint8, shape (nbytes,), zeros behind it."""
        out = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        begin = 0
        for tensor in self.tensors():
            out[begin : begin + tensor.nbytes] = tensor.view(torch.uint8)
            begin += tensor.nbytes
        return out

    def from_bytes(self, raw: torch.Tensor) -> None:
        """Fill the slice from ``to_bytes``."""
        begin = 0
        for tensor in self.tensors():
            tensor.view(torch.uint8).copy_(raw[begin : begin + tensor.nbytes])
            begin += tensor.nbytes


def slice_nbytes(arena: Arena, start: int, stop: int) -> int:
    """Bytes of w̄ at coordinates ``start`` to ``stop`` (excluded)."""
    return sum(
        max(0, min(stop, group.stop) - max(start, group.start)) * global_model_itemsize(group.dtype)
        for group in arena.groups
    )


def global_model_itemsize(dtype: torch.dtype) -> int:
    """Bytes of one coordinate of w̄, for a parameter of ``dtype``."""
    return dtype.itemsize * (2 if _keeps_rest(dtype) else 1)
