"""The cost model: what a round sends on each path, how long it takes, and which path to take. Needs no Horovod.

A round's time is that of its collectives, one after the other, and of the rank's own work. A collective takes what
``Link`` says, own work what was measured or is reckoned on paper (``own_work``). Rounds that choose a new
core or resync are rarer and dearer; what is predicted is the mean over all rounds, long after the start. How much
of it ``overlap`` hides depends on the time of a training step: ``Prediction.step_seconds`` reckons with both.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvd_slim.config import SHARED_EXPLORERS, SlimConfig
from hvd_slim.explorer import EXPLORERS
from hvd_slim.global_model import global_model_itemsize
from hvd_slim.memory import extra_memory
from hvd_slim.own_work import Paper, Work
from hvd_slim.sets import set_nbytes
from hvd_slim.values import make_codec
from hvd_slim.wire import PairFormat, aligned

__all__ = ["Link", "Network", "Prediction", "allowed_paths", "choose", "extra_memory", "predict"]

#: a slim path is taken if it is predicted to need less than this part of dense's time
_MARGIN = 0.95
#: numbers that ride in every reduction (see ``exchange.reduction``), and their bytes in a narrow message
_RIDERS, _RIDER_BYTES = 3, 24


@dataclasses.dataclass(frozen=True)
class Link:
    """Seconds that one kind of collective takes, by the bytes that each rank sends in it.

    Attributes:
        points: (bytes, seconds), ascending in bytes, both growing. Between two points the time is interpolated; beyond
            the last it grows as from the first to the last.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, latency: float, bandwidth: float) -> Link:
        """``latency`` seconds, and a second for every ``bandwidth`` bytes."""
        return cls(((0.0, latency), (bandwidth, latency + 1.0)))

    def seconds(self, nbytes: float) -> float:
        """Time of a collective in which each rank sends ``nbytes``."""
        points = self.points
        at = bisect.bisect_left(points, (nbytes,))
        if at == 0:
            return points[0][1]
        (a, begin), (b, end) = points[at - 1 : at + 1] if at < len(points) else (points[0], points[-1])
        if b == a:
            return begin
        known, time = (a, begin) if at < len(points) else (b, end)
        return time + (nbytes - known) * (end - begin) / (b - a)

    def scaled(self, factor: float) -> Link:
        """The same with every time ``factor`` times as long."""
        return Link(tuple((nbytes, seconds * factor) for nbytes, seconds in self.points))


@dataclasses.dataclass(frozen=True)
class Network:
    """What collectives and a rank's own work cost on some machines.

    Attributes:
        allreduce, allgather, alltoall, broadcast: each kind of collective.
        hop: seconds added for each message that a rank sends after the other in a collective; 0 where the collectives
            were measured with as many ranks as are predicted.
        work: a rank's own.
    """

    allreduce: Link
    allgather: Link
    alltoall: Link
    broadcast: Link
    hop: float = 0.0
    work: Work = Paper()

    @classmethod
    def uniform(cls, bandwidth: float, latency: float = 50e-6, hop: float = 5e-6, **work: float) -> Network:
        """A machine on paper: a rank sends ``bandwidth`` bytes a second in every kind of collective.

        Args:
            latency, hop: seconds for a collective, and for each message in it.
            work: of ``Paper``; by default those of one core of 2020's.
        """
        link = Link.of(latency, bandwidth)
        return cls(link, link, link, link, hop, Paper(**work))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One path's cost, the mean over rounds long after the start.

    Attributes:
        path: "allgather", "alltoall", "allreduce" or "dense".
        bytes_sent: bytes each rank sends a round, core broadcasts and resyncs included, as ``Stats`` counts them.
        ratio: ``bytes_sent`` to those of a ring allreduce of every parameter in its own dtype.
        seconds: one round.
        work_seconds: the part of it that is the rank's own work.
        collectives: how many a round.
        extra_memory: bytes each rank needs beyond model, gradients and optimizer state; an upper bound.
        hideable_seconds: the part of ``seconds`` that passes while the next step is computed if ``overlap`` is on and
            the step is that long; see ``step_seconds``.
    """

    path: str
    bytes_sent: float
    ratio: float
    seconds: float
    work_seconds: float
    collectives: float
    extra_memory: int
    hideable_seconds: float = 0.0

    def step_seconds(self, compute: float, local_steps: int = 1, overlap: bool = False) -> float:
        """Seconds of a step, exchange included, the mean over steps.

        With ``overlap`` what is launched after a step travels while the next is computed: the longer of the two
        counts. A rank's own work, and what can only be sent once something has arrived, hide behind nothing.

        Args:
            compute: seconds of a step without exchange.
            local_steps: steps a round.
        """
        hidden = min(self.hideable_seconds, compute) if overlap else 0.0
        return compute + (self.seconds - hidden) / local_steps


def allowed_paths(config: SlimConfig, n: int) -> tuple[str, ...]:
    """The paths that ``config`` allows for ``n`` parameters, "dense" last."""
    if config.exchange == "dense" or config.core_count(n) == n:
        return ("dense",)
    if config.exchange != "auto":
        return (config.exchange,)
    shared = config.explorer in SHARED_EXPLORERS
    return ("allreduce", "dense") if shared else ("allgather", "alltoall", "dense")


def predict(
    n: int, ranks: int, config: SlimConfig, network: Network, dtype: torch.dtype = torch.float32
) -> list[Prediction]:
    """The cost of every path that ``config`` allows, fastest first. Not collective; needs neither Horovod nor ranks.

    Args:
        n: trainable parameters.
        ranks: K, at least 2.
        config: the settings; with ``exchange="auto"`` every path for its explorer is compared.
        network: what the machine can do.
        dtype: of the parameters, real: a complex parameter counts as two real ones.

    Raises:
        ValueError: ``n`` or ``ranks`` is too small or no whole number, ``dtype`` not one of them, or an explorer
            cannot find its way with so few of so many coordinates.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"dtype={dtype} is none of float16, bfloat16, float32 and float64; count real coordinates")
    if any(isinstance(number, bool) or not isinstance(number, int) for number in (n, ranks)):
        raise ValueError(f"n={n!r}, ranks={ranks!r}: give whole numbers")
    if n < 1 or ranks < 2:
        raise ValueError(f"n={n!r}, ranks={ranks!r}: a prediction needs at least one parameter and two ranks")
    model, paths = _CostModel(n, ranks, config, network, dtype), allowed_paths(config, n)
    if paths != ("dense",):
        EXPLORERS[config.explorer].check(n - model.core, model.explored)
    return sorted((model.prediction(path) for path in paths), key=lambda path: path.seconds)


