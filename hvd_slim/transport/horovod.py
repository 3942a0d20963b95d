"""Horovod carries the bytes: MPI, NCCL or Gloo, whichever it was built and launched with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvd_slim.noticeboard import Noticeboard
from hvd_slim.stats import Stats
from hvd_slim.transport.base import MESSAGE_LIMIT, Pending, Received, Transport, phase_of
from hvd_slim.watchdog import Watchdog


class HorovodTransport(Transport):
    """Horovod's own asynchronous operations on one process set.

    Args:
        name: prefix of every operation's name, the same on all ranks and unlike any other in flight.
        process_set: a Horovod process set; None for all ranks. A rank outside it counts as alone.
        stats: where bytes are counted.
        limit: bytes that one collective may carry, summed over ranks.
        warn_after, stall_limit: seconds of waiting for other ranks before a warning, and before ``StalledError``.
        board: where late ranks are asked for; None if they cannot be.
    """

    def __init__(
        self, name: str, process_set: Any, stats: Stats, limit: int = MESSAGE_LIMIT, warn_after: float = 10.0,
        stall_limit: float = 300.0, board: Noticeboard | None = None,
    ) -> None:  # fmt: skip
        import horovod.torch as hvd

        self._hvd = hvd
        self._internal_error: type[RuntimeError] = hvd.mpi_ops.HorovodInternalError
        self._process_set = hvd.global_process_set if process_set is None else process_set
        self._name = name
        member = self._process_set.included() is not False
        rank, size = (self._process_set.rank(), self._process_set.size()) if member else (0, 1)
        super().__init__(rank, size, stats, limit)
        self.speaks = self.speaks and member  # those outside it are alone together
        self._watchdog = Watchdog(rank, warn_after, stall_limit, name, board)

    def enter_round(self, round_number: int) -> None:
        """A new round begins on this rank. Not collective."""
        self._watchdog.round_number = round_number

    def _launch(self, operation: Callable[..., int], *arguments: Any, name: str, **others: Any) -> Pending[Any]:
        """Start one of Horovod's asynchronous operations."""
        full_name = f"{self._name}.{name}"
        with self._named_failure(name):
            handle = operation(*arguments, name=full_name, process_set=self._process_set, **others)
        return Pending(lambda: self._wait(handle, name))

    def _wait(self, handle: int, name: str) -> Any:
        with self._named_failure(name):
            self._watchdog.wait(lambda: self._hvd.poll(handle), phase_of(name))
            return self._hvd.synchronize(handle)

    @contextlib.contextmanager
    def _named_failure(self, name: str) -> Iterator[None]:
        """An error of Horovod's, which elastic training must recognise, also says in which round and through whom."""
        try:
            yield
        except self._internal_error as error:
            raise self._internal_error(self._watchdog.obituary(phase_of(name), error)) from error

    def _allreduce(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return self._launch(self._hvd.allreduce_async_, tensor, op=self._hvd.Sum, name=name)

    def _allgather(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return self._launch(self._hvd.allgather_async, tensor.view(1, -1), name=name)

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Pending[torch.Tensor]:
        # Horovod names a root by its rank among all processes, also within a process set.
        ranks = self._process_set.ranks
        root_rank = ranks[root] if ranks else root
        return self._launch(self._hvd.broadcast_async_, tensor, root_rank, name=name)

    def _alltoall(self, tensor: torch.Tensor, counts: list[int], name: str) -> Pending[Received]:
        splits = torch.tensor(counts, dtype=torch.int32)
        pending = self._launch(self._hvd.alltoall_async, tensor, splits, name=name)

        def wait() -> Received:
            received, received_splits = pending.wait()
            return received, received_splits.tolist()

        return Pending(wait)

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order; lengths may differ. Collective, blocking, not counted."""
        raw = bytearray(text.encode())
        data = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64)
        lengths = self._launch(self._hvd.allgather_async, length, name="agreement.lengths").wait()
        gathered = self._launch(self._hvd.allgather_async, data, name="agreement.texts").wait()
        return [bytes(part.numpy()).decode() for part in gathered.split(lengths.tolist())]
