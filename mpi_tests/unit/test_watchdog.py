"""Waiting for other ranks: what is said, to whom, and when it ends. CASES 2 and 4; real jobs are in launches/."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from collections.abc import Iterator

import pytest

from hvd_slim import watchdog as watchdog_module
from hvd_slim.noticeboard import ENDS, GAVE_UP, GOES_ON, WAITS, Noticeboard, Word
from hvd_slim.transport import noticeboards
from hvd_slim.transport.noticeboards import StoreNoticeboard
from hvd_slim.watchdog import StalledError, Watchdog

RUN = "hvd_slim.1"
HERE = Word(WAITS, 6, "core", RUN)


class Board(Noticeboard):
    """Holds what a test wants the others to have told."""

    def __init__(self, words: dict[int, Word | None]) -> None:
        super().__init__(1 + len(words))
        self.words, self.told = words, list[Word]()

    def _tell(self) -> None:
        self.told.append(self.mine)

    def somebody_waits(self) -> bool:
        return any(word is not None and word.state == WAITS for word in self.words.values())

    def read(self) -> dict[int, Word | None]:
        return self.words

    def hear_last_words(self) -> dict[int, Word | None]:
        return self.words


def watchdog(board: Noticeboard | None, warn_after: float = 0.1, stall_limit: float = 0.2) -> Watchdog:
    dog = Watchdog(0, warn_after, stall_limit, RUN, board)
    dog.round_number = 6
    return dog


class Clock:
    """The watchdog's module ``time``: only sleeping makes it go on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the real one, which goes on while the machine is busy with something else."""
    clock = Clock()
    monkeypatch.setattr(watchdog_module, "time", clock)
    return clock


def test_a_wait_that_is_short_tells_nobody(clock: Clock) -> None:
    board = Board({1: None})
    watchdog(board, warn_after=1.0, stall_limit=30.0).wait(lambda: clock.now > 0.4, "core")
    assert board.told == []
    assert board.mine == Word(GOES_ON, 6, "core", RUN)


def test_a_wait_that_is_long_is_told_and_taken_back(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """One warning."""
    board = Board({1: None})
    with caplog.at_level(logging.WARNING, "hvd_slim"):
        watchdog(board, warn_after=3.0, stall_limit=30.0).wait(lambda: clock.now > 12.0, "core")
    assert [word.state for word in board.told] == [WAITS, GOES_ON]
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0: waiting for 3 s in round 6 (core): rank 1 has not come to it"
    ]


def test_who_hears_that_another_rank_waits_answers_before_its_own_time(clock: Clock) -> None:
    """So that the other does not take it for late."""
    board = Board({1: HERE, 2: None})
    watchdog(board, warn_after=1.2, stall_limit=30.0).wait(lambda: clock.now > 0.5, "core")
    assert [word.state for word in board.told] == [WAITS, GOES_ON]  # half of warn_after was not over


@pytest.mark.parametrize(
    ("words", "diagnosis"),
    [
        (None, "which rank is late is not known"),
        ({1: None, 2: HERE}, "rank 1 has not come to it"),
        ({1: None, 2: Word(GOES_ON, 5, "core", RUN)}, "ranks 1, 2 have not come to it"),
        ({1: HERE, 2: Word(ENDS, 5, "core", RUN)}, "rank 2 has ended; its last round was 5"),
        ({1: None, 2: Word(ENDS, None, "", "")}, "rank 2 has ended; rank 1 has not come to it"),
        ({1: None, 2: Word(GAVE_UP, 6, "core", RUN)}, r"rank 2 gave up waiting in round 6 \(core\); rank 1 has not"),
        ({1: None, 2: Word(WAITS, 7, "core", RUN)}, r"rank 2 waits in round 7 \(core\) of hvd_slim.1: .*; rank 1 has"),
        ({1: HERE, 2: HERE}, "as all ranks do"),
        ({1: Word(WAITS, 6, "explorer", RUN), 2: Word(WAITS, 6, "select", RUN)}, "as all ranks do"),
        ({}, "waiting for 0 s in round 6"),
    ],
)
def test_what_is_said_at_the_limit(words: dict[int, Word | None] | None, diagnosis: str) -> None:
    board = None if words is None else Board(words)
    with pytest.raises(StalledError, match=diagnosis) as raised:
        watchdog(board).wait(lambda: False, "core")
    assert "stall_limit=0.2 seconds" in str(raised.value)
    if board is not None:
        assert board.told[-1].state == GAVE_UP


