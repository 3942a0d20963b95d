"""The two kinds of noticeboard: MPI messages beside Horovod's, and the key-value store of ``horovodrun --gloo``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from hvd_slim.noticeboard import WAITS, Noticeboard, Word
from hvd_slim.transport.base import Transport
from hvd_slim.transport.mpi_environment import MpiTransportError, agree_on_mpi, before_mpi_ends

_SECONDS_TO_HEAR = 1.0  # for last words
_SECONDS_TO_READ = 2.0  # for all that the store holds, and for one answer of it
_PAUSE = 0.01  # seconds

#: by the members' ranks in Horovod; None where MPI cannot be used: what the members found is the same for all of them
_mpi_boards: dict[tuple[int, ...], MpiNoticeboard | None] = {}


def connect(hvd: Any, members: Transport, ranks: Sequence[int], name: str) -> Noticeboard | None:
    """A noticeboard for the ranks of a process set, if there is something to make it of.

    Collective the first time that these ranks ask for one, under MPI.

    Args:
        hvd: ``horovod.torch``.
        members: between the members.
        ranks: theirs among all processes, ascending.
        name: of the transport that it is for, the same on all ranks and unlike any other.
    """
    if members.size == 1:
        return None
    if not (hvd.mpi_built() and hvd.mpi_enabled()):
        address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}") for part in ("ADDR", "PORT"))
        return StoreNoticeboard(f"{address}:{port}", name, members.rank, members.size) if address and port else None
    key = tuple(ranks)
    if key not in _mpi_boards:
        try:
            mpi, world_ranks = agree_on_mpi(hvd, members)
        except MpiTransportError:
            _mpi_boards[key] = None
        else:
            _mpi_boards[key] = MpiNoticeboard(mpi, world_ranks)
    return _mpi_boards[key]


class MpiNoticeboard(Noticeboard):
    """Small messages from rank to rank on a communicator of their own, read when one looks. Collective to build.

    MPI delivers those between two ranks in order, so the last one counts. A message is too short to wait for its
    receiver. Before MPI ends, all ranks exchange a last one, so that none is left on its way.
    """

    def __init__(self, mpi: Any, world_ranks: Sequence[int]) -> None:
        super().__init__(len(world_ranks))
        self._mpi = mpi
        self._communicator = mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.Get_group().Incl(world_ranks))
        self._communicator.Set_errhandler(mpi.ERRORS_RETURN)
        rank = self._communicator.Get_rank()
        self._words: dict[int, Word | None] = {other: None for other in range(self.size) if other != rank}
        self._lock = threading.Lock()  # around every use of MPI, which a thread of Horovod's may end
        self._ended = threading.Event()
        self._sending: list[Any] = []
        if not _open_boards:
            before_mpi_ends(mpi, _close_boards)
        _open_boards.append(self)

    def _tell(self) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._send(self.mine)

    def somebody_waits(self) -> bool:
        """Whether another rank has told that it waits. Cheap; not collective."""
        return any(word is not None and word.state == WAITS for word in self.read().values())

    def read(self) -> dict[int, Word | None]:
        """The latest word of every other rank, in rank order; None of one that has told nothing."""
        with self._lock:
            if not self._ended.is_set():
                self._receive()
            return dict(self._words)

    def hear_last_words(self) -> dict[int, Word | None]:
        """``read``, after a second at most, in which Horovod ends MPI and all ranks say why."""
        if not self._ended.wait(_SECONDS_TO_HEAR):  # it was not Horovod that began MPI: another may take its time
            self.tell()
        return self.read()

    def say_last_word(self) -> None:
        """The first half of the end."""
        with self._lock:
            self._send(self.last_word())

    def close(self, deadline: float) -> None:
        """The second half: hear all others' last words, until ``deadline`` at most."""
        with self._lock:
            self._receive()
            while not all(word is not None and word.final for word in self._words.values()):
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE)
                self._receive()
            self._ended.set()

    def _send(self, word: Word) -> None:
        message = word.to_bytes()
        self._sending = [request for request in self._sending if not request.Test()]
        self._sending += [self._communicator.Isend([message, self._mpi.BYTE], rank) for rank in self._words]

    def _receive(self) -> None:
        status = self._mpi.Status()
        while self._communicator.Iprobe(status=status):
            message = bytearray(status.Get_count(self._mpi.BYTE))
            self._communicator.Recv([message, self._mpi.BYTE], status.Get_source())
            self._words[status.Get_source()] = Word.from_bytes(message)
        self._sending = [request for request in self._sending if not request.Test()]


_open_boards: list[MpiNoticeboard] = []


def _close_boards() -> None:
    for board in _open_boards:
        board.say_last_word()
    deadline = time.monotonic() + _SECONDS_TO_HEAR
    for board in _open_boards:
        board.close(deadline)


class StoreNoticeboard(Noticeboard):
    """Entries in the store over which ``horovodrun --gloo`` lets its workers find each other.

    One request a rank and entry; the server answers a few hundred in a second, so ``read`` stops after two.
    """

    def __init__(self, server: str, name: str, rank: int, size: int) -> None:
        super().__init__(size)
        self._url = f"http://{server}/{name}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is of this job
        self._rank, self._others = rank, [other for other in range(size) if other != rank]
        self._final = False

    def _tell(self) -> None:
        self._put(str(self._rank), self.mine)
        if self.mine.state == WAITS:
            self._put("somebody", self.mine)

    def somebody_waits(self) -> bool:
        """Whether another rank has told that it waits, now or earlier. Cheap; not collective."""
        try:
            return self._get("somebody") is not None
        except OSError:
            return False

    def read(self) -> dict[int, Word | None]:
        """The latest word of every other rank that could be read, in rank order; None of one that has told nothing."""
        words: dict[int, Word | None] = {}
        deadline = time.monotonic() + _SECONDS_TO_READ
        for rank in self._others:
            try:
                words[rank] = self._get(str(rank))
            except OSError:
                return words
            if time.monotonic() > deadline:
                break
        return words

    def hear_last_words(self) -> dict[int, Word | None]:
        """``read``, after a second at most, in which others that have seen the same failure say so."""
        self._final = True
        self._put(str(self._rank), self.last_word())
        deadline = time.monotonic() + _SECONDS_TO_HEAR
        while True:
            words = self.read()
            if all(word is not None and word.final for word in words.values()) or time.monotonic() > deadline:
                return words
            time.sleep(10 * _PAUSE)

    def leave(self) -> None:
        """Who may be waiting is told; a rank that has failed has said so."""
        if not self._final:
            self._final = True
            self._put(str(self._rank), self.last_word())

    def _put(self, key: str, word: Word) -> None:
        request = urllib.request.Request(f"{self._url}/{key}", data=word.to_bytes(), method="PUT")
        with contextlib.suppress(OSError):  # the job is ending, and nobody can be told
            self._opener.open(request, timeout=_SECONDS_TO_READ).close()

    def _get(self, key: str) -> Word | None:
        """The entry, None if there is none; OSError if the server does not answer."""
        try:
            with self._opener.open(f"{self._url}/{key}", timeout=_SECONDS_TO_READ) as answer:
                return Word.from_bytes(answer.read())
        except urllib.error.HTTPError:
            return None
