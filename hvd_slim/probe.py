"""A short measurement at the start of a run: what collectives and a rank's own work cost here. Collective.

Every rank measures while the others do the same, so processors that several ranks share show in the numbers. Of a few
tries the middle one counts: what disturbs one of them is none of the run's. Before each, the processor's caches are
filled with something else, as a training step does. The result is the same on every rank, to the bit.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

from hvd_slim import significance
from hvd_slim.arena import Arena
from hvd_slim.chunks import index_dtype
from hvd_slim.config import SHARED_EXPLORERS, SlimConfig
from hvd_slim.explorer import EXPLORERS
from hvd_slim.global_model import GlobalModel
from hvd_slim.memory import PROBED, SWEPT
from hvd_slim.planner import Link, Network, choose, predict
from hvd_slim.transport.base import Transport
from hvd_slim.values import ValueCodec, make_codec

_PHASE = "probe"
_LEAST, _MOST = 64, 2**24  # bytes that a collective brings a rank: all latency, and more than ever shows anything new
_SECONDS, _BYTES = 0.04, 2**19  # a collective of that size that takes as long shows the bandwidth,
_LONG = 0.15  # and so does any that takes as long as this
_BUDGET = 2.5  # seconds for all of them; what happens once, a lost packet say, must not hold up the start
_REPEATS = 3
_FILLS_CACHES = 2**18  # bytes of a collective to which it makes a difference what the caches hold
_ALIKE, _MOST_CALLS = 1.1, 30  # ratio of two times that confirm each other; and when they need not
_MOST_REPEATS, _SHORT_WORK, _LONG_WORK = 10, 0.01, 0.05  # short work is tried more often (seconds in all), long once


def measure(transport: Transport, arena: Arena, config: SlimConfig) -> Network:
    """What this run's collectives and own work cost, the same on all ranks. Collective.

    Takes half a second to two on a fast network and up to five at 50 Mbit/s or with more ranks than cores; the bytes
    are counted under "probe". Live parameters are not touched.

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
            collective = _collective(transport, kind, nbytes, device)
            seconds, all_calls = _seconds(transport, collective, device, _caches() if nbytes >= _FILLS_CACHES else None)
            points[kind].append((nbytes * share * (2 if kind == "allreduce" else 1), seconds))
            spent += all_calls
            if nbytes >= most or (seconds >= _SECONDS and nbytes >= _BYTES) or seconds >= _LONG or spent > _BUDGET:
                del sizes[kind]
            else:
                # Far at first, from latency to bandwidth; then straight to where it will take long enough.
                sizes[kind] = min(most, nbytes * min(64, max(2, int(_SECONDS / seconds))))
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


def _once(
    action: Callable[[], object], device: torch.device, clock: Callable[[], float], swept: torch.Tensor | None
) -> float:
    """Seconds of one call with ``swept`` in the caches, what it started on the device included."""
    if swept is not None:
        swept.add_(1)
    begin = clock()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begin


def _seconds(
    transport: Transport, action: Callable[[], object], device: torch.device, swept: torch.Tensor | None
) -> tuple[float, float]:
    """(the median time of a few calls, on the rank where it is longest; that of all calls together). Collective.

    Called again, if it does not take long, until the least time is not the only one of its kind. Every rank calls
    equally often.
    """
    of_rank = torch.empty(transport.size, 0, dtype=torch.float64)
    while True:
        seconds = [_once(action, device, time.perf_counter, swept) for _ in range(_REPEATS)]
        raw = torch.tensor(seconds, dtype=torch.float64, device=device).view(torch.uint8)
        rows = transport.allgather(raw, _PHASE).wait().cpu().view(torch.float64).view(transport.size, -1)
        of_rank = torch.cat([of_rank, rows], dim=1).sort(dim=1).values
        (least, second), total = of_rank.amax(0)[:2].tolist(), float(of_rank.sum(1).max())
        if second <= _ALIKE * least or total > _LONG or of_rank.size(1) >= _MOST_CALLS:
            return float(of_rank.median(1).values.max()), total


