"""What crosses the network: pairs and coordinate sets as flat bytes, with known widths."""

from __future__ import annotations

import numpy as np
import torch

from hvd_slim.chunks import count_true, index_dtype, indices_of
from hvd_slim.values import ValueCodec

_ALIGNMENT = 8
_HEADER = 16


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of eight, so that what follows may have any dtype."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class PairFormat:
    """Messages of value-index pairs: a header (stratum of the first pair, number of pairs), values, indices.

    Args:
        codec: how values become bytes.
        index_dtype: dtype of an index; None if no index travels.
    """

    def __init__(self, codec: ValueCodec, index_dtype: torch.dtype | None) -> None:
        self.codec, self.index_dtype = codec, index_dtype

    def nbytes(self, count: int) -> int:
        """Bytes of a message of ``count`` pairs; each part is padded to eight bytes."""
        width = 0 if self.index_dtype is None else self.index_dtype.itemsize
        return _HEADER + aligned(self.codec.nbytes(count)) + aligned(count * width)

    def write(
        self, message: torch.Tensor, values: torch.Tensor, indices: torch.Tensor | None, first: int, *draw: int
    ) -> None:
        """Fill ``message`` (uint8, ``nbytes(count)``) with ``count`` pairs.

        Args:
            values: shape (count,), the arena's value dtype.
            indices: shape (count,), ``index_dtype``; None if no index travels.
            first: the stratum of the first pair.
            draw: (round, rank, number of the message), for stochastic rounding.
        """
        count = values.numel()
        message[:_HEADER].view(torch.int64).copy_(torch.tensor([first, count]))
        encoded = self.codec.nbytes(count)
        self.codec.encode(values, message[_HEADER : _HEADER + encoded], *draw)
        if indices is not None and self.index_dtype is not None:
            begin = _HEADER + aligned(encoded)
            message[begin : begin + indices.nbytes].view(self.index_dtype).copy_(indices)

    def read(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """(values in the arena's value dtype, indices or None, the stratum of the first pair) of a message."""
        first, count = message[:_HEADER].view(torch.int64).tolist()
        encoded = self.codec.nbytes(count)
        values = self.codec.decode(message[_HEADER : _HEADER + encoded], count)
        if self.index_dtype is None:
            return values, None, first
        begin = _HEADER + aligned(encoded)
        return (values, message[begin : begin + count * self.index_dtype.itemsize].view(self.index_dtype), first)


def pack_set(mask: torch.Tensor) -> torch.Tensor:
    """A set of coordinates, given as marks (bool, shape (n,)), as bytes on the CPU: a bitmap, or a list if smaller."""
    n, mask = mask.numel(), mask.cpu()
    if set_nbytes(count_true(mask), n) == _bitmap_nbytes(n):
        return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))
    indices = indices_of(mask)
    return indices.view(torch.uint8) if indices.numel() else torch.empty(0, dtype=torch.uint8)


def unpack_set(data: torch.Tensor, count: int, n: int) -> torch.Tensor:
    """The marks (bool, shape (n,)) of the set of ``count`` coordinates that ``pack_set`` made ``data`` of."""
    if set_nbytes(count, n) == _bitmap_nbytes(n):
        return torch.from_numpy(np.unpackbits(data.numpy(), count=n, bitorder="little")).view(torch.bool)
    mask = torch.zeros(n, dtype=torch.bool)
    mask[data.view(index_dtype(n)).long()] = True
    return mask


def set_nbytes(count: int, n: int) -> int:
    """Bytes of a packed set of ``count`` coordinates below ``n``: min(⌈n/8⌉, count · index width)."""
    return min(_bitmap_nbytes(n), count * index_dtype(n).itemsize)


def _bitmap_nbytes(n: int) -> int:
    return -(-n // 8)
