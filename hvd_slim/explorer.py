"""Which coordinates outside the core travel this round.

An explorer works on *positions* in the ascending list of the m coordinates outside the core (0 ≤ position < m). It
knows nothing of the model, of the core, or of how positions become coordinates. What has to travel so that others know
a rank's positions are its *indices*, as bytes; a run of consecutive positions has indices of its own.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from hvd_slim import native
from hvd_slim.chunks import chunks
from hvd_slim.rng import CYCLIC_STREAM, EXPLORER_STREAM, SHARED_STREAM, raw_words
from hvd_slim.sets import pack_indices, set_nbytes, unpack_indices

#: given a count, that many positions where the pending update is largest: shape (count,), ascending, ties to the lower
Largest = Callable[[int], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Draw:
    """One rank's explorer set of one round.

    Attributes:
        positions: shape (count,), ascending, distinct, int32 or int64.
        indices: shape (count,), integer: what has to travel, before it becomes bytes (``Explorer.pack``); None if
            receivers recompute the positions.
        first: number of the stratum that the first position lies in; later positions lie in the following ones.
    """

    positions: torch.Tensor
    indices: torch.Tensor | None
    first: int


class Explorer(abc.ABC):
    """Chooses ``count`` of ``population`` positions, anew each round.

    Args:
        population: m, the number of coordinates outside the core.
        count: how many of them travel, 0 ≤ count ≤ m.
        seed: the run's seed, the same on all ranks.
        size: K, the number of ranks.
        device: where positions are wanted.

    Attributes:
        private: whether each rank has a set of its own; otherwise one set holds for all ranks.
        by_pending_update: whether ``draw`` looks at the pending update.
    """

    private = True
    by_pending_update = False

    def __init__(self, population: int, count: int, seed: int, size: int, device: torch.device) -> None:
        self.check(population, count)
        self.population, self.count, self.seed, self.size, self.device = (population, count, seed, size, device)

    @classmethod
    def nbytes_of(cls, run: int, population: int, count: int) -> int:
        """Bytes of the indices of ``run`` consecutive positions of a set of ``count``."""
        return 0

    @classmethod
    def check(cls, population: int, count: int) -> None:
        """Refuse what cannot be explored: ``count`` of ``population`` positions.

        Raises:
            ValueError: it is refused; the message says what to change.
        """
        if not 0 <= count <= population:
            raise ValueError(f"cannot draw {count} distinct coordinates out of {population}")

    def index_nbytes(self, run: int) -> int:
        """Bytes of the indices of ``run`` consecutive positions."""
        return self.nbytes_of(run, self.population, self.count)

    def pack(self, draw: Draw, begin: int, end: int) -> torch.Tensor:
        """The indices of positions ``begin`` to ``end`` of a draw: uint8, shape (index_nbytes(end − begin),)."""
        return torch.empty(0, dtype=torch.uint8, device=self.device)

    @abc.abstractmethod
    def draw(self, round_number: int, rank: int, largest: Largest | None = None) -> Draw:
        """``rank``'s set in ``round_number``.

        Args:
            largest: finds so many positions with the largest |u_k|; only asked if ``by_pending_update``.
        """

    @abc.abstractmethod
    def positions(self, indices: torch.Tensor, first: int, count: int, round_number: int, rank: int) -> torch.Tensor:
        """The ``count`` consecutive positions of ``rank``'s set that begin in stratum ``first``, from their indices.

        Args:
            indices: uint8, shape (index_nbytes(count),).
        """


class _Stratified(Explorer):
    """The m positions, cut at whole numbers into ``count`` strata whose lengths differ by at most one; one in each."""

    def __init__(self, population: int, count: int, seed: int, size: int, device: torch.device) -> None:
        super().__init__(population, count, seed, size, device)
        bounds = (np.arange(count + 1, dtype=np.int64) * population) // max(count, 1)
        self._longest = int(np.diff(bounds).max(initial=0))
        self._lengths = np.diff(bounds).astype(np.uint32)
        # start + offset + shift stays below 2m.
        self._position_dtype = torch.int32 if 2 * population <= torch.iinfo(torch.int32).max else torch.int64
        self._bounds = torch.from_numpy(bounds).to(device, self._position_dtype)
        self._starts = self._bounds[:-1]

    @classmethod
    def check(cls, population: int, count: int) -> None:
        """Refuse also strata whose offsets do not fit."""
        super().check(population, count)
        longest = -(-population // count) if count else 0
        if longest > torch.iinfo(torch.int32).max:
            raise ValueError(
                f"a stratum of {longest} coordinates does not fit a four-byte offset; raise comm_fraction or "
                f"lower core_fraction so that more than {count} of {population} coordinates are explored"
            )

    def _rotated(self, strata_starts: torch.Tensor, offsets: torch.Tensor, shift: int) -> torch.Tensor:
        positions = strata_starts + offsets.to(self._position_dtype)
        if shift:
            positions += shift
            positions -= (positions >= self.population).to(self._position_dtype) * self.population
        return positions

    def _ascending(self, offsets: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Positions and offsets in ascending order of positions, and the stratum of the first."""
        positions = self._rotated(self._starts, offsets, shift)
        if not shift:
            return positions, offsets, 0
        # Strata ascend, so the positions that leave the end of the list are the last ones; rotated, they come first.
        first = int((positions >= shift).sum())
        if first == self.count:
            return positions, offsets, 0
        return torch.roll(positions, -first), torch.roll(offsets, -first), first

    def _strata(self, first: int, count: int) -> torch.Tensor:
        """Starts of ``count`` strata from ``first`` on, around the end."""
        if first + count <= self.count:
            return self._starts[first : first + count]
        return torch.cat([self._starts[first:], self._starts[: first + count - self.count]])


