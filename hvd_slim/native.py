"""The compiled passes over memory (native.c), on CPU tensors; torch takes their place where they cannot serve.

``available`` says whether the library is there: it is built with the package if there is a C compiler, and switched off
by HVD_SLIM_NATIVE=0. Results are the same to the bit with and without it.

It works in one thread. With several threads a rank, torch's own operators share the work, and are used instead.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence

import torch


def _load() -> ctypes.CDLL | None:
    if os.environ.get("HVD_SLIM_NATIVE", "1") == "0":
        return None
    found = importlib.util.find_spec("hvd_slim._native")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    for name in ("draw", "between", "places", "set_places"):
        getattr(library, f"hvd_slim_{name}").restype = ctypes.c_int64
    library.hvd_slim_is_finite.restype = ctypes.c_int32
    return library


_library = _load()


def available() -> bool:
    """Whether the library was built and is not switched off."""
    return _library is not None


def serves(*tensors: torch.Tensor | None) -> bool:
    """Whether the library can work on these: contiguous, on the CPU, float32, int32 or bytes; None is no tensor."""
    return (
        _library is not None
        and torch.get_num_threads() == 1
        and all(t is None or (t.device.type == "cpu" and t.dtype in _SERVED and t.is_contiguous()) for t in tensors)
    )


_SERVED = (torch.float32, torch.int32, torch.uint8)


def _pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _call(name: str, *arguments: object) -> int:
    assert _library is not None
    return getattr(_library, f"hvd_slim_{name}")(*arguments)


_count, _float = ctypes.c_int64, ctypes.c_float


# Steps on sets of coordinates ----------------------------------------------------------------------------------------

PENDING, MERGE, SETTLE, ABSORB, ADVANCE, REPLACE = range(6)


class Segment(ctypes.Structure):
    """One parameter: where its memory begins, and which coordinates it has."""

    _fields_ = (("live", ctypes.c_void_p), ("start", ctypes.c_int64), ("stop", ctypes.c_int64))


class Step(ctypes.Structure):
    """One step; see native.c for which of the tensors each kind reads."""

    _fields_ = (
        ("kind", ctypes.c_int64), ("count", ctypes.c_int64), ("done", ctypes.c_int64), ("at", ctypes.c_void_p),
        ("out", ctypes.c_void_p), ("change", ctypes.c_void_p), ("left", ctypes.c_void_p), ("unsent", ctypes.c_void_p),
    )  # fmt: skip


def sweep(segments: ctypes.Array[Segment], mean: torch.Tensor, steps: Sequence[Step]) -> None:
    """Take the steps in their order at each coordinate, in one pass over memory.

    Args:
        segments: of all coordinates, ascending.
        mean: w̄, shape (n,).
        steps: each made once, for one sweep; the tensors they point to are alive.
    """
    table = (Step * len(steps))(*steps)
    _call("sweep", segments, _count(len(segments)), _pointer(mean), table, _count(len(steps)))


def take(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """``values[at]``, int32; faster than torch's where ``at`` ascends."""
    out = torch.empty(at.numel(), dtype=torch.int32)
    _call("take", _pointer(values), _pointer(at), _count(at.numel()), _pointer(out))
    return out