def choose(predictions: Sequence[Prediction]) -> tuple[str, str]:
    """(the path to take, one line that says why) out of what ``predict`` returned.

    The fastest; but a slim path only if it is predicted to save 5 % of dense's time, for dense follows the training
    more closely.
    """
    best = predictions[0]
    dense = next((prediction for prediction in predictions if prediction.path == "dense"), None)
    if dense is not None and best.seconds > _MARGIN * dense.seconds:
        best = dense
    others = ", ".join(_described(prediction) for prediction in predictions if prediction is not best)
    if best is dense:
        reason = "slim would not be faster here, so everything is sent" if others else "everything is sent"
    elif dense is not None:
        reason = f"{best.ratio:.2f} of dense's bytes, {best.seconds / dense.seconds:.2f} of its time"
    else:
        reason = f"{best.ratio:.2f} of dense's bytes"
    return best.path, f"exchange={best.path!r}, {reason}: {_described(best)}" + (f"; {others}" if others else "")


def _described(prediction: Prediction) -> str:
    own = f"{prediction.work_seconds * 1e3:.3g} of it own work"
    return f"{prediction.path} {prediction.seconds * 1e3:.3g} ms a round, {own}"


def messages(n: int, ranks: int, config: SlimConfig, dtype: torch.dtype = torch.float32) -> dict[str, list[float]]:
    """Bytes that each rank sends in the collectives of a usual round, by kind, ascending; of every allowed path."""
    model = _CostModel(n, ranks, config, Network.uniform(1.0), dtype)
    of_kind: dict[str, set[float]] = {}
    for path in allowed_paths(config, n):
        for collective in model.usual(path):
            of_kind.setdefault(collective.kind, set()).add(collective.nbytes)
    return {kind: sorted(nbytes) for kind, nbytes in of_kind.items()}


class _Collective(NamedTuple):
    """One of a round.

    Attributes:
        kind: "allreduce", "allgather", "alltoall" or "broadcast".
        nbytes: that each rank sends.
        seconds: it takes.
        late: whether it can only be launched once another has arrived.
    """

    kind: str
    nbytes: float
    seconds: float
    late: bool = False


