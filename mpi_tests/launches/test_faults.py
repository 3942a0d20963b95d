"""The fault table: what a job of three ranks does when rank 1 does something wrong.

    python mpi_tests/launches/test_faults.py

prints it, every fault over MPI, mpi4py and Gloo: what each rank said, the job's exit status, and the seconds from the
fault to the end. As tests, each fault runs once or twice.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))  # when run as a script

from launcher import EXPIRED, LEFT_RUNNING, launch

FAULTY = os.path.join(os.path.dirname(__file__), "faulty.py")
RANKS = 3
LIMIT = 120.0  # seconds for a whole job, on a busy machine
STALL_LIMIT = 8.0  # seconds, as in faulty.py
SECONDS_TO_END = 40.0  # of a job, after the last rank was told, on a busy machine; Horovod says that it stalls after 60

MPI = ("mpirun", "-np", str(RANKS))
GLOO = ("horovodrun", "--disable-cache", "--gloo", "-np", str(RANKS))
LAUNCHES = {
    "MPI": (MPI, "horovod"),
    "MPI, mpi4py": (MPI, "mpi"),
    "Gloo": (GLOO, "horovod"),
}


@dataclasses.dataclass(frozen=True)
class Observed:
    """What became of a job.

    Attributes:
        said: by rank, all that it printed.
        launcher_said: the rest of the job's output.
        status: exit status.
        seconds: from the fault to the end; from the beginning where the fault did not come to be told.
    """

    said: list[str]
    launcher_said: str
    status: int
    seconds: float


@functools.cache
def observe(fault: str, how: str) -> Observed:
    """Run the job, once."""
    command, transport = LAUNCHES[how]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.time()
        done = launch([*command, sys.executable, FAULTY, fault, folder, "--transport", transport], LIMIT)
        end = time.time()
        files = [Path(folder, str(rank)) for rank in range(RANKS)]
        said = [file.read_text() if file.exists() else "" for file in files]
    happened = re.search(r"does it at ([\d.]+)", "".join(said))
    observed = Observed(said, done.output, done.status, end - (float(happened[1]) if happened else begin))
    assert observed.status not in (EXPIRED, LEFT_RUNNING), observed
    return observed


def gist(text: str) -> str:
    """What a rank said that matters: its warnings, its last error, how it ended. Horovod's explanation is cut short."""
    text = re.sub(r"(Horovod has been shut down\.) This was .*", r"\1", text)
    warnings = re.findall(r"^(rank \d: .*)$", text, re.MULTILINE)
    errors = re.findall(r"^(?:[\w.]+\.)?(\w+(?:Error|Exit): .*)$", text, re.MULTILINE)
    done = re.findall(r"says: (done: .*)$", text, re.MULTILINE)
    return " / ".join([*warnings, *errors[-1:], *done]) or "nothing"


# Faults that end the job, or hold it up -------------------------------------------------------------------------------

OTHERS = (0, 2)


def ends_within(observed: Observed, seconds: float) -> None:
    assert observed.status != 0, observed
    assert observed.seconds < seconds, observed


def test_exception() -> None:
    """CASES 3. The first cause is there, and the others say who has left, and in which round."""
    observed = observe("exception", "MPI")
    ends_within(observed, SECONDS_TO_END)
    assert "RuntimeError: this rank has had enough" in observed.said[1]
    told = [text for rank, text in enumerate(observed.said) if rank in OTHERS and "round 6" in text]
    assert told, observed
    assert all("rank 1 has ended; its last round was 5" in text for text in told), observed


def test_broken_thread() -> None:
    """CASES 6. The background thread of one rank breaks: its step() says so, and the others' that it has left."""
    observed = observe("broken-thread", "MPI, mpi4py")
    ends_within(observed, SECONDS_TO_END)
    assert "MpiTransportError: rank 1, hvd_slim.1: the thread broke" in observed.said[1], observed
    told = [text for rank, text in enumerate(observed.said) if rank in OTHERS and "round 6" in text]
    assert all("rank 1 has ended; its last round was" in text for text in told), observed


def test_killed() -> None:
    """CASES 3. The launcher says which rank, and ends the others before they can."""
    observed = observe("killed", "MPI")
    ends_within(observed, SECONDS_TO_END)
    assert re.search("rank 1 .*signal 9", observed.launcher_said), observed


def test_stopped() -> None:
    """CASES 4: one warning, which names the rank and the round; then training goes on."""
    observed = observe("stopped", "Gloo")
    assert observed.status == 0, observed
    for rank in OTHERS:
        warnings = re.findall(r"^rank \d: waiting .*round [6-9].*$", observed.said[rank], re.MULTILINE)
        assert len(warnings) == 1, observed
        assert "round 6 (core): rank 1 has not come to it" in warnings[0]
    ends = {re.findall(r"done: round 10, sum \S+", text)[0] for text in observed.said}
    assert len(ends) == 1, observed


def test_skipped_step() -> None:
    """CASES 2. The loops end apart: rank 1 waits for the others in a collective of the user's own."""
    observed = observe("skipped-step", "MPI")
    ends_within(observed, STALL_LIMIT + SECONDS_TO_END)
    warned = [rank for rank in OTHERS if "round 9 (core): rank 1 has not come to it" in observed.said[rank]]
    assert warned == list(OTHERS), observed
    assert any("StalledError" in observed.said[rank] for rank in OTHERS), observed


