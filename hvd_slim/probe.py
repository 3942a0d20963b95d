"""A short measurement at the start of a run: what collectives and a rank's own work cost here. Collective.

Every rank measures while the others do the same, so processors that several ranks share show in the numbers. A try
lasts as long as on its slowest rank, as a round does, and of a few tries the middle one counts: what disturbs one of
them is none of the run's. Before each, the processor's caches are filled with something else, as a training step does.
The result is the same on every rank, to the bit.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

from hvd_slim.arena import Arena
from hvd_slim.config import SHARED_EXPLORERS, SlimConfig
from hvd_slim.memory import SWEPT
from hvd_slim.planner import Link, Network, choose, messages, predict
from hvd_slim.rehearsal import rehearse
from hvd_slim.transport.base import Transport

_PHASE = "probe"
_LEAST, _MOST = 64, 2**24  # bytes that a collective brings a rank: all latency, and more than ever shows anything new
# A collective that takes ``_ENOUGH`` seconds shows the bandwidth; ``_SECONDS`` are aimed at. A sender needs so long to
# find out what a link carries: at 50 Mbit/s a transfer of 0.2 s was a quarter slower, byte for byte, than one of 1 s.
_SECONDS, _ENOUGH = 0.4, 0.2
_BUDGET = 2.5  # seconds for all of them; what happens once, a lost packet say, must not hold up the start
_REPEATS, _FEW, _LONG = 3, 2, 0.2  # tries; of what takes long (seconds), few
_NEAR = 1.2  # ratio of two sizes of which one tells the other's time; a library may change its algorithm in between
_FILLS_CACHES = 2**18  # bytes of a collective to which it makes a difference what the caches hold
_ALIKE, _MOST_CALLS = 1.1, 30  # ratio of two times that confirm each other; and when they need not


def measure(transport: Transport, arena: Arena, config: SlimConfig) -> Network:
    """What this run's collectives and own work cost, the same on all ranks. Collective.

    Takes a second or two on a fast network and up to five at 50 Mbit/s or with more ranks than cores; the bytes are
    counted under "probe". Live parameters are not touched.

    Args:
        transport: of the run, at least two ranks.
        arena: the parameters, whose shapes and dtypes own work is tried out on.
        config: the settings.
    """
    sent = messages(arena.n, transport.size, config, _dtype(arena))
    links = _measure_collectives(transport, arena, _kinds_used(config), sent)

    def timed(action: Callable[[], float], alone: bool) -> float:
        mine = action if not alone or transport.rank == 0 else lambda: 0.0
        return _seconds(transport, mine, arena.device, _FEW)[0]

    work = rehearse(arena, config, transport.size, timed)
    # A kind that these settings hardly need was not measured.
    allgather = links.get("allgather", links["allreduce"])
    return Network(
        links["allreduce"], allgather, links.get("alltoall", allgather), links.get("broadcast", allgather), work=work
    )


def choose_path(transport: Transport, arena: Arena, config: SlimConfig) -> tuple[str, str]:
    """(the path to take, why): measured, predicted and chosen, the same on all ranks. Collective."""
    network = measure(transport, arena, config)
    chosen = choose(predict(arena.n, transport.size, config, network, _dtype(arena)))
    # Equal numbers could still be reckoned with differently by unequal machines.
    path, why = json.loads(transport.gather_texts(json.dumps(chosen))[0])
    return path, why


def _dtype(arena: Arena) -> torch.dtype:
    """That most parameters have."""
    return max(arena.groups, key=lambda group: group.stop - group.start).dtype


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


def _measure_collectives(
    transport: Transport, arena: Arena, kinds: tuple[str, ...], sent: dict[str, list[float]]
) -> dict[str, Link]:
    """Every kind at growing sizes, in turn, until it takes long enough to show the bandwidth or is as large as any.

    Args:
        sent: bytes that each rank sends in the run's own collectives, by kind: sizes that are not passed over.
    """
    device, size = arena.device, transport.size
    share = {kind: (size - 1) / size * (2 if kind == "allreduce" else 1) for kind in kinds}
    most = min(max(arena.n * arena.value_dtype.itemsize, 16 * _LEAST), _MOST)
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    sizes = dict.fromkeys(kinds, _LEAST)
    spent = 0.0
    expected = dict.fromkeys(kinds, 0.0)
    while sizes:
        for kind, nbytes in list(sizes.items()):
            step = 4 * size
            nbytes = -(-nbytes // step) * step
            collective = _collective(transport, kind, nbytes, device)
            swept = torch.zeros(SWEPT, dtype=torch.uint8) if nbytes >= _FILLS_CACHES else None
            repeats = _REPEATS if expected[kind] < _LONG else _FEW
            seconds, all_calls = _seconds(transport, _timed_call(collective, device, swept), device, repeats)
            points[kind].append((nbytes * share[kind], seconds))
            spent += all_calls
            if nbytes >= most or seconds >= _ENOUGH or spent > _BUDGET:
                del sizes[kind]
            else:
                # Far at first, from latency to bandwidth; then straight to where it will take long enough.
                own = [wanted / share[kind] for wanted in sent.get(kind, ()) if wanted / share[kind] > nbytes * _NEAR]
                sizes[kind] = int(min([most, nbytes * min(16, max(2, int(_SECONDS / seconds))), *own]))
                expected[kind] = seconds * sizes[kind] / nbytes
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


def _timed_call(action: Callable[[], object], device: torch.device, swept: torch.Tensor | None) -> Callable[[], float]:
    """A call that returns its seconds, with ``swept`` in the caches, what it started on the device included."""

    def call() -> float:
        if swept is not None:
            swept.add_(1)
        begin = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    return call


def _seconds(
    transport: Transport, timed: Callable[[], float], device: torch.device, repeats: int = _REPEATS
) -> tuple[float, float]:
    """(the median time of a few calls, each as long as on its slowest rank; that of all calls together). Collective.

    Called again, if it does not take long, until the least time is not the only one of its kind. Every rank calls
    equally often.

    Args:
        timed: returns the seconds that count.
        repeats: calls at a time.
    """
    times: list[float] = []
    while True:
        seconds = [timed() for _ in range(repeats)]
        raw = torch.tensor(seconds, dtype=torch.float64, device=device).view(torch.uint8)
        of_rank = transport.allgather(raw, _PHASE).wait().cpu().view(torch.float64).view(transport.size, -1)
        times = sorted(times + of_rank.amax(0).tolist())
        if times[1] <= _ALIKE * times[0] or sum(times) > _LONG or len(times) >= _MOST_CALLS:
            return statistics.median_low(times), sum(times)
