"""A short measurement at the start of a run: what collectives and a rank's own work cost here. Collective.

Every rank measures while the others do the same, so processors that several ranks share, or that wait busily, show in
the numbers. The result is the same on every rank, to the bit.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

from hvd_slim import significance
from hvd_slim.arena import Arena
from hvd_slim.chunks import indices_of
from hvd_slim.config import SHARED_EXPLORERS, SlimConfig
from hvd_slim.explorer import EXPLORERS
from hvd_slim.global_model import GlobalModel
from hvd_slim.planner import Link, Network, choose, predict
from hvd_slim.transport.base import Transport
from hvd_slim.values import make_codec

_PHASE = "probe"
_LEAST, _MOST = 64, 2**24  # bytes that a collective brings a rank: all latency, and more than ever shows anything new
_SECONDS, _BYTES = 0.04, 2**19  # a collective of that size that takes as long shows the bandwidth,
_LONG = 0.15  # and so does any that takes as long as this
_BUDGET = 2.5  # seconds for all of them; what happens once, a lost packet say, must not hold up the start
_REPEATS = 3
_MOST_REPEATS, _LONG_ENOUGH = 15, 0.01  # of short work, and its seconds in all
_SAMPLE = 2**23  # parameters on which own work is tried out


def measure(transport: Transport, arena: Arena, config: SlimConfig) -> Network:
    """What this run's collectives and own work cost, the same on all ranks. Collective.

    Takes about half a second on a fast network and up to three seconds at 50 Mbit/s; the bytes are counted under
    "probe". Live parameters are not touched.

    Args:
        transport: of the run, at least two ranks.
        arena: the parameters, whose shapes and dtypes own work is tried out on.
        config: the settings.
    """
    links = _measure_collectives(transport, arena, _kinds_used(config))
    transport.allgather(torch.zeros(8, dtype=torch.uint8, device=arena.device), _PHASE).wait()  # all begin together
    work = measure_work(arena, config, transport.size)
    of_rank = [json.loads(text) for text in transport.gather_texts(json.dumps(work))]
    # A round lasts as long as its slowest rank; a time that was spoilt once counts on none.
    units = {unit: max(rank[unit] for rank in of_rank) for unit in work}
    # A kind that these settings hardly need was not measured.
    allgather = links.get("allgather", links["allreduce"])
    return Network(
        links["allreduce"], allgather, links.get("alltoall", allgather), links.get("broadcast", allgather), **units
    )


def choose_path(transport: Transport, arena: Arena, config: SlimConfig) -> tuple[str, str]:
    """(the path to take, why): measured, predicted and chosen, the same on all ranks. Collective."""
    network = measure(transport, arena, config)
    dtype = max(arena.groups, key=lambda group: group.stop - group.start).dtype
    chosen = choose(predict(arena.n, transport.size, config, network, dtype))
    # Equal numbers could still be reckoned with differently by unequal machines.
    path, why = json.loads(transport.gather_texts(json.dumps(chosen))[0])
    return path, why


# Collectives ---------------------------------------------------------------------------------------------------------


def _kinds_used(config: SlimConfig) -> tuple[str, ...]:
    """The collectives that a round of these settings may be made of; not those that only choose a core."""
    private = config.explorer not in SHARED_EXPLORERS
    kinds = ["allreduce"]
    if private or config.value_dtype != "float32":
        kinds += ["allgather", "alltoall"]
    if config.explorer == "leader":
        kinds.append("broadcast")
    return tuple(kinds)


def _measure_collectives(transport: Transport, arena: Arena, kinds: tuple[str, ...]) -> dict[str, Link]:
    """Every kind at growing sizes, in turn, until it takes long enough to show the bandwidth."""
    device, size = arena.device, transport.size
    share = (size - 1) / size
    most = min(max(arena.n * arena.value_dtype.itemsize, 16 * _LEAST), _MOST)
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    sizes = dict.fromkeys(kinds, _LEAST)
    spent = 0.0
    while sizes:
        for kind, nbytes in list(sizes.items()):
            step = 4 * size
            nbytes = -(-nbytes // step) * step
            action = _collective(transport, kind, nbytes, device)
            # Every rank has to call it equally often.
            times = [_once(action, device, time.perf_counter) for _ in range(_REPEATS)]
            median, total = _slowest(transport, [statistics.median(times), sum(times)], device)
            points[kind].append((nbytes * share * (2 if kind == "allreduce" else 1), median))
            spent += total
            if nbytes >= most or (median >= _SECONDS and nbytes >= _BYTES) or median >= _LONG or spent > _BUDGET:
                del sizes[kind]
            else:
                # Far at first, from latency to bandwidth; then straight to where it will take long enough.
                sizes[kind] = min(most, nbytes * min(64, max(2, int(_SECONDS / median))))
    return {kind: Link(_growing(of_kind)) for kind, of_kind in points.items()}


def _collective(transport: Transport, kind: str, nbytes: int, device: torch.device) -> Callable[[], object]:
    """A blocking call of a collective that brings each rank ``nbytes``, its own among them."""
    size = transport.size
    if kind == "allreduce":
        values = torch.zeros(nbytes // 4, device=device)
        return lambda: transport.allreduce(values, _PHASE).wait()
    if kind == "allgather":
        part = torch.zeros(nbytes // size, dtype=torch.uint8, device=device)
        return lambda: transport.allgather(part, _PHASE).wait()
    raw = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if kind == "alltoall":
        return lambda: transport.alltoall(raw, [nbytes // size] * size, nbytes, _PHASE).wait()
    return lambda: transport.broadcast(raw, 0, _PHASE).wait()


def _growing(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points without delays that more bytes did not have: nothing is slower than something larger."""
    least, growing = float("inf"), []
    for nbytes, seconds in reversed(points):
        least = min(least, seconds)
        growing.append((nbytes, least))
    return tuple(reversed(growing))


