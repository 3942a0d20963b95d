"""How much memory a rank needs beyond the model, its gradients and the optimizer's state: an upper bound, reckoned."""

from __future__ import annotations

import dataclasses

import torch

from hvd_slim.chunks import index_dtype
from hvd_slim.config import SHARED_EXPLORERS, SlimConfig
from hvd_slim.explorer import EXPLORERS
from hvd_slim.global_model import global_model_itemsize
from hvd_slim.values import make_codec
from hvd_slim.wire import PairFormat, aligned

#: parameters on which own work is tried out before a path is chosen; in larger vectors one costs no more
PROBED = 2**22
#: ranks that are made up for it at most, on the path where each costs memory
REHEARSED_RANKS = 8
#: bytes that fill a processor's caches between two tries of a measurement
SWEPT = 2**25
#: of scores, up to which a k-th largest is searched among all of them; beyond, a sample of up to half as many is sorted
_SEARCHED_WHOLE = 2**18
#: values that a codec works on at once
_CODEC_CHUNK = 2**18
_SMALL = 3 * 2**16  # bytes for whatever does not grow with the model
_SMALL_PER_RANK = 2**10


def extra_memory(n: int, ranks: int, path: str, config: SlimConfig, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that a rank needs at most, at any moment, beyond model, gradients and optimizer state.

    With K ranks; c = βn core and e = (α−β)n explorer coordinates (in a linear warm-up (1−β)n); p bytes of a parameter,
    g of a coordinate of w̄ (p; 2p if p = 2), v of a value in sums (4; 8 in float64), i of a coordinate's number (4; 8
    beyond 2^31); M(x) bytes of a message of x pairs, C(x) of x narrow values. S(x) = (v + p + 8)·x moves a set of x
    coordinates; (v + p + 16)·x if p ≠ v, and 2(g − p)·x more. The bound is the sum of what is kept,

        w̄ (alltoall: what this rank knows of it)    g·n
        coordinates of the core, and of the others  2i·c + i·(n−c) + n/8
        the packed core (allreduce: and explorers)  v·c; allreduce v·(c+e)
        strata of the explorer                      (4+i)·e; cyclic (4+3i)·e; greedy and leader none
        alltoall: the slice of w̄ owned              g·n/K

    and of the largest of what is needed for a moment,

        choosing a core     v·n (its significance) + 2n + i·max(n−c, 2c); (2v+8)·n for n ≤ 2^18
        resync              2v·n, if p ≠ v 3v·n; alltoall v·(2n + n/K) + max(8n, 2g·n + g·n/K)
        a dense round       as a resync; with restore_norm at least (v+8)·n
        drawing explorers   (5+4i)·e; cyclic 32e; greedy and leader 2v·n, (2v+8)·n for n ≤ 2^18
        allgather round     2i·e + K·M(e) + max(M(e), S(c), (4i+7v)·e)
        alltoall round      2M(e) + (3i+1+v)·e + max(S(c), S(e), (i+3p)·e, (i+2p)·e + (4i+7v)·e/K)
        allreduce round     2i·e + S(max(c, e))

    and with exchange="auto" at least what measuring takes: 32 MiB, 2p·n and the bound of whichever path it may take,
    where n counts to 2^22 and, with allgather, K to 8.

    With ``overlap``, what was pending at the launch, and what was learned since, are kept beside: 2v·m + (2v+i)·e for m
    = c values (allreduce: c+e; dense: n), and what a round receives until it is merged.

    Values narrower than full width add, for m = c values (allreduce: c+e; dense: n), v·m that is kept and at most
    max(C(m) + 3v·m, 3C(m) + v·m, 2C(m) + 2v·m + 3v·m/K) for a moment, and v·e to explorers. Collectives above
    ``max_message_bytes`` are cut, and what they bring is put together in a copy. Some hundred kilobytes more do not
    grow with the model.

    Not included: a checkpoint (``state_dict`` copies w̄), ``global_parameters()`` (the largest tensor; with alltoall
    all of w̄, twice), and what Horovod or MPI allocate for themselves, Horovod's fusion buffer for one.

    Args:
        n: trainable parameters, in one tensor; in several it is a little less.
        ranks: K.
        path: "allgather", "alltoall", "allreduce" or "dense".
        config: the settings.
        dtype: of the parameters.
    """
    return _Memory(n, ranks, path, config, dtype).bound()


class _Memory:
    def __init__(self, n: int, ranks: int, path: str, config: SlimConfig, dtype: torch.dtype) -> None:
        self.n, self.ranks, self.path, self.config = n, ranks, path, config
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.codec = make_codec(config.value_dtype, wide, config.rounding, config.seed)
        self.dtype = dtype
        self.p, self.g = dtype.itemsize, global_model_itemsize(dtype)
        self.v, self.i = wide.itemsize, index_dtype(n).itemsize
        linear = config.warmup_rounds and config.warmup == "linear"
        most_explored = config.explorer_count(n, 0 if linear else None)
        self.c, self.e = (0, 0) if path == "dense" else (config.core_count(n), most_explored)
        self.reduced = {"dense": n, "allreduce": self.c + self.e}.get(path, self.c)
        self.pairs = PairFormat(self.codec, self._index_nbytes)

    def _index_nbytes(self, run: int) -> int:
        return EXPLORERS[self.config.explorer].nbytes_of(run, self.n - self.c, self.e)

    def bound(self) -> int:
        measuring = self._measuring() if self.config.exchange == "auto" else 0
        if self.path == "dense":
            return int(max(self.g * self.n + self._dense_round() + self._overlapped(), measuring) + self._small())
        kept = self._kept() + self._overlapped()
        momentary = [self._selection(), self._resync(), self._drawing(), self._round()]
        if self.config.warmup_rounds and self.config.warmup == "dense":
            momentary.append(max(self._resync(), self._with_norm()))
        return int(max(kept + max(momentary), measuring) + self._small())

    def _overlapped(self) -> float:
        if not self.config.overlap:
            return 0
        received = self.ranks * self.pairs.nbytes(self.e) if self.path == "allgather" else 2 * self.pairs.nbytes(self.e)
        return 2 * self.v * self.reduced + (2 * self.v + self.i) * self.e + (received if self.e else 0)

    def _measuring(self) -> float:
        n = min(self.n, PROBED)
        paths = ("allreduce",) if self.config.explorer in SHARED_EXPLORERS else ("allgather", "alltoall")
        config = dataclasses.replace(self.config, warmup_rounds=0)
        bounds = []
        for path in (*paths, "dense"):
            ranks = min(self.ranks, REHEARSED_RANKS) if path == "allgather" else self.ranks
            named = dataclasses.replace(config, exchange=path)
            bounds.append(_Memory(n, ranks, path, named, self.dtype).bound())
        return SWEPT + 2 * self.p * n + max(bounds)

    def _small(self) -> float:
        work = 0 if self.codec.exact else 8 * min(self.n, _CODEC_CHUNK)
        return _SMALL + _SMALL_PER_RANK * self.ranks + work

    def _kept(self) -> float:
        n, g, v, i, c, e = self.n, self.g, self.v, self.i, self.c, self.e
        strata = {"random": 4 + i, "shared": 4 + i, "cyclic": 4 + 3 * i}.get(self.config.explorer, 0)
        kept = g * n + 2 * i * c + i * (n - c) + n / 8 + v * self.reduced + strata * e
        if self.path == "alltoall":
            kept += g * n / self.ranks
        return kept if self.codec.exact else kept + v * self.reduced

    def _search(self, count: int) -> float:
        """Finding the k-th largest of so many."""
        return (self.v + 8) * count if count <= _SEARCHED_WHOLE else 24 * _SEARCHED_WHOLE / 2

    def _selection(self) -> float:
        n, c, i = self.n, self.c, self.i
        return self.v * n + max(self._search(n), 2 * n + i * max(n - c, 2 * c))

    def _resync(self) -> float:
        n, g, v = self.n, self.g, self.v
        if self.path != "alltoall":
            return (2 if self.p == v else 3) * v * n
        pushed = self._put_together(v * n, v * n * self.ranks)
        rows = self.ranks * aligned(-(-n // self.ranks) * g)
        gathered = self._put_together(rows, rows)
        return v * n + pushed + v * n / self.ranks + max(8 * n, gathered + g * n + g * n / self.ranks)

    def _with_norm(self) -> float:
        """A sum of squares in float64 over everything."""
        return 0 if self.config.restore_norm is False else (self.v + 8) * self.n

    def _dense_round(self) -> float:
        full_width = max(self._resync(), self._with_norm())
        if self.codec.exact:
            return full_width
        unsent = self.v * self.n
        return unsent + max(full_width, unsent + self._reduction(self.n))

    def _drawing(self) -> float:
        n, c, e, v = self.n, self.c, self.e, self.v
        explorer = self.config.explorer
        if explorer in ("greedy", "leader"):
            return v * (n - c) + max(v * n, self._search(n - c), 2 * n)
        return 32 * e if explorer == "cyclic" else (5 + 4 * self.i) * e

    def _set(self, count: int) -> float:
        """Moving a set of coordinates; torch widens their numbers to eight bytes, and copies that for narrow dtypes."""
        return (self.v + self.p + (8 if self.p == self.v else 16) + 2 * (self.g - self.p)) * count

    def _round(self) -> float:
        p, v, i, c, e, ranks = self.p, self.v, self.i, self.c, self.e, self.ranks
        exact = self.codec.exact
        narrow, unsent = (0, 0) if exact else (self._reduction(self.reduced), v * e)
        if self.path == "allreduce":
            return 2 * i * e + max(narrow, self._set(max(c, e)) + (0 if exact else v * self.reduced))
        message = self.pairs.nbytes(e) + ranks * self.pairs.nbytes(0)
        core, merge = self._set(c), (4 * i + 7 * v) * e + unsent
        if self.path == "allgather":
            rows = ranks * self.pairs.nbytes(e) if e else 0
            gathered = self._put_together(rows, rows)
            return 2 * i * e + unsent + max(narrow + message, gathered + max(message, core, merge))
        alive = message + self._put_together(message, message * ranks) + (3 * i + 1 + v) * e + unsent
        replies = i * e + 2 * p * e
        return alive + max(narrow, core, self._set(e), replies + max(p * e, merge / ranks))

    def _put_together(self, nbytes: float, on_all_ranks: float) -> float:
        """What a collective brings; twice if it comes in pieces."""
        return nbytes if on_all_ranks <= self.config.max_message_bytes else 2 * nbytes

    def _reduction(self, count: int) -> float:
        """Of narrow values, beyond the buffer and what is unsent."""
        wide, coded = self.v * count, self.codec.nbytes(count) + self.ranks * (aligned(self.codec.nbytes(1)) + 24)
        received = self._put_together(coded, coded * self.ranks)
        return max(coded + 3 * wide, 2 * coded + received + wide, received + coded + 2 * wide + 3 * wide / self.ranks)
