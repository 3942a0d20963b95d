"""Waiting for other ranks, but not for ever: who is late is said once, and at the limit the wait ends.

Nothing here goes through Horovod: its unnamed operations are numbered by a counter that every operation moves, so an
operation that only some ranks have started would make those of the user miss each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("hvd_slim")

_POLL = 1e-4  # seconds between two looks, at first; ten times as long after a while


class StalledError(RuntimeError):
    """A round was not completed within the limit; the message names the ranks that did not come, where it can."""


class Watchdog:
    """Waits until something is done, in rounds that the other ranks are asked about when it takes long.

    Args:
        rank: this rank.
        warn_after, stall_limit: seconds of waiting after which a line is logged, and after which ``StalledError`` is
            raised.
        ask: the round that each rank is in, None for a rank that does not answer; None if ranks cannot be asked.
    """

    def __init__(
        self, rank: int, warn_after: float, stall_limit: float, ask: Callable[[], dict[int, int | None]] | None = None
    ) -> None:
        self._rank, self.warn_after, self.stall_limit, self._ask = rank, warn_after, stall_limit, ask
        self.round_number = 0

    def wait(self, done: Callable[[], Any]) -> None:
        """Return when ``done()`` is true; look often at first, then about a thousand times a second.

        Raises:
            StalledError: it was not within the limit.
        """
        begin = time.monotonic()
        warned = False
        while not done():
            waited = time.monotonic() - begin
            if not warned and waited > self.warn_after:
                warned = True
                log.warning("rank %d: %s", self._rank, self._diagnosis(waited))
            if waited > self.stall_limit:
                raise StalledError(
                    f"rank {self._rank}: {self._diagnosis(waited)}. Giving up after stall_limit={self.stall_limit:g} "
                    f"seconds: call step() equally often on every rank, or raise the limit"
                )
            time.sleep(_POLL if waited < 0.05 else 10 * _POLL)

    def _diagnosis(self, waited: float) -> str:
        here = f"waiting for {waited:.0f} s in round {self.round_number}"
        rounds = {} if self._ask is None else self._ask()
        silent = [f"rank {rank} (no answer: stopped, or gone)" for rank, number in rounds.items() if number is None]
        late = [
            f"rank {rank} (still in round {number}: it skipped a step(), computes, or does something else)"
            for rank, number in rounds.items()
            if number is not None and number < self.round_number
        ]
        if silent or late:
            return f"{here} for {', '.join(late + silent)}"
        return f"{here}; which rank is late is not known"