def _once(action: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of one call, what it started on the device included."""
    begin = clock()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begin


def _slowest(transport: Transport, seconds: list[float], device: torch.device) -> list[float]:
    """Of each time the longest of any rank. Collective."""
    raw = torch.tensor(seconds, dtype=torch.float64, device=device).view(torch.uint8)
    return transport.allgather(raw, _PHASE).wait().view(torch.float64).view(-1, len(seconds)).amax(0).tolist()


# Own work ------------------------------------------------------------------------------------------------------------


def _timed(action: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Median seconds of a few calls, more if they are short, after one that does not count."""
    _once(action, device, clock)
    times: list[float] = []
    while len(times) < _REPEATS or (len(times) < _MOST_REPEATS and sum(times) < _LONG_ENOUGH):
        times.append(_once(action, device, clock))
    return statistics.median(times)


def measure_work(
    arena: Arena, config: SlimConfig, size: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of a rank's own work by unit: ``stream`` to ``code`` of ``Network``.

    Tried out on zeros in the shapes of the first parameters, with the functions that a round is made of.
    """
    sample = Arena(_like(arena))
    model, device, dtype, n = GlobalModel(sample), sample.device, sample.value_dtype, sample.n
    core, explored = config.core_count(n), config.explorer_count(n)

    def stream() -> None:
        update = model.pending_update_everywhere(torch.zeros(n, dtype=dtype, device=device))
        model.absorb_everywhere(update.div_(size))
        model.settle_everywhere()

    def trip(count: int) -> Callable[[], None]:
        coordinates = torch.arange(count, device=device) * n // count
        where = sample.locate(coordinates.to(torch.int32))
        update = torch.zeros(count, dtype=dtype, device=device)

        def touch() -> None:
            model.pending_update(where, update)
            model.absorb(where, update.div_(size))
            model.settle(where)

        return touch

    stratified = config.explorer if config.explorer not in ("greedy", "leader") else "random"
    explorer = EXPLORERS[stratified](n, max(explored, 1), config.seed, size, device)
    outside = torch.arange(n, dtype=torch.int32, device=device)
    noise = torch.rand(n, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    codec = make_codec(config.value_dtype, dtype, config.rounding, config.seed)
    message = torch.zeros(codec.nbytes(n), dtype=torch.uint8, device=device)

    def draw() -> None:
        sample.locate(outside.index_select(0, explorer.draw(0, 0).positions))

    def scan() -> None:
        model.pending_update_everywhere(torch.empty(n, dtype=dtype, device=device)).abs_()
        indices_of(significance.top_mask(noise, core))

    def code() -> None:
        codec.encode(noise, message, 0, 0)
        codec.decode(message, n)

    few = min(core, len(sample.groups[0].segments))
    trip_seconds = _timed(trip(few), device, clock)
    return {
        "stream": _timed(stream, device, clock) / n,
        "touch": max(_timed(trip(core), device, clock) - trip_seconds, 0.0) / core,
        "trip": trip_seconds,
        "draw": _timed(draw, device, clock) / max(explored, 1),
        "scan": _timed(scan, device, clock) / n,
        "code": 0.0 if codec.exact else _timed(code, device, clock) / n,
    }


def _like(arena: Arena) -> list[tuple[str, torch.Tensor]]:
    """Zeros in the shapes, dtypes and places of the first parameters; the last one cut off."""
    named, left = [], _SAMPLE
    for segment in arena.segments():
        if segment.real.numel() > left:
            named.append((segment.name, torch.zeros(left, dtype=segment.real.dtype, device=segment.real.device)))
            break
        named.append((segment.name, torch.zeros_like(segment.real)))
        left -= segment.real.numel()
    return named
