"""What the add-on asks of whoever carries bytes, how large messages are cut, and how bytes are counted."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from hvd_slim.config import MESSAGE_LIMIT
from hvd_slim.stats import Stats

Result = TypeVar("Result")
Received = tuple[torch.Tensor, list[int]]


class Pending(Generic[Result]):
    """A collective in flight. ``wait()`` blocks until its result is there and returns it; call it once."""

    def __init__(self, wait: Callable[[], Result]) -> None:
        self.wait = wait

    def arrive(self) -> Result:
        """Block until the result is there, and return it; ``wait()`` is still to come, and returns the same."""
        result = self.wait()
        self.wait = lambda: result
        return result


class Transport(abc.ABC):
    """Collectives over the K ranks of one process set, launched in the same order on every rank.

    Every call names its ``phase`` (see ``stats.PHASES``): it is counted under it and carries it in its name, so that
    Horovod's timeline shows it. All tensors are one-dimensional and contiguous. A message of which more than
    ``limit`` bytes would travel in total over the ranks is cut into pieces, equally many on every rank.

    Attributes:
        rank, size: this rank's place among the K ranks, and K.
        stats: where bytes are counted.
        limit: bytes that one collective may carry, summed over ranks.
        speaks: whether this rank logs what all ranks would say alike.
    """

    def __init__(self, rank: int, size: int, stats: Stats, limit: int = MESSAGE_LIMIT) -> None:
        self.rank, self.size, self.stats, self.limit = rank, size, stats, limit
        self.speaks = rank == 0

    def allreduce(self, tensor: torch.Tensor, phase: str) -> Pending[torch.Tensor]:
        """Launch the sum over ranks of ``tensor`` (float32 or float64), in place. Collective, non-blocking."""
        share = (self.size - 1) / self.size * tensor.nbytes
        self.stats.count(phase, 2 * share, 2 * share)
        step = self._elements_per_piece(tensor)
        pieces = [self._allreduce(piece, name) for piece, name in _cut(tensor, step, phase)]

        def wait() -> torch.Tensor:
            for piece in pieces:
                piece.wait()
            return tensor

        return Pending(_profiled(phase, wait))

    def allgather(self, tensor: torch.Tensor, phase: str) -> Pending[torch.Tensor]:
        """Launch the gathering of every rank's bytes. Collective, non-blocking.

        Args:
            tensor: uint8, of the same length on every rank.

        Returns:
            Pending uint8, shape (K, length), in rank order.
        """
        share = (self.size - 1) * tensor.nbytes
        self.stats.count(phase, share, share)
        step = self._elements_per_piece(tensor)
        pieces = [self._allgather(piece, name) for piece, name in _cut(tensor, step, phase)]

        def wait() -> torch.Tensor:
            gathered = [piece.wait().view(self.size, -1) for piece in pieces]
            return gathered[0] if len(gathered) == 1 else torch.cat(gathered, dim=1)

        return Pending(_profiled(phase, wait))

    def broadcast(self, tensor: torch.Tensor, root: int, phase: str) -> Pending[torch.Tensor]:
        """Launch the copy of rank ``root``'s ``tensor`` to every rank, in place. Collective, non-blocking."""
        share = (self.size - 1) / self.size * tensor.nbytes
        self.stats.count(phase, share, share)
        step = self._elements_per_piece(tensor)
        pieces = [self._broadcast(piece, root, name) for piece, name in _cut(tensor, step, phase)]

        def wait() -> torch.Tensor:
            for piece in pieces:
                piece.wait()
            return tensor

        return Pending(_profiled(phase, wait))

    def alltoall(self, tensor: torch.Tensor, counts: list[int], most: int, phase: str) -> Pending[Received]:
        """Launch the exchange of one message between every two ranks. Collective, non-blocking.

        Args:
            tensor: uint8, the messages to ranks 0 to K−1 one after the other.
            counts: bytes of each.
            most: bytes that no rank exceeds with all its messages together; the same number on every rank.

        Returns:
            Pending (uint8 tensor with the messages from ranks 0 to K−1 one after the other, bytes of each).
        """
        # A piece takes its part of each of the K² messages, and of each may take one byte more.
        number = max(1, -(-most * self.size // max(1, self.limit - self.size**2)))
        offsets = [sum(counts[:rank]) for rank in range(self.size)]
        pieces = []
        for piece in range(number):
            bounds = [(count * piece // number, count * (piece + 1) // number) for count in counts]
            part = tensor
            if number > 1:
                part = torch.cat([tensor[at + a : at + b] for at, (a, b) in zip(offsets, bounds)])
            pieces.append(self._alltoall(part, [b - a for a, b in bounds], _piece_name(phase, piece)))
        sent = sum(counts) - counts[self.rank]

        def wait() -> Received:
            parts = [piece.wait() for piece in pieces]
            received = [sum(of_piece) for of_piece in zip(*(counts for _, counts in parts))]
            self.stats.count(phase, sent, sum(received) - received[self.rank])
            if number == 1:
                return parts[0]
            by_piece = [part.split(counts) for part, counts in parts]
            return torch.cat([part[rank] for rank in range(self.size) for part in by_piece]), received

        return Pending(_profiled(phase, wait))

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` holds on any rank. Collective, blocking."""
        votes = torch.tensor([float(flag)])
        return bool(self.allreduce(votes, "vote").wait().item() > 0)

    def _elements_per_piece(self, tensor: torch.Tensor) -> int:
        return max(1, self.limit // (self.size * tensor.element_size()))

    def enter_round(self, round_number: int) -> None:  # noqa: B027  (most transports have nothing to do)
        """A new round begins on this rank. Not collective."""

    def close(self) -> None:  # noqa: B027
        """Give back threads and communicators; the transport is not used any more. Not collective."""

    @abc.abstractmethod
    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order; lengths may differ. Collective, blocking, not counted."""

    @abc.abstractmethod
    def _allreduce(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]: ...

    @abc.abstractmethod
    def _allgather(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]: ...

    @abc.abstractmethod
    def _broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Pending[torch.Tensor]: ...

    @abc.abstractmethod
    def _alltoall(self, tensor: torch.Tensor, counts: list[int], name: str) -> Pending[Received]: ...


def _cut(tensor: torch.Tensor, step: int, phase: str) -> list[tuple[torch.Tensor, str]]:
    return [
        (tensor[begin : begin + step], _piece_name(phase, number))
        for number, begin in enumerate(range(0, max(1, tensor.numel()), step))
    ]


def _piece_name(phase: str, number: int) -> str:
    return f"{phase}.{number}" if number else phase


def _profiled(phase: str, wait: Callable[[], Result]) -> Callable[[], Result]:
    """``wait``, under the phase's name in the torch profiler."""

    def named() -> Result:
        with torch.profiler.record_function(f"hvd_slim::{phase}"):
            return wait()

    return named


def phase_of(name: str) -> str:
    """The phase that an operation's name, without its transport's, begins with."""
    return name.partition(".")[0]
