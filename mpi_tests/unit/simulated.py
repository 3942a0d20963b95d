"""K ranks in one process: each rank a thread, and a transport that carries bytes through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hvd_slim.stats import Stats
from hvd_slim.transport.base import MESSAGE_LIMIT, Pending, Received, Transport

Result = TypeVar("Result")

_SECONDS = 120  # a rank that waits longer waits in vain


class Meeting:
    """Where K threads hand each other what they bring: ``exchange`` gives everybody the list of all.

    Between two exchanges the threads run one at a time: many that want Python's lock spend their time on it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()  # held by the thread that runs
        self._barrier = threading.Barrier(size)
        self._brought: list[list[Any]] = [[None] * size for _ in range(2)]
        self._turns = [0] * size

    def exchange(self, rank: int, item: Any) -> list[Any]:
        """Blocks until every rank has come. Two tables in turn, so that nobody overwrites what another still reads."""
        table = self._brought[self._turns[rank] % 2]
        self._turns[rank] += 1
        table[rank] = item
        self.turn.release()
        try:
            self._barrier.wait(_SECONDS)
        finally:
            self.turn.acquire()
        return list(table)

    def abandon(self) -> None:
        """Release whoever waits, with an error."""
        self._barrier.abort()


class SimulatedTransport(Transport):
    """Collectives among the threads of one meeting. Sums are taken in rank order; results have memory of their own.

    What is sent is copied when it is launched, and arrives when it is waited for, in the order of launches.
    """

    def __init__(self, meeting: Meeting, rank: int, limit: int = MESSAGE_LIMIT) -> None:
        super().__init__(rank, meeting.size, Stats(), limit)
        self._meeting = meeting

    def _all(self, item: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, item)

    def _allreduce(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        tensors = self._all(tensor.clone())

        def wait() -> torch.Tensor:
            tensor.copy_(tensors[0])
            for other in tensors[1:]:
                tensor.add_(other)
            return tensor

        return Pending(wait)

    def _allgather(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        tensors = self._all(tensor.clone())
        return Pending(lambda: torch.stack(tensors))

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Pending[torch.Tensor]:
        source = self._all(tensor.clone() if self.rank == root else None)[root]
        return Pending(lambda: tensor.copy_(source))

    def _alltoall(self, tensor: torch.Tensor, counts: list[int], name: str) -> Pending[Received]:
        mine = [parts[self.rank] for parts in self._all(tensor.clone().split(counts))]
        return Pending(lambda: (torch.cat(mine), [part.numel() for part in mine]))

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        return self._all(text)


def on_all_ranks(size: int, action: Callable[[SimulatedTransport], Result], limit: int = MESSAGE_LIMIT) -> list[Result]:
    """``action`` on ``size`` ranks at once: what it returned on each. The first error of any rank is raised."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with meeting.turn:
                results[rank] = action(SimulatedTransport(meeting, rank, limit))
        except BaseException as error:  # noqa: BLE001  (raised again in the thread that asked)
            errors.append(error)
            meeting.abandon()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results
