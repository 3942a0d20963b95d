"""One flat index space over all trainable parameters, without moving any of them.

Coordinates are numbered through the parameters, group by group of equal device and dtype, each parameter in its own
memory order. The user's tensors are read and written where they lie; they are never re-pointed or made contiguous.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from hvd_slim import native

NamedParameters = Sequence[tuple[str, torch.Tensor]]


class LayoutError(ValueError):
    """A parameter cannot take part in the flat index space; the message says which and why."""


class Segment:
    """One parameter's stretch of the index space: coordinates ``start`` to ``stop`` (``stop`` excluded).

    Complex parameters count as pairs of real coordinates (real part first).
    """

    def __init__(self, name: str, parameter: torch.Tensor, start: int) -> None:
        self.name, self.parameter, self.start = name, parameter, start
        real = _real(parameter)
        #: dimensions from the outermost in memory to the innermost, as they were at first
        self.dim_order = tuple(sorted(range(real.dim()), key=lambda d: (real.stride(d), real.size(d)), reverse=True))
        self._view(real)
        self.stop = start + real.numel()

    def _view(self, real: torch.Tensor) -> None:
        if _overlaps(real):
            raise LayoutError(
                f"parameter {self.name!r} is an expanded or overlapping view (several elements share one address) and "
                f"cannot be trained in place; make it a tensor of its own with .clone()"
            )
        permuted = real.permute(self.dim_order)
        # Not contiguous in coordinate order: rows of a wider tensor, say. Coordinates then need their own addresses.
        self.gapped = not permuted.is_contiguous()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(permuted.shape, permuted.stride()))
        self.real, self._permuted = real, permuted
        self._address, self._strides = real.data_ptr(), real.stride()
        #: the parameter's memory as a vector; without gaps, element i is coordinate start + i
        self.memory = real.as_strided((extent if real.numel() else 0,), (1,))

    def refresh(self) -> tuple[bool, bool, bool]:
        """Look at the parameter again if its memory was exchanged under it.

        Returns:
            (whether it still fits its stretch, whether it lies elsewhere, whether its strides changed as well).
            Coordinates keep their numbers when only the strides change.
        """
        parameter, old, strides = self.parameter, self.real, self._strides
        if parameter.data_ptr() == self._address and parameter.dtype.to_real() == old.dtype:
            real = _real(parameter)
            if real.stride() == strides and real.shape == old.shape:
                return True, False, False
        real = _real(parameter)
        if (real.dtype, real.device, real.shape) != (old.dtype, old.device, old.shape):
            return False, False, False
        self._view(real)
        return True, True, real.stride() != strides

    def flatten(self, like_parameter: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape (a gradient, say) as a vector in this segment's coordinate order."""
        tensor = like_parameter.to_dense() if like_parameter.layout != torch.strided else like_parameter
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        return real.permute(self.dim_order).reshape(-1)

    def read_all(self) -> torch.Tensor:
        """Every coordinate: shape (stop − start,), the parameter's dtype. A view where memory allows."""
        return self._permuted.reshape(-1) if self.gapped else self.memory

    def write_all(self, values: torch.Tensor) -> None:
        """Set every coordinate from a vector of any floating dtype."""
        self._permuted.copy_(values.view(self._permuted.shape))

    def addresses(self, local: torch.Tensor) -> torch.Tensor:
        """Where local coordinates (0 ≤ local < stop − start) lie in ``memory``."""
        if not self.gapped:
            return local
        if self.memory.numel() > torch.iinfo(torch.int32).max:
            local = local.long()
        address = torch.zeros_like(local)
        for size, stride in zip(reversed(self._permuted.shape), reversed(self._permuted.stride())):
            address += (local % size) * stride
            local = local // size
        return address

    def describe(self) -> str:
        """What must be equal on all ranks, in one line."""
        return f"{describe_parameter(self.parameter)}, dimensions in memory order {list(self.dim_order)}"


def describe_parameter(parameter: torch.Tensor) -> str:
    """Shape and dtype, in one line."""
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    return f"shape {shape}, dtype {str(parameter.dtype).removeprefix('torch.')}"


def _real(parameter: torch.Tensor) -> torch.Tensor:
    data = parameter.detach()
    return torch.view_as_real(data) if data.is_complex() else data


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share an address."""
    inner = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride <= inner:
                return True
            inner += (size - 1) * stride
    return False


@dataclasses.dataclass(frozen=True)
class Group:
    """Segments of one device and dtype; together they cover coordinates ``start`` to ``stop``."""

    device: torch.device
    dtype: torch.dtype
    start: int
    stop: int
    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a coordinate set that lies in one segment: ``values[begin:end]`` belong to it."""

    group: int
    segment: Segment
    begin: int
    end: int
    #: where they lie in ``segment.memory``
    address: torch.Tensor
    #: where they lie in their group
    in_group: torch.Tensor


