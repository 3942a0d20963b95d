"""How MPI collectives are carried on while the trainer computes: one background thread for each transport.

The thread starts collectives in the order launched, which is the same on every rank, and sleeps between looks at them.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from hvd_slim.transport.mpi_environment import MpiTransportError, before_mpi_ends

if TYPE_CHECKING:
    from mpi4py import MPI

# A collective of at most two MPI operations, one on either communicator: yields each one's request, returns the result.
Steps = Generator["MPI.Request", None, Any]

_MOST_STARTED = 4  # collectives
_SHORTEST_SLEEP, _LONGEST_SLEEP = 2e-5, 5e-4  # seconds; doubled as long as nothing moves
_SECONDS_TO_LOOK_AROUND = 1.0  # between questions whether the other ranks are still there
_SECONDS_TO_DRAIN = 5.0  # for what is in flight when this rank or another one ends: it may be all but complete
_CLOSED = "the transport is closed: another rank or this one ended (see the first error), or called hvd.shutdown()"


class Operation:
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


class Progress:
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
        self._launched: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unfinished: list[Operation] = []  # the thread's own, in the order launched
        self._thread: threading.Thread | None = None
        self._failure: MpiTransportError | None = None
        self._deadline: float | None = None  # once it is to end

    def launch(self, operation: Operation) -> None:
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

_running: set[Progress] = set()
_abandoned: set[Progress] = set()  # MPI may still write into the memory of what they left unfinished
_ends_in_time = False


def end_before_mpi(mpi: Any, progress: Progress) -> None:
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
