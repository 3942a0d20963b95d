"""Which coordinates outside the core travel this round.

An explorer works on *positions* in the sorted list of the m coordinates outside the core (0 ≤ position < m). It knows
nothing of the model, of the core, or of how positions become coordinates.
"""

from __future__ import annotations

import numpy as np
import torch

from hvd_slim.rng import EXPLORER_STREAM, raw_words


class RandomExplorer:
    """The paper's explorer: a stratified uniform draw, private to each rank.

    The m positions, rotated by a random shift each round, are cut at whole numbers into ``count`` strata whose lengths
    differ by at most one; one uniform draw in each. Hence exactly ``count`` distinct positions, and, thanks to the
    rotation, the same probability count/m for every position. Only the offset in the stratum has to travel.

    Args:
        population: m, the number of coordinates outside the core.
        count: how many of them travel, 0 ≤ count ≤ m.
        seed: the run's seed.
        device: where positions are wanted.
    """

    def __init__(self, population: int, count: int, seed: int, device: torch.device) -> None:
        if not 0 <= count <= population:
            raise ValueError(f"cannot draw {count} distinct coordinates out of {population}")
        self.population, self.count, self.seed, self.device = population, count, seed, device
        bounds = (np.arange(count + 1, dtype=np.int64) * population) // max(count, 1)
        self._lengths = np.diff(bounds)
        # start + offset + shift stays below 2m.
        self._position_dtype = torch.int32 if 2 * population <= torch.iinfo(torch.int32).max else torch.int64
        self._starts = torch.from_numpy(bounds[:-1]).to(device, self._position_dtype)
        longest = int(self._lengths.max(initial=0))
        self.offset_dtype = torch.uint8 if longest <= 256 else torch.int32
        if longest > torch.iinfo(torch.int32).max:
            raise ValueError(
                f"a stratum of {longest} coordinates does not fit a four-byte offset; raise comm_fraction or lower "
                f"core_fraction so that more than {count} of {population} coordinates are explored"
            )

    @property
    def index_bytes(self) -> int:
        """Bytes that one offset takes on the wire: 1 while no stratum has more than 256 members, else 4."""
        return self.offset_dtype.itemsize

    def draw(self, round_number: int, rank: int) -> torch.Tensor:
        """The offsets that ``rank`` draws in ``round_number``: shape (count,), ``offset_dtype``, in stratum order."""
        words = raw_words(self.seed, EXPLORER_STREAM, round_number, rank, 1 + (self.count + 1) // 2)
        draws = words[1:].view(np.uint32)[: self.count].astype(np.uint64)
        draws *= self._lengths.view(np.uint64)
        draws >>= np.uint64(32)
        return torch.from_numpy(draws.view(np.int64)).to(self.offset_dtype).to(self.device)

    def positions(self, offsets: torch.Tensor, round_number: int, rank: int) -> torch.Tensor:
        """The positions, ascending, that ``rank``'s offsets mean: shape (count,), int32 or int64."""
        if self.count == 0:
            return self._starts
        shift = int(raw_words(self.seed, EXPLORER_STREAM, round_number, rank, 1)[0] % self.population)
        positions = self._starts + offsets.to(self._position_dtype)
        positions += shift
        # Strata ascend, so the positions that leave the end of the list are the last ones; rotated, they come first.
        first_wrapped = int(torch.searchsorted(positions, self.population))
        positions[first_wrapped:] -= self.population
        return torch.roll(positions, self.count - first_wrapped)