class _CostModel:
    """Bytes as the exchanges count them; seconds as the network tells."""

    def __init__(self, n: int, ranks: int, config: SlimConfig, network: Network, dtype: torch.dtype) -> None:
        self.n, self.ranks, self.config, self.network, self.dtype = n, ranks, config, network, dtype
        self.share = (ranks - 1) / ranks
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.codec = make_codec(config.value_dtype, self.wide, config.rounding, config.seed)
        self.core, self.explored = config.core_count(n), config.explorer_count(n)
        self.dense_bytes = 2 * self.share * n * dtype.itemsize

    def _index_nbytes(self, run: int) -> int:
        return EXPLORERS[self.config.explorer].nbytes_of(run, self.n - self.core, self.explored)

    def prediction(self, path: str) -> Prediction:
        """The mean round of ``path``."""
        own = self.network.work.of_path(path, self.n, self.ranks, self.config)
        if path == "dense":
            parts = [(1.0, self.usual(path), own.usual)]
        else:
            resyncs, selections = self._resyncs(path), 1 / self.config.reselect_every
            parts = [
                (1 - resyncs, self.usual(path), own.usual),
                (resyncs, self._everything(path), own.everything),
                (selections, [self._broadcast(set_nbytes(self.core, self.n))], own.selection),
            ]
        weighted = [(weight, collective) for weight, collectives, _ in parts for collective in collectives]
        sent = sum(weight * collective.nbytes for weight, collective in weighted)
        waited = sum(weight * collective.seconds for weight, collective in weighted)
        work = sum(weight * seconds for weight, _, seconds in parts)
        # Re-selection and resync are waited for at once.
        usual, collectives, _ = parts[0]
        hideable = usual * sum(collective.seconds for collective in collectives if not collective.late)
        return Prediction(
            path, sent, sent / self.dense_bytes, waited + work, work, sum(weight for weight, _ in weighted),
            extra_memory(self.n, self.ranks, path, self.config, self.dtype), hideable,
        )  # fmt: skip

    def _resyncs(self, path: str) -> float:
        """The part of rounds that are resyncs: the last of every ``resync_every``, and with alltoall every first one
        of a core."""
        every, reselect = self.config.resync_every, self.config.reselect_every
        asked = 1 / every if every else 0.0
        if path != "alltoall":
            return asked
        both = asked / reselect if math.gcd(every, reselect) == 1 else 0.0
        return asked + 1 / reselect - both

    # Collectives -----------------------------------------------------------------------------------------------------

    def _allreduce(self, nbytes: float) -> _Collective:
        return self._collective("allreduce", 2 * self.share * nbytes, 2 * self._doublings)

    def _allgather(self, nbytes: float) -> _Collective:
        return self._collective("allgather", (self.ranks - 1) * nbytes, self._doublings)

    def _alltoall(self, nbytes_to_each: float) -> _Collective:
        return self._collective("alltoall", (self.ranks - 1) * nbytes_to_each, self.ranks - 1)

    def _broadcast(self, nbytes: float) -> _Collective:
        return self._collective("broadcast", self.share * nbytes, self._doublings)

    def _collective(self, kind: str, sent: float, hops: float) -> _Collective:
        link: Link = getattr(self.network, kind)
        return _Collective(kind, sent, link.seconds(sent) + hops * self.network.hop)

    @property
    def _doublings(self) -> float:
        return math.log2(self.ranks)

    def _reduction(self, count: int, exact: bool) -> list[_Collective]:
        """The mean of ``count`` values."""
        if exact:
            return [self._allreduce((count + _RIDERS) * self.wide.itemsize)]
        nbytes = aligned(self.codec.nbytes(-(-count // self.ranks)))
        return [self._alltoall(nbytes + _RIDER_BYTES), self._allgather(nbytes)._replace(late=True)]

    def _everything(self, path: str) -> list[_Collective]:
        """A dense exchange at full width."""
        if path != "alltoall":
            return self._reduction(self.n, exact=True)
        owned = self.n / self.ranks
        return [
            self._alltoall(owned * self.wide.itemsize), self._allgather(_RIDER_BYTES),
            self._allgather(aligned(math.ceil(owned) * global_model_itemsize(self.dtype))),
        ]  # fmt: skip

    def usual(self, path: str) -> list[_Collective]:
        """A round of the path's own kind."""
        if path == "dense":
            return self._reduction(self.n, self.codec.exact)
        ranks, explored, exact = self.ranks, self.explored, self.codec.exact
        pairs = PairFormat(self.codec, self._index_nbytes)
        if path == "allreduce":
            collectives = self._reduction(self.core + explored, exact)
            if self.config.explorer == "leader" and explored:
                # With ``overlap`` the set is told a round ahead, while the round before travels.
                collectives.append(self._broadcast(self._index_nbytes(explored)))
            return collectives
        collectives = self._reduction(self.core, exact)
        if explored and path == "allgather":
            collectives.append(self._allgather(pairs.nbytes(explored)))
        elif explored:
            to_each = -(-explored // ranks)
            collectives.append(self._alltoall(pairs.nbytes(to_each)))
            collectives.append(self._alltoall(aligned(to_each * self.dtype.itemsize))._replace(late=True))
        return collectives
