"""The compiled passes over memory (native.c), on CPU tensors; torch takes their place where they cannot serve.

``available`` says whether the library is there: it is built with the package if there is a C compiler, and switched off
by HVD_SLIM_NATIVE=0. Results are the same to the bit with and without it.

It works in one thread. With several threads a rank, torch's own operators share the work, and are used instead.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
from collections.abc import Sequence

import torch


def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """(the library, None), or (None, why it is not there)."""
    if os.environ.get("HVD_SLIM_NATIVE", "1") == "0":
        return None, SWITCHED_OFF
    # Beside this file alone: of another installation it may be another version's.
    found = importlib.machinery.PathFinder.find_spec("hvd_slim._native", [os.path.dirname(__file__)])
    if found is None or found.origin is None:
        return None, "not built"
    try:
        library = ctypes.CDLL(found.origin)
        for name in ("draw", "sample", "reaching", "keep", "set_places"):
            getattr(library, f"hvd_slim_{name}").restype = ctypes.c_int64
        library.hvd_slim_is_finite.restype = ctypes.c_int32
    except (OSError, AttributeError) as error:  # built for another machine, or from another version's native.c
        return None, f"built, but does not load: {error}"
    return library, None


SWITCHED_OFF = "switched off by HVD_SLIM_NATIVE=0"

#: the library, and why it is not there; ``hvd-slim doctor`` says so
_library, problem = _load()


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


def take_over(segments: ctypes.Array[Segment], mean: torch.Tensor, total: torch.Tensor, divisor: float) -> None:
    """w̄ += total / divisor and w_k = w̄ at every coordinate, in one pass.

    Args:
        segments: of all coordinates, ascending.
        mean: w̄, shape (n,).
        total: shape (n,).
    """
    _call("take_over", segments, _count(len(segments)), _pointer(mean), _pointer(total), _float(divisor))


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


class _Scores(ctypes.Structure):
    _fields_ = (
        ("segments", ctypes.c_void_p), ("segment_count", ctypes.c_int64), ("mean", ctypes.c_void_p),
        ("gradients", ctypes.c_void_p), ("scale", ctypes.c_float), ("gradient_scale", ctypes.c_float),
        ("factor", ctypes.c_float), ("outside", ctypes.c_void_p), ("sent", ctypes.c_void_p),
        ("outside_count", ctypes.c_int64), ("sent_count", ctypes.c_int64),
    )  # fmt: skip


class Scores:
    """What every coordinate is judged by, worked out in each pass anew: cheaper than to store and to read it.

    |live − mean|, or |live| / scale + factor·(|gradient| / gradient_scale) if there is no mean; NaN as infinity.

    Args:
        segments: of all coordinates, ascending.
        n: how many coordinates.
        mean: w̄, shape (n,).
        gradients: of each segment, in its order of coordinates, or None for zeros.
        outside: ascending coordinates whose score is −1.
        sent: the same, whose score is 0.
    """

    def __init__(
        self, segments: ctypes.Array[Segment], n: int, *, mean: torch.Tensor | None = None,
        gradients: Sequence[torch.Tensor | None] = (), scale: float = 1.0, gradient_scale: float = 1.0,
        factor: float = 0.0, outside: torch.Tensor | None = None, sent: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.n, self._outside = n, outside
        addresses = (ctypes.c_void_p * len(gradients))(*(None if g is None else g.data_ptr() for g in gradients))
        self._alive = segments, mean, gradients, addresses, sent
        self._scores = _Scores(
            ctypes.addressof(segments), len(segments), None if mean is None else mean.data_ptr(),
            ctypes.addressof(addresses), scale, gradient_scale, factor,
            *(None if at is None else at.data_ptr() for at in (outside, sent)),
            *(0 if at is None else at.numel() for at in (outside, sent)),
        )  # fmt: skip

    def _call(self, name: str, *arguments: object) -> int:
        return _call(name, ctypes.byref(self._scores), *arguments)

    def sample(self, stride: int) -> torch.Tensor:
        """The score of every ``stride``-th coordinate."""
        out = torch.empty(-(-self.n // stride))
        self._call("sample", _count(stride), _pointer(out))
        return out

    def reaching(self, low: float, ties: int, room: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ascending coordinates whose score exceeds ``low``, or equals it (the first ``ties``): int32, with scores.
        None if there are more than ``room``."""
        at, score = torch.empty(room, dtype=torch.int32), torch.empty(room)
        found = self._call("reaching", _float(low), _count(ties), _pointer(at), _pointer(score), _count(room))
        return (at[:found], score[:found]) if found <= room else None

    def places(self, at: torch.Tensor, score: torch.Tensor, threshold: float, ties: int, count: int) -> torch.Tensor:
        """Of what ``reaching`` gave, the ``count`` coordinates whose score exceeds ``threshold``, or equals it (the
        first ``ties``): as places among those that are not outside, int32, ascending."""
        out = torch.empty(count, dtype=torch.int32)
        outside = self._outside
        found = _call(
            "keep", _pointer(at), _pointer(score), _count(at.numel()), _float(threshold), _count(ties),
            None if outside is None else _pointer(outside), _count(0 if outside is None else outside.numel()),
            _pointer(out), _count(count),
        )  # fmt: skip
        assert found == count, (found, count)
        return out


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


def others(indices: torch.Tensor, n: int, out: torch.Tensor) -> None:
    """The coordinates below n that are not among ``indices``, ascending, in ``out``: int32, shape (n − count,)."""
    _call("others", _pointer(indices), _count(indices.numel()), _count(n), _pointer(out))
