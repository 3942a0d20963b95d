"""MPI carries the bytes, through mpi4py: beside Horovod, without waiting for its cycles.

A transport has communicators and a background thread of its own, so two of them never wait for each other.
"""

from __future__ import annotations

import concurrent.futures
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from hvd_slim.noticeboard import Noticeboard
from hvd_slim.stats import Stats
from hvd_slim.transport.base import MESSAGE_LIMIT, Pending, Received, Transport, phase_of
from hvd_slim.transport.horovod import HorovodTransport
from hvd_slim.transport.mpi_environment import MpiTransportError, agree_on_mpi, watch_horovod
from hvd_slim.transport.mpi_progress import Operation, Progress, Steps, end_before_mpi
from hvd_slim.watchdog import StalledError, Watchdog

_SMALL = 2**16  # bytes; below, few messages matter more than few bytes, and a tree's root carries no great load
# Large sums travel in segments, a few at a time: one is added up while others are on their way, in memory that stays in
# the cache and is used again. 100 MB between hosts at 1 Gbit/s, as one / in segments: 2 ranks 1.7 / 1.0 s, 4 ranks
# 2.8 / 1.8 s. In shared memory: 114 / 48 ms and 1.0 / 0.34 s.
_SEGMENT = 2**22  # bytes
_SECONDS_IF_STALLED = 0.5  # for what is in flight to come to its end, once it has been waited for in vain


