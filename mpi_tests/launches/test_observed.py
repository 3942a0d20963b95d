"""What a run lets one see: Horovod's timeline, the torch profiler, the log, with core, explorer and resync by name."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from launcher import Finished, launch

from hvd_slim.cli.runs import read_runs

PHASES = {"core", "explorer", "resync", "select"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def done(folder: Path) -> Finished:
    """A job of two ranks, with a timeline."""
    script = os.path.join(os.path.dirname(__file__), "observed.py")
    command = ["mpirun", "-np", "2", "-x", f"HOROVOD_TIMELINE={folder / 'timeline.json'}", sys.executable, script]
    finished = launch([*command, str(folder)], 120.0)
    assert finished.status == 0, finished.output
    return finished


def test_horovods_timeline_names_the_phases(done: Finished, folder: Path) -> None:
    """Each operation is a row of its own, called hvd_slim.NUMBER.PHASE."""
    timeline = (folder / "timeline.json").read_text()
    rows = set(re.findall(r"\.(hvd_slim\.\d+\.(\w+))\"", timeline))
    assert {phase for _, phase in rows} >= PHASES, rows


@pytest.mark.parametrize("rank", [0, 1])
def test_the_profiler_names_phases_and_activities(done: Finished, folder: Path, rank: int) -> None:
    names = {name.removeprefix("hvd_slim::") for name in (folder / f"profile.{rank}").read_text().split()}
    assert names >= PHASES | {"pack", "wait", "merge"}


def test_one_rank_writes_the_run(done: Finished, folder: Path) -> None:
    (run,) = read_runs([str(folder / "run.jsonl")])
    assert run.ranks == 2
    assert [point.step for point in run.points] == list(range(1, 13))
    assert all(run.last.bytes_by_phase[phase] > 0 for phase in PHASES)
    assert run.last.bytes_sent < run.last.dense_bytes


def test_what_concerns_all_ranks_is_logged_once(done: Finished) -> None:
    """Through the logger "hvd_slim", on rank 0 alone: the path that exchange="auto" took, and three warnings."""
    lines = [line.partition("LOG hvd_slim ")[2] for line in done.output.splitlines() if "LOG hvd_slim" in line]
    for expected in (
        "exchange='dense', slim would not be faster here",
        "the ranks start from different parameters; rank 0's are broadcast to all",
        "learning rates differ: rank 0 steps with",
        "the checkpoint was written with other hvd_slim options",
    ):
        assert sum(line.startswith(expected) for line in lines) == 1, done.output
    assert len(lines) == 4, lines
