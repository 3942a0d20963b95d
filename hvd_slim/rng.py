"""The add-on's own counter-based generator. Nobody else's generator is ever touched.

Every draw is a function of (seed, stream, round, rank): NumPy's Philox4x64-10 (Salmon, Moraes, Dror, Shaw,
*Parallel random numbers: as easy as 1, 2, 3*, SC 2011) with key (seed, stream) and counter (0, 0, round, rank).
Only the raw 64-bit words are used, whose sequence NumPy promises to keep.
"""

from __future__ import annotations

import numpy as np

EXPLORER_STREAM = 1
SHARED_STREAM = 3  # 2 is that of hvd_slim.values
CYCLIC_STREAM = 4


def raw_words(seed: int, stream: int, round_number: int, rank: int, count: int) -> np.ndarray:
    """The first ``count`` words, uint64, of the generator for (seed, stream, round, rank)."""
    key = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([0, 0, round_number, rank], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)
