"""One rank of K by itself: what it received from the others is recorded once, and played back while it is watched."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_slim.stats import Stats
from hvd_slim.transport.base import MESSAGE_LIMIT, Pending, Received, Transport
from unit.simulated import Meeting, SimulatedTransport

_MOST_OPERATORS = 1 << 20
_MARK = 104_729  # bytes; no other tensor here is as long


class RecordingTransport(SimulatedTransport):
    """Keeps what every collective gave this rank, in the order of launches."""

    def __init__(self, meeting: Meeting, rank: int, limit: int = MESSAGE_LIMIT) -> None:
        super().__init__(meeting, rank, limit)
        self.received: list[Any] = []

    def _recorded(self, pending: Pending[Any]) -> Pending[Any]:
        number = len(self.received)
        self.received.append(None)

        def wait() -> Any:
            result = pending.wait()
            self.received[number] = (result[0].clone(), result[1]) if isinstance(result, tuple) else result.clone()
            return result

        return Pending(wait)

    def _allreduce(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return self._recorded(super()._allreduce(tensor, name))

    def _allgather(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return self._recorded(super()._allgather(tensor, name))

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Pending[torch.Tensor]:
        return self._recorded(super()._broadcast(tensor, root, name))

    def _alltoall(self, tensor: torch.Tensor, counts: list[int], name: str) -> Pending[Received]:
        return self._recorded(super()._alltoall(tensor, counts, name))

    def gather_texts(self, text: str) -> list[str]:
        """As among the threads."""
        texts = super().gather_texts(text)
        self.received.append(texts)
        return texts


class ReplayingTransport(Transport):
    """Gives one rank again what it was recorded to receive, each result in memory of its own."""

    def __init__(self, recorded: RecordingTransport) -> None:
        super().__init__(recorded.rank, recorded.size, Stats(), recorded.limit)
        self._results: Iterator[Any] = iter(recorded.received)

    def _in_place(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        result = next(self._results)
        return Pending(lambda: tensor.copy_(result))

    def _allreduce(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return self._in_place(tensor)

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Pending[torch.Tensor]:
        return self._in_place(tensor)

    def _allgather(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return _arriving(tensor, next(self._results))

    def _alltoall(self, tensor: torch.Tensor, counts: list[int], name: str) -> Pending[Received]:
        data, received = next(self._results)
        arriving = _arriving(tensor, data)
        return Pending(lambda: (arriving.wait(), received))

    def gather_texts(self, text: str) -> list[str]:
        """What was recorded."""
        return next(self._results)


def _arriving(sent: torch.Tensor, result: torch.Tensor) -> Pending[torch.Tensor]:
    """A copy of ``result``, to come. What is sent stays until then."""
    sending = [sent]

    def wait() -> torch.Tensor:
        arrived = result.clone()
        sending.clear()
        return arrived

    return Pending(wait)


class _NumpyWatch(TorchDispatchMode):
    """NumPy's arrays: their highest level between one torch operator and the next.

    A tensor of ``_MARK`` bytes, made and dropped, shows in the profiler's account where each of these intervals ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._levels = np.zeros(_MOST_OPERATORS, dtype=np.int64)  # made here, so as not to count itself
        self._count = 0

    @property
    def levels(self) -> np.ndarray:
        """Bytes, shape (intervals,)."""
        return self._levels[: self._count]

    def look(self) -> None:
        """End an interval."""
        self._levels[self._count] = tracemalloc.get_traced_memory()[1]
        self._count += 1
        torch.empty(_MARK, dtype=torch.uint8)
        tracemalloc.reset_peak()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        return function(*args, **(kwargs or {}))


def peak_memory(action: Callable[[], object]) -> int:
    """Bytes that ``action`` needs at most beyond what was there before: torch's CPU tensors and NumPy's arrays.

    torch reports every allocation, also those inside of operators. What NumPy holds is looked at from operator to
    operator.
    """
    watch = _NumpyWatch()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        with watch:
            action()
        watch.look()
        tracemalloc.stop()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = level = interval = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.nbytes() == _MARK:
            interval += 1
        elif event.nbytes() != -_MARK:
            level += event.nbytes()
            peak = max(peak, level + int(watch.levels[interval]) - before)
    assert interval == len(watch.levels)
    return peak
