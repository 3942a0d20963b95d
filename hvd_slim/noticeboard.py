"""Where ranks leave word for each other while they wait, or end: beside Horovod's operations, and never in their way.

A rank that is neither waiting for long nor ending tells nothing, so a round costs nothing here.
"""

from __future__ import annotations

import abc
import atexit
import dataclasses
import json
import weakref

WAITS, GOES_ON, GAVE_UP, ENDS = "waits", "goes on", "gave up", "ends"
#: operations of one round; they overlap, so that ranks which are together may wait for different ones
_OF_A_ROUND = ("select", "core", "explorer", "dense")


@dataclasses.dataclass(frozen=True)
class Word:
    """Where a rank is.

    Attributes:
        state: it waits there; was there last and goes on; waited there until the limit; was there last and ends.
        round_number: None before the first round.
        what: the operation.
        run: what the rounds belong to: of which optimizer they are.
        final: whether the rank has nothing more to tell.
    """

    state: str
    round_number: int | None
    what: str
    run: str
    final: bool = False

    def is_with(self, other: Word) -> bool:
        """Whether both ranks are in the same place, as far as one can tell."""
        mine, theirs = ("round" if word.what in _OF_A_ROUND else word.what for word in (self, other))
        return (self.run, self.round_number, mine) == (other.run, other.round_number, theirs)

    def place(self) -> str:
        """Round and operation, as text."""
        place = "the start" if self.round_number is None else f"round {self.round_number}"
        return f"{place} ({self.what})" if self.what else place

    def account(self) -> str:
        """What the rank does, as text that follows its name."""
        if self.state == ENDS:
            return "has ended" + ("" if self.round_number is None else f"; its last round was {self.round_number}")
        if self.state == GAVE_UP:
            return f"gave up waiting in {self.place()}"
        of_run = f" of {self.run}" if self.run else ""
        return f"waits in {self.place()}{of_run}: the ranks do not call the same things equally often"

    def to_bytes(self) -> bytes:
        """As text, for another rank."""
        return json.dumps(dataclasses.astuple(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> Word:
        """What ``to_bytes`` gave."""
        return cls(*json.loads(data))


class Noticeboard(abc.ABC):
    """One word of each of the K ranks of a process set.

    Attributes:
        size: K.
        mine: this rank's, as it is; others learn of it by ``tell``.
        ends: whether this rank's exchange ends by its own doing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.mine = Word(GOES_ON, None, "", "")
        self.ends = False
        self._told = self.mine
        _watch_for_the_end()
        _boards.add(self)

    def tell(self) -> None:
        """Let the others know ``mine``. Not collective; waits for nobody."""
        self._told = self.mine
        self._tell()

    def take_back(self) -> None:
        """Let the others know that this rank goes on, if they believe something else. Not collective."""
        self.mine = dataclasses.replace(self.mine, state=GOES_ON)
        if self._told.state != GOES_ON:
            self.tell()

    @abc.abstractmethod
    def _tell(self) -> None: ...

    @abc.abstractmethod
    def somebody_waits(self) -> bool:
        """Whether another rank has told that it waits. Cheap; not collective."""

    @abc.abstractmethod
    def read(self) -> dict[int, Word | None]:
        """The latest word of every other rank that could be read, in rank order; None of one that has told nothing."""

    @abc.abstractmethod
    def hear_last_words(self) -> dict[int, Word | None]:
        """Horovod has failed under this rank: ``read`` after a second at most, in which others can say why."""

    def leave(self) -> None:  # noqa: B027  (some boards hear of the end otherwise)
        """This rank is about to shut Horovod down. Not collective."""

    def last_word(self) -> Word:
        """What this rank says when its exchange ends."""
        state = ENDS if self.ends and self.mine.state != GAVE_UP else self.mine.state
        return dataclasses.replace(self.mine, state=state, final=True)


_boards: weakref.WeakSet[Noticeboard] = weakref.WeakSet()
_watching = False


def _watch_for_the_end() -> None:
    # Registered after Horovod's own function, which shuts it down, and so called before it.
    global _watching
    if not _watching:
        _watching = True
        atexit.register(leave)


def leave() -> None:
    """This rank ends, or shuts Horovod down: who waits for it is told so. Not collective."""
    for board in list(_boards):
        board.ends = True
        board.leave()
