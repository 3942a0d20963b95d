"""What crosses the network: values, offsets and coordinate sets as flat bytes, with known widths."""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 8


class PairFormat:
    """A message of ``count`` value-index pairs: all values first, then all indices, padded to eight bytes.

    Args:
        count: pairs in a message.
        value_dtype, index_dtype: their dtypes on the wire.
    """

    def __init__(self, count: int, value_dtype: torch.dtype, index_dtype: torch.dtype) -> None:
        self.value_dtype, self.index_dtype = value_dtype, index_dtype
        self._values_end = count * value_dtype.itemsize
        self._indices_end = self._values_end + count * index_dtype.itemsize
        #: bytes of one message
        self.nbytes = -(-self._indices_end // _ALIGNMENT) * _ALIGNMENT

    def empty(self, device: torch.device) -> torch.Tensor:
        """A message to be filled: uint8, shape (nbytes,), zeroed."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def values(self, message: torch.Tensor) -> torch.Tensor:
        """The values in a message, shape (count,): a view."""
        return message[: self._values_end].view(self.value_dtype)

    def indices(self, message: torch.Tensor) -> torch.Tensor:
        """The indices in a message, shape (count,): a view."""
        return message[self._values_end : self._indices_end].view(self.index_dtype)


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
