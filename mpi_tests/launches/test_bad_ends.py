"""A rank that is killed or raises in the middle of training ends the job, within seconds, and nothing is left of it."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from launcher import EXPIRED, LEFT_RUNNING, launch

TRAIN = os.path.join(os.path.dirname(__file__), "train.py")
LIMIT = 180.0  # seconds for the whole job, on a busy machine
SECONDS_TO_END = 50.0  # from the bad end of one rank to the end of the job, on a busy machine

every_launcher = pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["mpirun"], id="mpirun"),
        pytest.param(["horovodrun", "--disable-cache"], id="horovodrun with MPI"),
        pytest.param(["horovodrun", "--disable-cache", "--gloo"], id="horovodrun with Gloo"),
    ],
)


def bad_end(launcher: list[str], how: str, folder: Path) -> str:
    """What reached the launcher from the last of three ranks, which comes to a bad end; the job ends as it should.

    The launcher prints it, too, but may put what others say in the middle of it.
    """
    arguments = ["--output-filename", str(folder), "-np", "3", sys.executable, TRAIN, how]
    finished = launch([*launcher, *arguments], LIMIT)
    ended = time.time()
    assert finished.status not in (0, EXPIRED, LEFT_RUNNING), finished.output
    said = "".join(file.read_text() for file in folder.glob("**/rank.2/*"))
    happened = re.search(r"bad end at ([\d.]+)", said)
    assert happened, finished.output
    assert ended - float(happened[1]) < SECONDS_TO_END, finished.output
    return said


@every_launcher
def test_a_rank_is_killed(launcher: list[str], tmp_path: Path) -> None:
    """CASES 3."""
    bad_end(launcher, "killed", tmp_path)


@every_launcher
def test_a_rank_raises(launcher: list[str], tmp_path: Path) -> None:
    """CASES 3. The first cause is visible, too."""
    assert "RuntimeError: this rank has had enough" in bad_end(launcher, "raises", tmp_path)
