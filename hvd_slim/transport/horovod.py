"""Horovod carries the bytes: MPI, NCCL or Gloo, whichever it was built and launched with."""

from __future__ import annotations

from typing import Any

import torch

from hvd_slim.stats import Stats
from hvd_slim.transport.base import MESSAGE_LIMIT, Pending, Received, Transport
from hvd_slim.watchdog import Watchdog


class HorovodTransport(Transport):
    """Horovod's own asynchronous operations on one process set.

    Args:
        name: prefix of every operation's name, the same on all ranks and unlike any other in flight.
        process_set: a Horovod process set; None for all ranks. A rank outside it counts as alone.
        stats: where bytes are counted.
        limit: bytes that one collective may carry, summed over ranks.
        warn_after, stall_limit: seconds of waiting for other ranks before a warning, and before ``StalledError``.
    """

    def __init__(
        self, name: str, process_set: Any, stats: Stats, limit: int = MESSAGE_LIMIT, warn_after: float = 10.0,
        stall_limit: float = 300.0,
    ) -> None:  # fmt: skip
        import horovod.torch as hvd

        self._hvd = hvd
        self._process_set = hvd.global_process_set if process_set is None else process_set
        self._name = name
        member = self._process_set.included() is not False
        rank, size = (self._process_set.rank(), self._process_set.size()) if member else (0, 1)
        super().__init__(rank, size, stats, limit)
        self._watchdog = Watchdog(rank, warn_after, stall_limit)

    def enter_round(self, round_number: int) -> None:
        """A new round begins on this rank. Not collective."""
        self._watchdog.round_number = round_number

    def _operation(self, name: str) -> dict[str, Any]:
        return {"name": f"{self._name}.{name}", "process_set": self._process_set}

    def _pending(self, handle: int) -> Pending[Any]:
        return Pending(lambda: self._wait(handle))

    def _wait(self, handle: int) -> Any:
        self._watchdog.wait(lambda: self._hvd.poll(handle))
        return self._hvd.synchronize(handle)

    def _allreduce(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return self._pending(self._hvd.allreduce_async_(tensor, op=self._hvd.Sum, **self._operation(name)))

    def _allgather(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        return self._pending(self._hvd.allgather_async(tensor.view(1, -1), **self._operation(name)))

    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Pending[torch.Tensor]:
        # Horovod names a root by its rank among all processes, also within a process set.
        ranks = self._process_set.ranks
        root_rank = ranks[root] if ranks else root
        return self._pending(self._hvd.broadcast_async_(tensor, root_rank, **self._operation(name)))

    def _alltoall(self, tensor: torch.Tensor, counts: list[int], name: str) -> Pending[Received]:
        splits = torch.tensor(counts, dtype=torch.int32)
        handle = self._hvd.alltoall_async(tensor, splits, **self._operation(name))

        def wait() -> Received:
            received, received_splits = self._wait(handle)
            return received, received_splits.tolist()

        return Pending(wait)

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order; lengths may differ. Collective, blocking, not counted."""
        raw = bytearray(text.encode())
        data = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64)
        lengths = self._wait(self._hvd.allgather_async(length, **self._operation("agreement.lengths")))
        gathered = self._wait(self._hvd.allgather_async(data, **self._operation("agreement.texts")))
        return [bytes(part.numpy()).decode() for part in gathered.split(lengths.tolist())]
