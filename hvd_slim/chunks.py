"""Passes over long vectors: in pieces that a CPU's cache holds, or compiled; on a GPU, in one piece."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hvd_slim import native

_CHUNK = 1 << 16


def chunks(n: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover 0 to ``n`` (excluded), in order."""
    step = _CHUNK if device.type == "cpu" else max(n, 1)
    return (slice(begin, min(begin + step, n)) for begin in range(0, n, step))


def index_dtype(n: int) -> torch.dtype:
    """The narrowest dtype that holds every coordinate of ``n``: int32, or int64 when n exceeds 2^31."""
    return torch.int32 if n <= 2**31 else torch.int64


def count_true(mask: torch.Tensor) -> int:
    """How many marks are set. Several times as fast as a sum of booleans on a CPU."""
    if mask.device.type == "cpu":
        return int(np.count_nonzero(mask.numpy()))
    return int(mask.count_nonzero())


def indices_of(mask: torch.Tensor) -> torch.Tensor:
    """Where ``mask`` (bool, shape (n,)) is set: ascending, ``index_dtype(n)``."""
    dtype = index_dtype(mask.numel())
    if mask.device.type != "cpu":
        return mask.nonzero().squeeze(1).to(dtype)
    marks = mask.numpy()
    out = np.empty(int(np.count_nonzero(marks)), dtype=np.int32 if dtype == torch.int32 else np.int64)
    end = 0
    for part in chunks(marks.size, mask.device):
        found = np.flatnonzero(marks[part])
        begin, end = end, end + found.size
        np.add(found, part.start, out=out[begin:end], casting="unsafe")
    return torch.from_numpy(out)


def others(indices: torch.Tensor, n: int, reuse: torch.Tensor | None = None) -> torch.Tensor:
    """The coordinates below ``n`` that are not among ``indices`` (ascending, distinct): ascending, the same dtype.

    Args:
        reuse: what an earlier call has given; may be written over.
    """
    if native.serves(indices) and indices.dtype == torch.int32:
        fits = reuse is not None and (reuse.dtype, reuse.numel()) == (indices.dtype, n - indices.numel())
        out = reuse if reuse is not None and fits else indices.new_empty(n - indices.numel())
        native.others(indices, n, out)
        return out
    marks = torch.ones(n, dtype=torch.bool, device=indices.device)
    return indices_of(marks.index_fill_(0, indices.long(), False))


def take(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """``values[at]``, integers of one dtype."""
    if native.serves(values, at) and values.dtype == at.dtype == torch.int32:
        return native.take(values, at)
    return values.index_select(0, at)


def at_least(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Marks (bool) of ``values`` ≥ ``threshold``. Twice as fast through NumPy on a CPU."""
    if values.device.type != "cpu":
        return values >= threshold
    array = values.numpy()
    return torch.from_numpy(np.greater_equal(array, array.dtype.type(threshold)))


def equal_to(values: torch.Tensor, threshold: float) -> torch.Tensor:
    """Marks (bool) of ``values`` = ``threshold``."""
    if values.device.type != "cpu":
        return values == threshold
    array = values.numpy()
    return torch.from_numpy(np.equal(array, array.dtype.type(threshold)))


def between(values: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, int]:
    """(the values in [low, high], how many lie above)."""
    if values.device.type != "cpu":
        above = values > high
        return values[(values >= low) & ~above], count_true(above)
    array = values.numpy()
    low, high = array.dtype.type(low), array.dtype.type(high)
    inside, passed = [], 0
    for part in chunks(array.size, values.device):
        above_high = array[part] > high
        passed += int(np.count_nonzero(above_high))
        inside.append(array[part][np.flatnonzero((array[part] >= low) ^ above_high)])
    return torch.from_numpy(np.concatenate(inside)), passed


def kth_largest(values: torch.Tensor, k: int) -> float:
    """The k-th largest of ``values``, 1 ≤ k ≤ their number. Linear on a CPU, also for sorted values."""
    if values.device.type == "cpu":
        at = values.numel() - k
        return float(np.partition(values.numpy(), at)[at])
    return float(torch.kthvalue(values, values.numel() - k + 1).values)