@pytest.mark.parametrize(
    "apart", [Word(WAITS, 7, "core", RUN), Word(WAITS, 6, "resync", RUN), Word(WAITS, 6, "core", "hvd_slim.2")]
)
def test_when_all_wait_but_not_for_the_same_the_wait_ends(apart: Word, clock: Clock) -> None:
    with pytest.raises(StalledError, match=r"rank 2 waits in .*No rank can go on"):
        watchdog(Board({1: HERE, 2: apart}), warn_after=0.4, stall_limit=300.0).wait(lambda: False, "core")
    assert 0.4 < clock.now < 1.0


@pytest.mark.parametrize("unknown", [None, Word(GOES_ON, 6, "core", RUN), "not read"])
def test_as_long_as_one_rank_may_still_come_the_others_wait(unknown: Word | None | str) -> None:
    words: dict[int, Word | None] = {1: Word(WAITS, 7, "core", RUN)}
    board = Board(words)
    board.size = 3
    if not isinstance(unknown, str):
        words[2] = unknown
    with pytest.raises(StalledError, match="Giving up"):
        watchdog(board, warn_after=0.05, stall_limit=0.5).wait(lambda: False, "core")


def test_as_long_as_others_move_the_wait_goes_on() -> None:
    """Ranks that are apart may be on their way to the same place."""
    board = Board({1: HERE})
    rounds = itertools.count(7)

    def done() -> bool:
        board.words = {1: Word(WAITS, next(rounds), "core", RUN)}
        return False

    with pytest.raises(StalledError, match="Giving up"):
        watchdog(board, warn_after=0.05, stall_limit=0.5).wait(done, "core")


def test_who_had_given_up_and_goes_on_after_all_says_so() -> None:
    board = Board({1: None})
    dog = watchdog(board)
    with pytest.raises(StalledError):
        dog.wait(lambda: False, "core")
    dog.wait(lambda: True, "core")
    assert [word.state for word in board.told] == [WAITS, GAVE_UP, GOES_ON]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (None, "which rank ended is not known"),
        (
            {1: Word(ENDS, 5, "core", RUN), 2: Word(GOES_ON, 5, "core", RUN)},
            r": rank 1 has ended; its last round was 5",
        ),
        ({1: None, 2: HERE}, "rank 1 gives no answer"),
        ({1: Word(GAVE_UP, 6, "core", RUN), 2: HERE}, r"rank 1 gave up waiting in round 6 \(core\)"),
        ({1: Word(GOES_ON, 5, "core", RUN), 2: HERE}, "rank 1 was not waiting here when Horovod was shut down"),
        ({1: HERE, 2: HERE}, "no other rank says that it ended"),
    ],
)
def test_what_is_said_when_horovod_fails(words: dict[int, Word | None] | None, cause: str) -> None:
    dog = watchdog(None if words is None else Board(words))
    text = dog.obituary("core", RuntimeError("Horovod has been shut down."))
    assert text.startswith("rank 0: no more can be exchanged in round 6 (core): ")
    assert re.search(cause, text), text
    assert text.endswith("Horovod has been shut down.")


def test_words_survive_the_way() -> None:
    for word in (HERE, Word(ENDS, None, "", "", final=True)):
        assert Word.from_bytes(word.to_bytes()) == word


# The store of horovodrun --gloo ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def store() -> Iterator[str]:
    """Horovod's own rendezvous server: its address and port."""
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init([])
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop()


def test_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noticeboards, "_SECONDS_TO_READ", 60.0)  # on a busy machine
    with store() as address:
        boards = [StoreNoticeboard(address, RUN, rank, 3) for rank in range(3)]
        assert [board.somebody_waits() for board in boards] == [False] * 3
        assert boards[0].read() == {1: None, 2: None}
        boards[2].mine = HERE
        boards[2].tell()
        assert [board.somebody_waits() for board in boards] == [True] * 3
        assert boards[0].read() == {1: None, 2: HERE}
        assert boards[2].read() == {0: None, 1: None}
        boards[2].mine = Word(GOES_ON, 6, "core", RUN)
        boards[2].tell()
        boards[1].ends = True
        boards[1].leave()
        begin = time.monotonic()
        words = boards[0].hear_last_words()  # rank 2 says no last word
        assert 0.5 < time.monotonic() - begin < 30.0
        assert words == {1: Word(ENDS, None, "", "", final=True), 2: Word(GOES_ON, 6, "core", RUN)}
        assert StoreNoticeboard(address, "hvd_slim.2", 0, 3).read() == {1: None, 2: None}, "another run's words"


def test_a_store_that_is_gone_is_no_fault_of_the_round() -> None:
    board = StoreNoticeboard("127.0.0.1:1", RUN, 0, 2)
    board.tell()
    board.leave()
    assert not board.somebody_waits()
    assert board.read() == {}
    with pytest.raises(StalledError, match="waiting"):
        watchdog(board).wait(lambda: False, "core")