def draw(
    bits: torch.Tensor, starts: torch.Tensor, shift: int, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """One position in each stratum, rotated: (positions, int32, ascending; offsets; the stratum of the first).

    Args:
        bits: at least (count,) of 32 random bits, as int32.
        starts: of the strata, and the end of the last: shape (count + 1,), int32.
        offsets: is filled; shape (count,), uint8 or int32.
    """
    count = offsets.numel()
    positions = torch.empty(count, dtype=torch.int32)
    narrow = ctypes.c_int32(offsets.dtype == torch.uint8)
    first = _call(
        "draw", _pointer(bits), _pointer(starts), _count(count), _count(shift), narrow, _pointer(offsets),
        _pointer(positions),
    )  # fmt: skip
    return positions, offsets, first


def drawn(starts: torch.Tensor, first: int, offsets: torch.Tensor, shift: int) -> torch.Tensor:
    """The positions of a run of strata from ``first`` on, from offsets (uint8 or int32) that travelled: int32."""
    positions = torch.empty(offsets.numel(), dtype=torch.int32)
    narrow = ctypes.c_int32(offsets.dtype == torch.uint8)
    _call(
        "drawn", _pointer(starts), _count(starts.numel() - 1), _count(first), _count(offsets.numel()), _count(shift),
        narrow, _pointer(offsets), _pointer(positions),
    )  # fmt: skip
    return positions


# Choosing the largest ------------------------------------------------------------------------------------------------


def score(
    weight: torch.Tensor, gradient: torch.Tensor | None, scale: float, gradient_scale: float, factor: float,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """out = |weight| / scale + factor·(|gradient| / gradient_scale), NaN as infinity."""
    scales = _float(scale), _float(gradient_scale), _float(factor)
    _call("score", _pointer(weight), _pointer(gradient), _count(out.numel()), *scales, _pointer(out))


def distance(live: torch.Tensor, mean: torch.Tensor, out: torch.Tensor) -> None:
    """out = |live − mean|, NaN as infinity."""
    _call("distance", _pointer(live), _pointer(mean), _count(out.numel()), _pointer(out))


def put(values: torch.Tensor, at: torch.Tensor, value: float) -> None:
    """values[at] = value"""
    _call("put", _pointer(values), _pointer(at), _count(at.numel()), _float(value))


def between(values: torch.Tensor, low: float, high: float, room: int) -> tuple[torch.Tensor | None, int]:
    """(those in [low, high], in their order; None if there are more than ``room``), (how many lie above)."""
    out, above = torch.empty(room, dtype=torch.float32), ctypes.c_int64()
    found = _call(
        "between", _pointer(values), _count(values.numel()), _float(low), _float(high), _pointer(out), _count(room),
        ctypes.byref(above),
    )  # fmt: skip
    return out[:found] if found <= room else None, above.value


def places(values: torch.Tensor, threshold: float, ties: int, least: float, count: int) -> torch.Tensor:
    """Where ``count`` values exceed ``threshold``, or equal it (the first ``ties``): int32, ascending.

    Args:
        least: values below it have no place.
    """
    out = torch.empty(count + 1, dtype=torch.int32)
    found = _call(
        "places", _pointer(values), _count(values.numel()), _float(threshold), _count(ties), _float(least),
        _pointer(out),
    )  # fmt: skip
    assert found == count, (found, count)
    return out[:count]


def is_finite(values: torch.Tensor) -> bool:
    """Whether all of a float32 vector is finite, at the speed of memory."""
    return bool(_call("is_finite", _pointer(values), _count(values.numel())))


# Sets as bits --------------------------------------------------------------------------------------------------------


def bits_of(indices: torch.Tensor, n: int) -> torch.Tensor:
    """A bitmap of n bits, least significant first: uint8, shape (⌈n/8⌉,)."""
    bits = torch.zeros(-(-n // 8), dtype=torch.uint8)
    _call("set_bits", _pointer(indices), _count(indices.numel()), _pointer(bits))
    return bits


def indices_of_bits(bits: torch.Tensor, n: int, count: int) -> torch.Tensor:
    """Which ``count`` of the first n bits are set: int32, ascending."""
    out = torch.empty(count, dtype=torch.int32)
    found = _call("set_places", _pointer(bits), _count(n), _pointer(out), _count(count))
    assert found == count, (found, count)
    return out


def others(indices: torch.Tensor, n: int) -> torch.Tensor:
    """The coordinates below n that are not among ``indices``: int32, ascending."""
    out = torch.empty(n - indices.numel(), dtype=torch.int32)
    _call("others", _pointer(indices), _count(indices.numel()), _count(n), _pointer(out))
    return out