class MpiTransport(Transport):
    """mpi4py on communicators of the process set's ranks only; host buffers, device tensors through pinned copies.

    Building one is collective and blocks until every rank of the process set takes part; a rank outside counts as
    alone and waits for nobody. Collectives do not block before ``wait()``. A fault in the background thread is raised
    by every ``wait()`` from then on. An allreduce of 64 KiB or more adds in rank order: the same bits in every run.

    Args:
        name: prefix of the names in messages, and of Horovod's operations while building; the same on all ranks.
        process_set: a Horovod process set; None for all ranks.
        stats: where bytes are counted.
        limit: bytes that one collective may carry, summed over ranks.
        warn_after, stall_limit: seconds of waiting for other ranks before a warning, and before ``StalledError``.
        board: where late ranks are asked for; None if they cannot be.

    Raises:
        MpiTransportError: on every rank of the process set, when mpi4py and Horovod do not share an MPI with
            ``THREAD_MULTIPLE`` on every one of them.
    """

    def __init__(
        self, name: str, process_set: Any, stats: Stats, limit: int = MESSAGE_LIMIT, warn_after: float = 10.0,
        stall_limit: float = 300.0, board: Noticeboard | None = None,
    ) -> None:  # fmt: skip
        import horovod.torch as hvd

        # Rank, size and the first agreement are Horovod's: it works whatever is wrong with MPI.
        horovod = HorovodTransport(name, process_set, stats, limit, warn_after, stall_limit, board)
        super().__init__(horovod.rank, horovod.size, stats, limit)
        mpi, world_ranks = agree_on_mpi(hvd, horovod)
        group = mpi.COMM_WORLD.Get_group().Incl(world_ranks)
        first = mpi.COMM_WORLD.Create_group(group)
        second = first.Dup()
        for communicator in (first, second):
            communicator.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py raises what is returned
        self._watchdog = Watchdog(self.rank, warn_after, stall_limit, name, board)
        self._name, self._mpi = name, mpi
        self._first, self._second = first, second
        self._closed = False
        self._horovod_runs = watch_horovod(hvd)
        self._progress = Progress(f"rank {self.rank}, {name}", self._horovod_runs)
        self._end_with_self = weakref.finalize(self, self._progress.stop, wait=False)
        self._end_with_self.atexit = False  # then end_before_mpi has it done, while Horovod and MPI still run
        end_before_mpi(mpi, self._progress)

    def enter_round(self, round_number: int) -> None:
        """A new round begins on this rank. Not collective."""
        self._watchdog.round_number = round_number

    def close(self) -> None:
        """End the thread, in a few seconds at most. Not collective.

        Never required: the thread also ends with the transport and with the process. The communicators stay until
        MPI_Finalize, because freeing one is collective.
        """
        self._closed = True
        self._progress.stop()

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order; lengths may differ. Collective, blocking, not counted."""
        data = np.frombuffer(text.encode(), dtype=np.uint8)
        size, first, second, byte = self.size, self._first, self._second, self._mpi.BYTE

        def steps() -> Steps:
            lengths = np.empty(size, dtype=np.int64)
            yield first.Iallgather(np.array([data.size]), lengths)
            gathered = np.empty(lengths.sum(), dtype=np.uint8)
            yield second.Iallgatherv([data, byte], [gathered, lengths.tolist(), byte])
            return [bytes(part).decode() for part in np.split(gathered, lengths.cumsum()[:-1])]

        return self._result(self._launch("agreement", steps()), "agreement")

    def _allreduce(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"rank {self.rank}: {name} sums float32 and float64, not {tensor.dtype}; widen it first")
        buffer = _HostBuffer(tensor)
        if tensor.nbytes < _SMALL:
            sums = [self._sum_by_tree(buffer.array)]
        else:
            segments = -(-tensor.nbytes // max(_SEGMENT, self.size * _SMALL))
            sums = [self._sum_by_slices(segment) for segment in np.array_split(buffer.array, segments)]
        futures = [self._launch(name, steps, buffer.filled) for steps in sums]

        def wait() -> torch.Tensor:
            for future in futures:
                self._result(future, name)
            return buffer.write_back()

        return Pending(wait)

    def _sum_by_tree(self, array: np.ndarray[Any, Any]) -> Steps:
        yield self._first.Iallreduce(self._mpi.IN_PLACE, array)

    def _sum_by_slices(self, array: np.ndarray[Any, Any]) -> Steps:
        """Each rank adds up one slice and gives it to the others: 2(K−1)/K of the bytes on every rank, as a ring.

        Open MPI's Iallreduce in place is a binomial tree, whose root carries log2 K times the bytes either way: 100 MB
        between hosts at 1 Gbit/s take 2.4 s with 2 ranks, 4.6 s with 4.
        """
        size, rank = self.size, self.rank
        real = self._mpi.FLOAT if array.itemsize == 4 else self._mpi.DOUBLE
        bounds = [array.size * slice_ // size for slice_ in range(size + 1)]
        counts = [end - begin for begin, end in zip(bounds, bounds[1:])]
        own = array[bounds[rank] : bounds[rank + 1]]
        parts = np.empty((size, own.size), dtype=array.dtype)
        yield self._first.Ialltoallv([array, counts, real], [parts, [own.size] * size, real])
        np.copyto(own, parts[0])
        for part in parts[1:]:
            np.add(own, part, out=own)
        del parts
        yield self._second.Iallgatherv(self._mpi.IN_PLACE, [array, counts, real])

    def _allgather(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        buffer = _HostBuffer(tensor)
        first, size, byte = self._first, self.size, self._mpi.BYTE

        def steps() -> Steps:
            gathered = buffer.another(size * tensor.nbytes)
            yield first.Iallgather([buffer.array, byte], [gathered.numpy(), byte])
            return gathered

        future = self._launch(name, steps(), buffer.filled)
        return Pending(lambda: buffer.to_device(self._result(future, name)))

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Pending[torch.Tensor]:
        buffer = _HostBuffer(tensor)
        first, second, byte = self._first, self._second, self._mpi.BYTE

        def steps() -> Steps:
            yield first.Ibcast([buffer.array.view(np.uint8), byte], root)
            # The root could go on, and end Horovod, before the others take part; no other collective allows that.
            yield second.Ibarrier()

        future = self._launch(name, steps(), buffer.filled)

        def wait() -> torch.Tensor:
            self._result(future, name)
            return buffer.write_back()

        return Pending(wait)

    def _alltoall(self, tensor: torch.Tensor, counts: list[int], name: str) -> Pending[Received]:
        buffer = _HostBuffer(tensor)
        first, second, byte = self._first, self._second, self._mpi.BYTE

        def steps() -> Steps:
            lengths = np.empty(len(counts), dtype=np.int64)
            yield first.Ialltoall(np.array(counts, dtype=np.int64), lengths)
            received = lengths.tolist()
            messages = buffer.another(sum(received))
            yield second.Ialltoallv([buffer.array, counts, byte], [messages.numpy(), received, byte])
            return messages, received

        future = self._launch(name, steps(), buffer.filled)

        def wait() -> Received:
            messages, received = self._result(future, name)
            return buffer.to_device(messages), received

        return Pending(wait)

    def _launch(self, name: str, steps: Steps, ready: Callable[[], bool] = lambda: True) -> Future[Any]:
        operation = Operation(f"{self._name}.{name}", steps, ready)
        self._progress.launch(operation)
        return operation.future

    def _result(self, future: Future[Any], name: str) -> Any:
        try:
            self._watchdog.wait(lambda: _is_done(future), phase_of(name))
        except StalledError:
            self._progress.seconds_to_drain = _SECONDS_IF_STALLED
            raise
        try:
            return future.result()
        except MpiTransportError as error:
            if self._horovod_runs() or self._closed:
                raise
            raise MpiTransportError(self._watchdog.obituary(phase_of(name), error)) from error


def _is_done(future: Future[Any]) -> bool:
    """Whether it is, as soon as it is, or after a while."""
    try:
        future.exception(timeout=0.1)
    except concurrent.futures.TimeoutError:
        return False
    return True


class _HostBuffer:
    """A tensor's elements in host memory, for MPI: the tensor's own, or a pinned copy that its stream fills.

    Attributes:
        array: NumPy view of the host memory.
        filled: whether the copy is complete; never blocks.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = self._host = tensor.detach()
        self.filled: Callable[[], bool] = lambda: True
        self._pinned = tensor.device.type != "cpu"
        if self._pinned:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            with torch.cuda.device(tensor.device):
                self._host.copy_(self._tensor, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record()
            self.filled = copied.query
        self.array: np.ndarray[Any, Any] = self._host.numpy()

    def another(self, length: int) -> torch.Tensor:
        """Uninitialised bytes (uint8) in the same kind of memory."""
        return torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """A host tensor where the tensor lives, in the order of its stream."""
        return host.to(self._tensor.device, non_blocking=True)

    def write_back(self) -> torch.Tensor:
        """The tensor, with what the host memory holds now, in the order of its stream."""
        return self._tensor.copy_(self._host, non_blocking=True) if self._pinned else self._tensor