def _caches() -> torch.Tensor:
    """As many bytes as a processor's caches hold."""
    return torch.zeros(SWEPT, dtype=torch.uint8)


# Own work ------------------------------------------------------------------------------------------------------------


def _timed(action: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Median seconds of a few calls, more if they are short; the first counts only if it is long."""
    swept = _caches()
    first = _once(action, device, clock, swept)
    times, least = ([first], 2) if first > _LONG_WORK else ([], _REPEATS)
    while len(times) < least or (len(times) < _MOST_REPEATS and sum(times) < _SHORT_WORK):
        times.append(_once(action, device, clock, swept))
    return statistics.median_low(times)


def measure_work(
    arena: Arena, config: SlimConfig, size: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of a rank's own work by unit: ``stream`` to ``code`` of ``Network``.

    Tried out on zeros in the shapes of the first parameters, with the functions that a round is made of.
    """
    sample = Arena(_like(arena))
    model, device, dtype, n = GlobalModel(sample), sample.device, sample.value_dtype, sample.n
    core, explored = config.core_count(n), max(config.explorer_count(n), 1)

    def timed(action: Callable[[], object]) -> float:
        return _timed(action, device, clock)

    few = min(core, sum(len(group.segments) for group in sample.groups))
    trip = timed(_trip(model, few, size))
    units = {
        "stream": timed(lambda: _stream(model, size)) / n,
        "touch": max(timed(_trip(model, core, size)) - trip, 0.0) / core,
        "trip": trip,
        "draw": timed(_draw(sample, explored, config, size)) / explored,
    }
    noise = torch.rand(n, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    units["scan"] = timed(lambda: _scan(model, noise, core)) / n
    codec = make_codec(config.value_dtype, dtype, config.rounding, config.seed)
    units["code"] = 0.0 if codec.exact else timed(_code(codec, noise)) / n
    return units


def _stream(model: GlobalModel, size: int) -> None:
    update = torch.zeros(model.arena.n, dtype=model.arena.value_dtype, device=model.arena.device)
    model.pending_update_everywhere(update)
    model.absorb_everywhere(update.div_(size))
    model.settle_everywhere()


def _trip(model: GlobalModel, count: int, size: int) -> Callable[[], None]:
    arena = model.arena
    spread = torch.arange(count, device=arena.device) * arena.n // count
    where = arena.locate(spread.to(index_dtype(arena.n)))
    update = torch.zeros(count, dtype=arena.value_dtype, device=arena.device)

    def touch() -> None:
        model.pending_update(where, update)
        model.absorb(where, update.div_(size))
        model.settle(where)

    return touch


def _draw(arena: Arena, count: int, config: SlimConfig, size: int) -> Callable[[], object]:
    # The greatest pending updates are not drawn but found: ``scan``.
    kind = "random" if config.explorer in ("greedy", "leader") else config.explorer
    explorer = EXPLORERS[kind](arena.n, count, config.seed, size, arena.device)
    outside = torch.arange(arena.n, dtype=index_dtype(arena.n), device=arena.device)
    return lambda: arena.locate(outside.index_select(0, explorer.draw(0, 0).positions))


def _scan(model: GlobalModel, noise: torch.Tensor, count: int) -> None:
    model.magnitude_everywhere()
    significance.top_coordinates(noise, count)


def _code(codec: ValueCodec, values: torch.Tensor) -> Callable[[], None]:
    message = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device)

    def code() -> None:
        codec.encode(values, message, 0, 0)
        codec.decode(message, values.numel())

    return code


def _like(arena: Arena) -> list[tuple[str, torch.Tensor]]:
    """Zeros in the shapes, dtypes and places of the first parameters; the last one cut off."""
    named, left = [], PROBED
    for segment in arena.segments():
        if segment.real.numel() > left:
            named.append((segment.name, torch.zeros(left, dtype=segment.real.dtype, device=segment.real.device)))
            break
        named.append((segment.name, torch.zeros_like(segment.real)))
        left -= segment.real.numel()
    return named