def test_extra_step() -> None:
    """CASES 2."""
    observed = observe("extra-step", "Gloo")
    ends_within(observed, STALL_LIMIT + SECONDS_TO_END)
    assert "round 10 (core): ranks 0, 2 have not come to it" in observed.said[1], observed
    assert "StalledError: rank 1" in observed.said[1], observed


@pytest.mark.parametrize("how", ["MPI", "Gloo"])
def test_early_end(how: str) -> None:
    """CASES 2. Rank 1 leaves the loop, shuts Horovod down and ends well."""
    observed = observe("early-end", how)
    ends_within(observed, SECONDS_TO_END)
    told = [text for rank, text in enumerate(observed.said) if rank in OTHERS and "HorovodInternalError: rank" in text]
    assert told, observed
    assert all("in round 6" in text and "rank 1 has ended; its last round was 5" in text for text in told), observed


def test_lone_resync() -> None:
    """CASES 2. All ranks wait, but not for the same: that is known before the limit."""
    observed = observe("lone-resync", "MPI")
    ends_within(observed, SECONDS_TO_END)
    told = [text for text in observed.said if "StalledError" in text]
    assert told, observed
    assert all("No rank can go on" in text for text in told), observed
    assert any("waits in round 9 (resync)" in text or "waits in round 10 (core)" in text for text in told), observed


# Faults after which all can go on -------------------------------------------------------------------------------------

#: (row, what every rank is told; None where that is nothing)
ROWS: list[tuple[str, str | None]] = [
    ("shape", r"parameter 'second': rank 0 has shape 5, .*rank 1 has shape 6"),
    ("dtype", r"parameter 'second': rank 0 has shape 5, dtype float32, rank 1 has shape 5, dtype float64"),
    ("order", r"rank 0 has parameter 'first'.*rank 1 has parameter 'second'"),
    ("option", r"comm_fraction: rank 0 has 0\.3, rank 1 has 0\.4"),
    ("seed", r"seed: rank 0 has 0, rank 1 has 7"),
    ("learning rate", r"learning rates differ: rank 0 steps with \[0\.05\], rank 1 with \[0\.01\]"),
    ("NaN", r"NonFiniteError: .*rank 1 has a NaN or an infinity"),
    ("Inf", r"NonFiniteError: .*rank 1 has a NaN or an infinity"),
    ("missing gradient", None),
]
SECONDS_TO_BE_TOLD = 40.0  # on a busy machine


def of_row(row: str, how: str) -> list[tuple[float, str]]:
    """(seconds, what it was told) of every rank."""
    told = [re.findall(rf"says: <{row}> ([\d.]+) s: (.*)", text) for text in observe("several", how).said]
    assert [len(lines) for lines in told] == [1] * RANKS, observe("several", how)
    return [(float(lines[0][0]), lines[0][1]) for lines in told]


@pytest.mark.parametrize("how", ["MPI, mpi4py", "Gloo"])
@pytest.mark.parametrize(("row", "told"), ROWS, ids=[row for row, _ in ROWS])
def test_faults_that_all_ranks_are_told(row: str, told: str | None, how: str) -> None:
    """CASES 1, 16, 19, 37. Every rank hears of the difference, soon; with a missing gradient there is none."""
    heard = of_row(row, how)
    listeners = heard[:1] if row == "learning rate" else heard  # a warning comes from rank 0 alone
    for seconds, text in listeners:
        assert seconds < SECONDS_TO_BE_TOLD
        assert re.search(told, text) if told else text == "nothing", heard


@pytest.mark.parametrize("how", ["MPI, mpi4py", "Gloo"])
def test_all_go_on_after_them(how: str) -> None:
    observed = observe("several", how)
    assert observed.status == 0, observed
    assert all("done: replicas equal" in text for text in observed.said), observed


# The table ------------------------------------------------------------------------------------------------------------

TABLE = [
    *(("exception", how) for how in LAUNCHES),
    ("broken-thread", "MPI, mpi4py"),
    *(("killed", how) for how in LAUNCHES),
    *(("stopped", how) for how in LAUNCHES),
    *(("skipped-step", how) for how in LAUNCHES),
    *(("extra-step", how) for how in LAUNCHES),
    *(("early-end", how) for how in LAUNCHES),
    ("lone-resync", "MPI"),
    ("lone-resync", "Gloo"),
]


def print_table() -> None:
    """All rows, as Markdown."""
    print("| fault of rank 1 | over | rank 0 | rank 1 | rank 2 | exit status | seconds to the end |")
    print("|---|---|---|---|---|---|---|")
    for fault, how in TABLE:
        observed = observe(fault, how)
        said = " | ".join(gist(text) for text in observed.said)
        blamed = re.search(r".*(?:signal 9|exit.* 137).*", observed.launcher_said)
        status = f"{observed.status}; {blamed[0].strip()}" if blamed else str(observed.status)
        print(f"| {fault} | {how} | {said} | {status} | {observed.seconds:.1f} |", flush=True)
    for how in LAUNCHES:
        for row, _ in ROWS:
            heard = of_row(row, how)
            said = " | ".join(text for _, text in heard)
            seconds = max(seconds for seconds, _ in heard)
            print(f"| {row} | {how} | {said} | {observe('several', how).status} | {seconds:.2f} to be told |")


if __name__ == "__main__":
    print_table()
