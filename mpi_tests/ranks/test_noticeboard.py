"""CASES 2 and 4: whoever waits for long learns which rank is late, and a late rank costs one warning."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import horovod.torch
import pytest
import torch

import hvd_slim as hvd
from hvd_slim.noticeboard import GOES_ON, WAITS, Noticeboard, Word
from hvd_slim.stats import Stats
from hvd_slim.transport.horovod import HorovodTransport
from hvd_slim.transport.noticeboards import connect
from ranks.support import Case, Signs, flatten, set_gradients, slim

RANK, K = hvd.rank(), hvd.size()

needs_others = pytest.mark.skipif(K == 1, reason="needs other ranks")
transports = pytest.mark.parametrize("transport", ["horovod", "mpi"])


def make_board(name: str) -> Noticeboard:
    """Between all ranks. Collective."""
    members = HorovodTransport(name, None, Stats())
    board = connect(horovod.torch, members, range(K), name)
    if board is None:
        pytest.skip("launched so that there is nothing to make a noticeboard of")
    return board


@needs_others
def test_what_one_tells_the_others_read() -> None:
    """The latest word counts."""
    board = make_board("hvd_slim.test_board")
    hvd.barrier()
    told = [Word(WAITS, 7, "core", str(RANK)), Word(GOES_ON, 7, "core", str(RANK))]
    for board.mine in told:
        board.tell()
    hvd.barrier()
    others = {rank: Word(GOES_ON, 7, "core", str(rank)) for rank in range(K) if rank != RANK}
    deadline = time.monotonic() + 20.0
    while board.read() != others and time.monotonic() < deadline:
        time.sleep(0.01)
    assert board.read() == others
    hvd.barrier()


@needs_others
def test_members_of_a_process_set_have_a_board_of_their_own() -> None:
    if K < 3:
        pytest.skip("needs three ranks")
    process_set = hvd.add_process_set([0, K - 1])
    if process_set.included():
        members = HorovodTransport("hvd_slim.test_two", process_set, Stats())
        board = connect(horovod.torch, members, process_set.ranks, "hvd_slim.test_two")
        if board is not None:
            assert list(board.read()) == [1 - members.rank]
    hvd.barrier()
    assert hvd.remove_process_set(process_set)


class SignOfWarning(logging.Filter):
    """Lets everything pass, and the other ranks know."""

    def __init__(self, signs: Signs) -> None:
        super().__init__()
        self._signs = signs

    def filter(self, record: logging.LogRecord) -> bool:
        self._signs.give("warned")
        return True


@needs_others
@transports
def test_a_late_rank_is_named_once(transport: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By its rank and the round; it is not told anything itself, and training goes on."""
    if transport == "mpi" and not hvd.mpi_enabled():
        pytest.skip("launched with Gloo: there is no MPI to carry bytes")
    make_board("hvd_slim.test_late")  # or skip
    signs, late = Signs(tmp_path), K - 1
    case = Case("late", 5, {})
    named = case.parameters()
    # A rank that is not late comes less than five eighths of warn_after behind the first, on a busy machine too.
    optimizer = slim(named, transport=transport, warn_after=3.0, stall_limit=100.0)
    n = len(flatten(named.values()))

    def take_step(step: int) -> None:
        set_gradients(named.values(), case.gradient(RANK, step, n))
        optimizer.step()

    with caplog.at_level(logging.WARNING, "hvd_slim"):
        for step in range(3):
            take_step(step)
        hvd.barrier()
        caplog.clear()
        if late == RANK:
            signs.wait_for_others("warned")
        with caplog.filtering(SignOfWarning(signs)):
            take_step(3)
        said = [record.getMessage() for record in caplog.records]
        for step in range(4, 6):
            take_step(step)
    if late == RANK:
        assert said == []
    else:
        assert len(said) == 1, said
        expected = rf"rank {RANK}: waiting for \d+ s in round 3 \(core\): rank {late} has not come to it"
        assert re.match(expected, said[0]), said
    assert optimizer.stats()["rounds"] == 6


@needs_others
def test_ranks_that_wait_for_different_things_are_told_at_once() -> None:
    """Long before the limit; then both operations complete, as all ranks come to them."""
    make_board("hvd_slim.test_apart")
    named = Case("apart", 6, {}).parameters()
    optimizer = slim(named, warn_after=2.0, stall_limit=100.0)
    set_gradients(named.values(), Case("apart", 6, {}).gradient(RANK, 0, len(flatten(named.values()))))
    optimizer.step()
    transport = optimizer._slim.synchronizer().transport
    hvd.barrier()
    first, second = ("core", "resync") if RANK == 0 else ("resync", "core")
    begin = time.monotonic()
    pending = transport.allreduce(torch.ones(3), first)
    with pytest.raises(hvd.StalledError, match=r"round 0 \((core|resync)\).*No rank can go on"):
        pending.wait()
    assert time.monotonic() - begin < 60.0
    hvd.barrier()
    other = transport.allreduce(torch.ones(3), second)
    assert pending.wait().tolist() == other.wait().tolist() == [K] * 3
