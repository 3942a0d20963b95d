"""Horovod carries the bytes: MPI, NCCL or Gloo, whichever it was built and launched with."""

from __future__ import annotations

from typing import Any

import torch

from hvd_slim.stats import Stats
from hvd_slim.transport.base import Pending, Transport


class HorovodTransport(Transport):
    """Horovod's own asynchronous operations on one process set.

    Args:
        name: prefix of every operation's name, the same on all ranks and unlike any other in flight.
        process_set: a Horovod process set that this rank belongs to; None for all ranks.
        stats: where bytes are counted.
    """

    def __init__(self, name: str, process_set: Any, stats: Stats) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self._process_set = hvd.global_process_set if process_set is None else process_set
        self._name = name
        self.stats = stats
        self.size = self._process_set.size()
        self.rank = self._process_set.rank()

    def _operation(self, phase: str) -> dict[str, Any]:
        return {"name": f"{self._name}.{phase}", "process_set": self._process_set}

    def _pending(self, handle: int) -> Pending:
        return Pending(lambda: self._hvd.synchronize(handle))

    def _allreduce(self, tensor: torch.Tensor, phase: str) -> Pending:
        return self._pending(self._hvd.allreduce_async_(tensor, op=self._hvd.Sum, **self._operation(phase)))

    def _allgather(self, tensor: torch.Tensor, phase: str) -> Pending:
        return self._pending(self._hvd.allgather_async(tensor.view(1, -1), **self._operation(phase)))

    def _broadcast(self, tensor: torch.Tensor, root: int, phase: str) -> Pending:
        # Horovod names a root by its rank among all processes, also within a process set.
        ranks = self._process_set.ranks
        root_rank = root if ranks is None else ranks[root]
        return self._pending(self._hvd.broadcast_async_(tensor, root_rank, **self._operation(phase)))

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order; lengths may differ. Collective, blocking, not counted."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int64)
        lengths = self._hvd.allgather(length, **self._operation("agreement.lengths"))
        gathered = self._hvd.allgather(data, **self._operation("agreement.texts"))
        return [bytes(part.numpy()).decode() for part in gathered.split(lengths.tolist())]
