"""What crosses the network: pairs and coordinate sets as flat bytes, with known widths."""

from __future__ import annotations

import numpy as np
import torch

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
        self,
        message: torch.Tensor,
        values: torch.Tensor,
        indices: torch.Tensor | None,
        first: int,
        *draw: int,
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
        return (
            values,
            message[begin : begin + count * self.index_dtype.itemsize].view(self.index_dtype),
            first,
        )


def index_dtype(n: int) -> torch.dtype:
    """The narrowest dtype that holds every coordinate of ``n``: int32, or int64 when n exceeds 2^31."""
    return torch.int32 if n <= 2**31 else torch.int64


def pack_set(coordinates: torch.Tensor, n: int) -> torch.Tensor:
    """An ascending set of coordinates below ``n`` as bytes (uint8): a bitmap or a list, whichever is smaller."""
    if set_nbytes(coordinates.numel(), n) == _bitmap_nbytes(n):
        member = np.zeros(n, dtype=np.bool_)
        member[coordinates.cpu().numpy()] = True
        return torch.from_numpy(np.packbits(member, bitorder="little"))
    return coordinates.cpu().to(index_dtype(n)).view(torch.uint8)


def unpack_set(data: torch.Tensor, count: int, n: int) -> torch.Tensor:
    """The set of ``count`` coordinates that ``pack_set`` made bytes of: ascending, ``index_dtype(n)``."""
    if set_nbytes(count, n) == _bitmap_nbytes(n):
        member = np.unpackbits(data.numpy(), count=n, bitorder="little")
        return torch.from_numpy(np.flatnonzero(member)).to(index_dtype(n))
    return data.view(index_dtype(n))


def set_nbytes(count: int, n: int) -> int:
    """Bytes of a packed set of ``count`` coordinates below ``n``: min(⌈n/8⌉, count · index width)."""
    return min(_bitmap_nbytes(n), count * index_dtype(n).itemsize)


def _bitmap_nbytes(n: int) -> int:
    return -(-n // 8)
