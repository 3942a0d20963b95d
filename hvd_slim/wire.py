"""What crosses the network: value-index pairs as flat bytes, with known widths."""

from __future__ import annotations

from collections.abc import Callable

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
        index_nbytes: how many bytes so many indices take.
    """

    def __init__(self, codec: ValueCodec, index_nbytes: Callable[[int], int]) -> None:
        self.codec, self.index_nbytes = codec, index_nbytes

    def nbytes(self, count: int) -> int:
        """Bytes of a message of ``count`` pairs; each part is padded to eight bytes."""
        return _HEADER + aligned(self.codec.nbytes(count)) + aligned(self.index_nbytes(count))

    def write(self, message: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, first: int, *draw: int) -> None:
        """Fill ``message`` (uint8, ``nbytes(count)``) with ``count`` pairs.

        Args:
            values: shape (count,), the arena's value dtype.
            indices: uint8, shape (index_nbytes(count),).
            first: the stratum of the first pair.
            draw: (round, rank, number of the message), for stochastic rounding.
        """
        count = values.numel()
        message[:_HEADER].view(torch.int64).copy_(torch.tensor([first, count]))
        encoded = self.codec.nbytes(count)
        self.codec.encode(values, message[_HEADER : _HEADER + encoded], *draw)
        begin = _HEADER + aligned(encoded)
        message[begin : begin + indices.numel()] = indices

    def read(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(values in the arena's value dtype, indices as uint8, the stratum of the first pair) of a message."""
        first, count = message[:_HEADER].view(torch.int64).tolist()
        encoded = self.codec.nbytes(count)
        values = self.codec.decode(message[_HEADER : _HEADER + encoded], count)
        begin = _HEADER + aligned(encoded)
        return values, message[begin : begin + self.index_nbytes(count)], first