class Coordinates:
    """An ascending set of coordinates, ready to read and write.

    Attributes:
        numbers: the coordinates, shape (count,), int32 or int64.
        count: how many.
    """

    def __init__(self, numbers: torch.Tensor, arena: Arena) -> None:
        self.numbers, self.count, self._arena = numbers, numbers.numel(), arena

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The set, cut along the segments."""
        return tuple(self._arena.cut(self.numbers))


class Arena:
    """The flat index space over ``named_parameters``.

    Args:
        named_parameters: (name, tensor) pairs, floating or complex, each tensor once.

    Attributes:
        n: number of coordinates.
        groups: by device and dtype, in order of first appearance.
        device: where packed buffers live (the first parameter's device).
        value_dtype: in which values travel and sums are taken: float64 if any parameter has it, else float32.

    Raises:
        LayoutError: a parameter cannot be trained in place, or is not of floating type.
    """

    def __init__(self, named_parameters: NamedParameters) -> None:
        members: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
        for name, parameter in named_parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise LayoutError(f"parameter {name!r} has dtype {parameter.dtype}, which cannot be trained")
            if parameter.layout != torch.strided:
                raise LayoutError(f"parameter {name!r} has layout {parameter.layout}; only dense parameters travel")
            members.setdefault((parameter.device, parameter.dtype.to_real()), []).append((name, parameter))
        groups = []
        start = 0
        for (device, dtype), named in members.items():
            segments, first = [], start
            for name, parameter in named:
                segments.append(Segment(name, parameter, start))
                start = segments[-1].stop
            groups.append(Group(device, dtype, first, start, tuple(segments)))
        self.groups = tuple(groups)
        self.n = start
        self.device = groups[0].device if groups else torch.device("cpu")
        wide = any(group.dtype == torch.float64 for group in groups)
        self.value_dtype = torch.float64 if wide else torch.float32
        self._segments = tuple(self.segments())
        #: grows when coordinates get other addresses, which makes what ``locate`` gave before useless
        self.layout_version = 0
        self._table: ctypes.Array[native.Segment] | None = None
        self._stops = torch.tensor([segment.stop for segment in self._segments], device=self.device)

    def segments(self) -> Iterator[Segment]:
        """All segments in the order of their coordinates."""
        for group in self.groups:
            yield from group.segments

    def refresh(self) -> bool:
        """Follow tensors whose memory was exchanged. False if one no longer fits its stretch of coordinates."""
        seen = [segment.refresh() for segment in self._segments]
        if any(moved for _, moved, _ in seen):
            self._table = None
        self.layout_version += any(restrided for _, _, restrided in seen)
        return all(fits for fits, _, _ in seen)

    def is_finite(self) -> bool:
        """Whether every live parameter is finite. Reads each once."""
        if self.plain and native.serves():
            return all(native.is_finite(segment.read_all()) for segment in self._segments)
        # A sum is as fast as memory, a look at every value is not; a sum of finite values that overflows needs one.
        sums = [segment.read_all().sum(dtype=self.value_dtype).to(self.device) for segment in self._segments]
        if not sums or bool(torch.stack(sums).isfinite().all()):
            return True
        return all(bool(segment.read_all().isfinite().all()) for segment in self._segments)

    @property
    def plain(self) -> bool:
        """Whether all parameters are float32 on the CPU, without gaps, and int32 counts their coordinates."""
        return (
            len(self.groups) == 1
            and (self.groups[0].dtype, self.device.type) == (torch.float32, "cpu")
            and self.n <= torch.iinfo(torch.int32).max
            and not any(segment.gapped for segment in self._segments)
        )

    def memory_table(self) -> ctypes.Array[native.Segment]:
        """Where each parameter's memory begins, for ``native.sweep``."""
        if self._table is None:
            rows = [native.Segment(s.memory.data_ptr(), s.start, s.stop) for s in self._segments]
            self._table = (native.Segment * len(rows))(*rows)
        return self._table

    def locate(self, coordinates: torch.Tensor) -> Coordinates:
        """An ascending vector of distinct coordinates (int32 or int64), to read and write there."""
        return Coordinates(coordinates, self)

    def cut(self, coordinates: torch.Tensor) -> Iterator[Piece]:
        """The same, cut along the segments."""
        # By the last coordinate of each segment: the stops themselves may not fit the dtype of the coordinates.
        ends = torch.searchsorted(coordinates, (self._stops - 1).to(coordinates.dtype), right=True).tolist()
        begin, at = 0, 0
        for number, group in enumerate(self.groups):
            for segment in group.segments:
                end = ends[at]
                at += 1
                if end > begin:
                    local = (coordinates[begin:end] - segment.start).to(group.device)
                    in_group = coordinates[begin:end].to(group.device)
                    in_group = in_group - group.start if group.start else in_group
                    yield Piece(number, segment, begin, end, segment.addresses(local), in_group)
                begin = end

    def describe(self) -> list[tuple[str, str]]:
        """(what, value) pairs that must be equal on all ranks, in coordinate order."""
        return [(f"parameter {segment.name!r}", segment.describe()) for segment in self._segments]
