"""Waiting for other ranks, but not for ever: who is late is said once, and at the limit the wait ends.

Nothing here goes through Horovod: its unnamed operations are numbered by a counter that every operation moves, so an
operation that only some ranks have started would make those of the user miss each other.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from hvd_slim.noticeboard import ENDS, GAVE_UP, GOES_ON, WAITS, Noticeboard, Word

log = logging.getLogger("hvd_slim")

_POLL = 1e-4  # seconds between two looks, at first; ten times as long after a while
_LONGEST_PAUSE = 1.0  # seconds between two looks at the noticeboard


class StalledError(RuntimeError):
    """A round was not completed within the limit; the message names the ranks that did not come, where it can."""


class Watchdog:
    """Waits until something is done; when it takes long, asks the other ranks where they are.

    The first to have waited for half of ``warn_after`` says where it waits, and whoever also waits answers. So by the
    time of the warning all ranks that wait are known, unless they came less than three eighths of ``warn_after`` ago.
    When all wait, not all for the same, and nothing changes for another ``warn_after``, the wait ends before its limit.

    Args:
        rank: this rank.
        warn_after, stall_limit: seconds of waiting after which a line is logged, and after which ``StalledError`` is
            raised.
        run: what the rounds belong to; the same on all ranks.
        board: where ranks leave word for each other; None if there is nothing to leave it with.

    Attributes:
        round_number: the round that this rank is in, or was in last; None before the first.
    """

    def __init__(
        self, rank: int, warn_after: float, stall_limit: float, run: str = "", board: Noticeboard | None = None
    ) -> None:
        self._rank, self.warn_after, self.stall_limit = rank, warn_after, stall_limit
        self._run, self._board = run, board
        self.round_number: int | None = None

    def wait(self, done: Callable[[], Any], what: str) -> None:
        """Return when ``done()`` is true; look often at first, then about a thousand times a second.

        Args:
            done: must not block for long.
            what: is waited for; the same on all ranks.

        Raises:
            StalledError: it was not within the limit, or never can be.
        """
        board, here = self._board, Word(WAITS, self.round_number, what, self._run)
        if board is not None:
            board.mine = here
        begin = time.monotonic()
        warned = told = False
        look_after = self.warn_after / 4
        apart: dict[int, Word | None] = {}  # where all ranks wait, if not for the same, and since when
        apart_since = math.inf
        while not done():
            waited = time.monotonic() - begin
            if board is not None and waited > look_after:
                look_after = waited + min(self.warn_after / 8, _LONGEST_PAUSE)
                if told:
                    words = board.read()
                    if words != apart or not _all_wait_apart(here, words, board.size):
                        apart, apart_since = words, waited
                elif waited > self.warn_after / 2 or board.somebody_waits():
                    told = True
                    board.tell()
            if waited - apart_since > self.warn_after:
                raise self._stalled(
                    f"{self._diagnosis(here, waited)}. No rank can go on: call step() and resync() equally often, and "
                    f"in the same order, on every rank"
                )
            if not warned and waited > self.warn_after:
                warned = True
                log.warning("rank %d: %s", self._rank, self._diagnosis(here, waited))
            if waited > self.stall_limit:
                raise self._stalled(
                    f"{self._diagnosis(here, waited)}. Giving up after stall_limit={self.stall_limit:g} seconds: call "
                    f"step() equally often on every rank, or raise the limit"
                )
            time.sleep(_POLL if waited < 0.05 else 10 * _POLL)
        if board is not None:
            board.take_back()

    def _stalled(self, message: str) -> StalledError:
        if self._board is not None:
            self._board.mine = dataclasses.replace(self._board.mine, state=GAVE_UP)
            self._board.tell()
        return StalledError(f"rank {self._rank}: {message}")

    def _diagnosis(self, here: Word, waited: float) -> str:
        waiting = f"waiting for {waited:.0f} s in {here.place()}"
        if self._board is None:
            return f"{waiting}; which rank is late is not known"
        words = self._board.read()
        causes = [f"rank {rank} {word.account()}" for rank, word in _elsewhere(here, words)]
        silent = [rank for rank, word in words.items() if word is None]
        late = sorted(silent + [rank for rank, word in words.items() if word is not None and word.state == GOES_ON])
        if late:
            causes.append(f"{_ranks(late, 'has', 'have')} not come to it")
        return f"{waiting}: {'; '.join(causes)}" if causes else f"{waiting}, as all ranks do"

    def obituary(self, what: str, error: BaseException) -> str:
        """What to tell the user when Horovod has failed under a collective: the round, and the rank that ended it.

        Args:
            what: was waited for.
            error: Horovod's.
        """
        here = Word(WAITS, self.round_number, what, self._run)
        return f"rank {self._rank}: no more can be exchanged in {here.place()}: {self._cause(here)}. {error}"

    def _cause(self, here: Word) -> str:
        if self._board is None:
            return "which rank ended is not known"
        self._board.mine = here
        words = self._board.hear_last_words()
        ended = [f"rank {rank} {word.account()}" for rank, word in words.items() if word and word.state == ENDS]
        if ended:
            return "; ".join(ended)
        silent = [rank for rank, word in words.items() if word is None]
        if silent:
            return f"{_ranks(silent, 'gives', 'give')} no answer (ended, killed or busy)"
        gave_up = [f"rank {rank} {word.account()}" for rank, word in words.items() if word and word.state == GAVE_UP]
        if gave_up:
            return "; ".join(gave_up)
        absent = [rank for rank, word in words.items() if word and (word.state != WAITS or not word.is_with(here))]
        if absent:
            return f"{_ranks(absent, 'was', 'were')} not waiting here when Horovod was shut down"
        return "no other rank says that it ended"


def _elsewhere(here: Word, words: dict[int, Word | None]) -> list[tuple[int, Word]]:
    """The ranks that wait for something else, have given up, or have ended."""
    return [
        (rank, word)
        for rank, word in words.items()
        if word is not None and (word.state in (ENDS, GAVE_UP) or (word.state == WAITS and not word.is_with(here)))
    ]


def _all_wait_apart(here: Word, words: dict[int, Word | None], size: int) -> bool:
    """Whether every rank waits, or has given up, and not all for the same: no wait can end."""
    stuck = [word for word in words.values() if word is not None and word.state in (WAITS, GAVE_UP)]
    return len(stuck) == size - 1 and bool(_elsewhere(here, words))


def _ranks(numbers: list[int], singular: str, plural: str) -> str:
    """Who, and the verb."""
    if len(numbers) == 1:
        return f"rank {numbers[0]} {singular}"
    return f"ranks {', '.join(map(str, numbers))} {plural}"