def _offset_dtype(population: int, count: int) -> torch.dtype:
    longest_stratum = -(-population // max(count, 1))
    return torch.uint8 if longest_stratum <= 256 else torch.int32


class RandomExplorer(_Stratified):
    """The paper's explorer: one uniform draw in each stratum, private to each rank.

    The list is rotated by a random shift each round before it is cut, so that every position is equally likely,
    count/m. Only the offset in the stratum travels: one byte while no stratum has more than 256 members, else four.
    """

    _stream = EXPLORER_STREAM

    def __init__(self, population: int, count: int, seed: int, size: int, device: torch.device) -> None:
        super().__init__(population, count, seed, size, device)
        self._offset_dtype = _offset_dtype(population, count)

    @classmethod
    def nbytes_of(cls, run: int, population: int, count: int) -> int:
        """One byte an offset, or four."""
        return run * _offset_dtype(population, count).itemsize

    def pack(self, draw: Draw, begin: int, end: int) -> torch.Tensor:
        """The offsets."""
        assert draw.indices is not None
        return draw.indices[begin:end].view(torch.uint8) if begin < end else super().pack(draw, begin, end)

    def draw(self, round_number: int, rank: int, largest: Largest | None = None) -> Draw:
        """``rank``'s set in ``round_number``."""
        words = raw_words(self.seed, self._stream, round_number, rank, 1 + (self.count + 1) // 2)
        bits = words[1:].view(np.uint32)
        offsets = np.empty(self.count, dtype=np.uint8 if self._offset_dtype == torch.uint8 else np.int32)
        shift = self._shift_of(words[0])
        if native.serves(self._bounds) and self.count:
            of_stratum = torch.from_numpy(offsets)
            return Draw(*native.draw(torch.from_numpy(bits.view(np.int32)), self._bounds, shift, of_stratum))
        for part in chunks(self.count, torch.device("cpu")):
            # 32 random bits r in each stratum of length l give offset ⌊r·l / 2^32⌋.
            product = np.multiply(bits[part], self._lengths[part], dtype=np.uint64, casting="unsafe")
            np.right_shift(product, np.uint64(32), out=offsets[part], casting="unsafe")
        return Draw(*self._ascending(torch.from_numpy(offsets).to(self.device), shift))

    def positions(self, indices: torch.Tensor, first: int, count: int, round_number: int, rank: int) -> torch.Tensor:
        """Positions from the strata and the offsets that travelled."""
        offsets = indices.contiguous().view(self._offset_dtype)
        shift = self._shift_of(raw_words(self.seed, self._stream, round_number, rank, 1)[0])
        if native.serves(self._bounds, offsets):
            return native.drawn(self._bounds, first, offsets, shift)
        return self._rotated(self._strata(first, count), offsets, shift)

    def _shift_of(self, word: np.uint64) -> int:
        return int(word % np.uint64(self.population)) if self.population else 0


class SharedExplorer(RandomExplorer):
    """One random draw for all ranks, from a stream that all share: no index travels, values go by reduction."""

    private = False
    _stream = SHARED_STREAM

    @classmethod
    def nbytes_of(cls, run: int, population: int, count: int) -> int:
        """Nothing travels."""
        return 0

    def pack(self, draw: Draw, begin: int, end: int) -> torch.Tensor:
        """Nothing travels."""
        return Explorer.pack(self, draw, begin, end)

    def draw(self, round_number: int, rank: int, largest: Largest | None = None) -> Draw:
        """Everybody's set in ``round_number``, whatever ``rank``."""
        return super().draw(round_number, 0)


class CyclicExplorer(_Stratified):
    """Each rank walks through every stratum, one step a round: bounded staleness, no index travels.

    offset = (hash(stratum) + round + shift of the rank) mod length; every position is visited once in as many rounds
    as the longest stratum has members. The shifts spread the ranks evenly over a stratum.
    """

    def __init__(self, population: int, count: int, seed: int, size: int, device: torch.device) -> None:
        super().__init__(population, count, seed, size, device)
        words = raw_words(seed, CYCLIC_STREAM, 0, 0, (count + 1) // 2).view(np.uint32)[:count]
        lengths = torch.from_numpy(self._lengths.astype(np.int64))
        start_offsets = torch.from_numpy(words.astype(np.int64)) % lengths
        self._start_offsets = start_offsets.to(device, self._position_dtype)
        self._length = lengths.to(device, self._position_dtype)

    def draw(self, round_number: int, rank: int, largest: Largest | None = None) -> Draw:
        """``rank``'s set in ``round_number``."""
        return Draw(self._walked(0, self.count, round_number, rank), None, 0)

    def positions(self, indices: torch.Tensor, first: int, count: int, round_number: int, rank: int) -> torch.Tensor:
        """Positions, recomputed."""
        return self._walked(first, count, round_number, rank)

    def _walked(self, first: int, count: int, round_number: int, rank: int) -> torch.Tensor:
        part = slice(first, first + count)
        step = round_number % (self._longest * (self._longest - 1)) if self._longest > 1 else 0
        ahead = rank * self._longest // self.size + step
        offsets = (self._start_offsets[part].long() + ahead) % self._length[part]
        return self._starts[part] + offsets.to(self._position_dtype)


class GreedyExplorer(Explorer):
    """The positions where this rank has most to tell: the largest |u_k|, ties to the lower; private, sent as a set."""

    by_pending_update = True

    @classmethod
    def nbytes_of(cls, run: int, population: int, count: int) -> int:
        """A packed set, about nine bits a position or fewer."""
        return set_nbytes(run, population)

    def pack(self, draw: Draw, begin: int, end: int) -> torch.Tensor:
        """The positions themselves."""
        return pack_indices(draw.positions[begin:end], self.population)

    def draw(self, round_number: int, rank: int, largest: Largest | None = None) -> Draw:
        """``rank``'s set in ``round_number``."""
        assert largest is not None
        return Draw(largest(self.count), None, 0)

    def positions(self, indices: torch.Tensor, first: int, count: int, round_number: int, rank: int) -> torch.Tensor:
        """The set, unpacked."""
        return unpack_indices(indices, count, self.population)


class LeaderExplorer(GreedyExplorer):
    """The greedy set of rank (round mod K), broadcast to all; values go by reduction."""

    private = False

    def leader(self, round_number: int) -> int:
        """The rank whose pending update decides in ``round_number``."""
        return round_number % self.size


EXPLORERS: dict[str, type[Explorer]] = {
    "random": RandomExplorer,
    "cyclic": CyclicExplorer,
    "shared": SharedExplorer,
    "greedy": GreedyExplorer,
    "leader": LeaderExplorer,
}
