"""What the add-on asks of whoever carries bytes, and how those bytes are counted."""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch

from hvd_slim.stats import Stats


class Pending:
    """A collective in flight. ``wait()`` returns its result, once."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish = finish

    def wait(self) -> torch.Tensor:
        """Block until the result is there."""
        return self._finish()


class Transport(abc.ABC):
    """Collectives over the K ranks of one process set, all of them launched in the same order on every rank.

    Every call names its ``phase`` (see ``stats.PHASES``): it is counted under it and carries it in its name, so that
    Horovod's timeline shows it. All tensors are one-dimensional and contiguous.
    """

    rank: int
    size: int
    stats: Stats

    def allreduce(self, tensor: torch.Tensor, phase: str) -> Pending:
        """Launch the sum over ranks of ``tensor`` (float32 or float64), in place. Collective, non-blocking."""
        share = (self.size - 1) / self.size * tensor.nbytes
        self.stats.count(phase, 2 * share, 2 * share)
        return self._allreduce(tensor, phase)

    def allgather(self, tensor: torch.Tensor, phase: str) -> Pending:
        """Launch the concatenation, in rank order, of every rank's bytes. Collective, non-blocking.

        Args:
            tensor: uint8, of the same length on every rank. Result: shape (K, length).
        """
        share = (self.size - 1) * tensor.nbytes
        self.stats.count(phase, share, share)
        return self._allgather(tensor, phase)

    def broadcast(self, tensor: torch.Tensor, root: int, phase: str) -> Pending:
        """Launch the copy of ``root``'s ``tensor`` to every rank, in place. Collective, non-blocking."""
        share = (self.size - 1) / self.size * tensor.nbytes
        self.stats.count(phase, share, share)
        return self._broadcast(tensor, root, phase)

    @abc.abstractmethod
    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order; lengths may differ. Collective, blocking, not counted."""

    @abc.abstractmethod
    def _allreduce(self, tensor: torch.Tensor, phase: str) -> Pending: ...

    @abc.abstractmethod
    def _allgather(self, tensor: torch.Tensor, phase: str) -> Pending: ...

    @abc.abstractmethod
    def _broadcast(self, tensor: torch.Tensor, root: int, phase: str) -> Pending: ...
