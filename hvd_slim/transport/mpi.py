"""MPI carries the bytes, through mpi4py: beside Horovod, without waiting for its cycles.

A transport has communicators and a background thread of its own, so two of them never wait for each other. The thread
starts collectives in the order launched, which is the same on every rank, and sleeps between looks at them.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvd_slim.noticeboard import Noticeboard
from hvd_slim.stats import Stats
from hvd_slim.transport.base import MESSAGE_LIMIT, Pending, Received, Transport, phase_of
from hvd_slim.transport.horovod import HorovodTransport
from hvd_slim.transport.mpi_environment import MpiTransportError, agree_on_mpi, before_mpi_ends, watch_horovod
from hvd_slim.watchdog import StalledError, Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

# A collective of at most two MPI operations, one on either communicator: yields each one's request, returns the result.
Steps = Generator["MPI.Request", None, Any]

_SMALL = 2**16  # bytes; below, few messages matter more than few bytes, and a tree's root carries no great load
# Large sums travel in segments, a few at a time: one is added up while others are on their way, in memory that stays in
# the cache and is used again. 100 MB between hosts at 1 Gbit/s, as one / in segments: 2 ranks 1.7 / 1.0 s, 4 ranks
# 2.8 / 1.8 s. In shared memory: 114 / 48 ms and 1.0 / 0.34 s.
_SEGMENT = 2**22  # bytes
_MOST_STARTED = 4  # collectives
_SHORTEST_SLEEP, _LONGEST_SLEEP = 2e-5, 5e-4  # seconds; doubled as long as nothing moves
_SECONDS_TO_LOOK_AROUND = 1.0  # between questions whether the other ranks are still there
_SECONDS_TO_DRAIN = 5.0  # for what is in flight when this rank or another one ends: it may be all but complete
_SECONDS_IF_STALLED = 0.5  # for the same, once it has been waited for in vain

_CLOSED = "the transport is closed: another rank or this one ended (see the first error), or called hvd.shutdown()"


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
        self._progress = _Progress(f"rank {self.rank}, {name}", self._horovod_runs)
        self._end_with_self = weakref.finalize(self, self._progress.stop, wait=False)
        self._end_with_self.atexit = False  # then _end_all does it, while Horovod and MPI still run
        _end_before_mpi(mpi, self._progress)

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
        operation = _Operation(f"{self._name}.{name}", steps, ready)
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


class _Operation:
    """One collective on its way: not started (stage 0), its first MPI operation (1), its second (2), complete (3)."""

    def __init__(self, name: str, steps: Steps, ready: Callable[[], bool]) -> None:
        self.name, self.stage = name, 0
        self.future: Future[Any] = Future()
        self._steps, self._ready = steps, ready
        self._request: MPI.Request | None = None

    def passes_stage(self) -> bool:
        """Go on to the next stage, if nothing stands in the way."""
        try:
            if not (self._ready() if self._request is None else self._request.Test()):
                return False
            self._request = next(self._steps)
            self.stage += 1
        except StopIteration as end:
            self.stage = 3
            self.future.set_result(end.value)
        except Exception as error:
            raise RuntimeError(f"{self.name}: {error}") from error
        return True


class _Progress:
    """The background thread of one transport; started by the first collective, asleep while there is none.

    Args:
        whose: rank and transport, for messages.
        horovod_runs: whether it has not been shut down, here or by a rank that ended; never blocks.

    Attributes:
        seconds_to_drain: left to what is in flight at the end.
    """

    def __init__(self, whose: str, horovod_runs: Callable[[], bool]) -> None:
        self._whose, self._horovod_runs = whose, horovod_runs
        self.seconds_to_drain = _SECONDS_TO_DRAIN
        self._process = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may call stop() anywhere
        self._launched: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._unfinished: list[_Operation] = []  # the thread's own, in the order launched
        self._thread: threading.Thread | None = None
        self._failure: MpiTransportError | None = None
        self._deadline: float | None = None  # once it is to end

    def launch(self, operation: _Operation) -> None:
        """Start the collective after those launched before it. Its future gets the result or an error, always."""
        if os.getpid() != self._process:
            raise MpiTransportError(f"{self._whose}: MPI cannot be used in a forked process; exchange in its parent")
        with self._lock:
            if self._failure is not None:
                operation.future.set_exception(self._failure)
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hvd_slim mpi", daemon=True)
                self._thread.start()
            self._launched.put(operation)

    def stop(self, wait: bool = True) -> None:
        """End the thread as soon as nothing is in flight, and after a few seconds in any case."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._deadline = self._deadline or time.monotonic() + self.seconds_to_drain
            thread = self._thread
        if thread is None:
            self._end(_CLOSED)
            return
        self._launched.put(None)
        if wait:
            thread.join()

    def _work(self) -> None:
        try:
            self._carry()
        except Exception as error:  # whatever it is, the trainer has to see it
            self._end(str(error), error.__cause__ or error)
        else:
            self._end(_CLOSED)

    def _carry(self) -> None:
        sleep: float | None = None  # until something is launched
        looked_at = 0.0
        while True:
            self._take(sleep)
            moved = self._go_on()
            now = time.monotonic()
            idle = not self._unfinished and self._launched.empty()
            if self._deadline is not None and (now >= self._deadline or idle):
                return
            if not self._unfinished:
                sleep = None
            elif moved or sleep is None:
                sleep = _SHORTEST_SLEEP
            elif now - looked_at < _SECONDS_TO_LOOK_AROUND:
                sleep = min(2 * sleep, _LONGEST_SLEEP)
            else:
                looked_at = now
                if self._deadline is None and not self._horovod_runs():
                    self._deadline = now + self.seconds_to_drain

    def _take(self, sleep: float | None) -> None:
        """Take what was launched, after at most ``sleep`` seconds without anything (None: without end)."""
        try:
            operation = self._launched.get(timeout=sleep)
            while True:
                if operation is not None:
                    self._unfinished.append(operation)
                operation = self._launched.get_nowait()
        except queue.Empty:
            return

    def _go_on(self) -> bool:
        """Let collectives pass stages, each only after those launched before it: in one order on all ranks."""
        moved, earlier = False, 3
        for operation in self._unfinished[:_MOST_STARTED]:
            while operation.stage < earlier and operation.passes_stage():
                moved = True
            earlier = min(earlier, operation.stage)
        if moved:
            self._unfinished = [operation for operation in self._unfinished if operation.stage < 3]
        return moved

    def _end(self, reason: str, cause: BaseException | None = None) -> None:
        """What is left fails, and so does whatever is launched from now on. The first reason stays."""
        with self._lock:
            if self._failure is None:
                self._failure = MpiTransportError(f"{self._whose}: {reason}")
                self._failure.__cause__ = cause
        self._take(0.0)
        self._unfinished = [operation for operation in self._unfinished if operation.stage < 3]
        for operation in self._unfinished:
            operation.future.set_exception(self._failure)
        if self._unfinished:
            _abandoned.add(self)
        _running.discard(self)


# Before MPI ends ------------------------------------------------------------------------------------------------------

_running: set[_Progress] = set()
_abandoned: set[_Progress] = set()  # MPI may still write into the memory of what they left unfinished
_ends_in_time = False


def _end_before_mpi(mpi: Any, progress: _Progress) -> None:
    """No thread may be inside MPI when it is finalized."""
    global _ends_in_time
    _running.add(progress)
    if not _ends_in_time:
        _ends_in_time = True
        before_mpi_ends(mpi, _end_all)
        atexit.register(_end_all)


def _end_all() -> None:
    for wait in (False, True):
        for progress in list(_running):
            progress.stop(wait)
