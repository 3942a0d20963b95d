"""Sets of coordinates as bytes: the core, and explorer sets that receivers cannot recompute.

How many bytes a set takes depends on its size alone, so receivers know it beforehand. The smallest of three forms:

    bitmap  one bit for each coordinate of the index space
    list    one number for each member
    split   (Elias–Fano) the low 8 or 16 bits of each member as they are; the high parts, which ascend, as a bitmap in
            which the i-th set bit stands at (high part + i): a bit a member, and n/256 or n/65536 bits
"""

from __future__ import annotations

import numpy as np
import torch

from hvd_slim import native
from hvd_slim.chunks import index_dtype, indices_of

#: dtype of the low parts; torch does no arithmetic on uint16
_LOW = {8: torch.uint8, 16: torch.int16}


def set_nbytes(count: int, n: int) -> int:
    """Bytes of a packed set of ``count`` coordinates below ``n``."""
    return _smallest(count, n)[0]


def _smallest(count: int, n: int) -> tuple[int, str | int]:
    """(bytes, form): "bitmap", "list", or the number of low bits of the split form."""
    split = [(count * bits // 8 + _bitmap_nbytes(_high_bits(count, n, bits)), bits) for bits in _LOW]
    plain: list[tuple[int, str | int]] = [(_bitmap_nbytes(n), "bitmap"), (count * index_dtype(n).itemsize, "list")]
    return min([*plain, *split], key=lambda candidate: candidate[0])


def pack_indices(indices: torch.Tensor, n: int) -> torch.Tensor:
    """A set of coordinates as bytes.

    Args:
        indices: shape (count,), ascending, distinct, ``index_dtype(n)``.
        n: they lie below it.

    Returns:
        uint8, shape (set_nbytes(count, n),), on the device of ``indices``.
    """
    count = indices.numel()
    nbytes, form = _smallest(count, n)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=indices.device)
    if form == "list":
        return indices.contiguous().view(torch.uint8)
    if form == "bitmap":
        return _bitmap(indices, n)
    bits = int(form)
    order = torch.arange(count, dtype=indices.dtype, device=indices.device)
    high = _bitmap((indices >> bits) + order, _high_bits(count, n, bits))
    low = (indices & (2**bits - 1)).to(_LOW[bits]).view(torch.uint8)
    return torch.cat([low, high])


def unpack_indices(data: torch.Tensor, count: int, n: int) -> torch.Tensor:
    """The set of ``count`` coordinates below ``n`` that ``pack_indices`` made ``data`` of: ascending."""
    dtype = index_dtype(n)
    _, form = _smallest(count, n)
    if count == 0:
        return torch.empty(0, dtype=dtype, device=data.device)
    if form == "list":
        return data.contiguous().view(dtype)
    if form == "bitmap":
        return _set_places(data, n, count)
    bits = int(form)
    low, high = data.split([count * bits // 8, data.numel() - count * bits // 8])
    places = _set_places(high, _high_bits(count, n, bits), count).to(dtype)
    places -= torch.arange(count, dtype=dtype, device=data.device)
    # What was cut to its low bits may read as negative.
    return (places << bits) + (low.contiguous().view(_LOW[bits]).to(dtype) & (2**bits - 1))


def _bitmap(indices: torch.Tensor, n: int) -> torch.Tensor:
    """n bits, least significant first, of which those of ``indices`` (ascending, distinct) are set."""
    if native.serves(indices):
        return native.bits_of(indices, n)
    return _pack_bits(torch.zeros(n, dtype=torch.bool, device=indices.device).index_fill_(0, indices.long(), True))


def _set_places(bitmap: torch.Tensor, n: int, count: int) -> torch.Tensor:
    """Which ``count`` of n bits are set: ascending."""
    if index_dtype(n) == torch.int32 and native.serves(bitmap):
        return native.indices_of_bits(bitmap, n, count)
    return indices_of(_unpack_bits(bitmap, n))


def _high_bits(count: int, n: int, bits: int) -> int:
    """Length of the bitmap of the high parts."""
    return count + (max(n - 1, 0) >> bits) + 1 if count else 0


def _bitmap_nbytes(bits: int) -> int:
    return -(-bits // 8)


def _pack_bits(marks: torch.Tensor) -> torch.Tensor:
    if marks.device.type == "cpu":
        return torch.from_numpy(np.packbits(marks.numpy(), bitorder="little"))
    return _pack_bits_by_arithmetic(marks)


def _unpack_bits(data: torch.Tensor, bits: int) -> torch.Tensor:
    if data.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(data.numpy(), count=bits, bitorder="little")).view(torch.bool)
    return _unpack_bits_by_arithmetic(data, bits)


def _pack_bits_by_arithmetic(marks: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(8 * _bitmap_nbytes(marks.numel()), dtype=torch.uint8, device=marks.device)
    padded[: marks.numel()] = marks
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=marks.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _unpack_bits_by_arithmetic(data: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(1) >> shifts) & 1).view(-1)[:bits].to(torch.bool)
