"""When nothing goes wrong, nothing is said: by torch, Horovod, MPI or the add-on. And Horovod's own tools may be on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launcher import apart, launch

HERE = Path(__file__).resolve().parent
CLEAN = str(HERE / "clean.py")
LIMIT = 200.0  # seconds, on a busy machine
RANKS = 2


@pytest.mark.parametrize(
    "launcher",
    [["mpirun"], ["horovodrun", "--disable-cache", "--gloo"]],
    ids=["mpirun", "horovodrun with Gloo"],
)
def test_nothing_is_said(launcher: list[str], tmp_path: Path) -> None:
    """CASES 38. Not a warning, no generator moves, no operation in flight, no thread left. By no rank, nor about it."""
    ranks = apart([sys.executable, "-W", "error", CLEAN], tmp_path)
    finished = launch([*launcher, "-np", str(RANKS), *ranks], LIMIT)
    said = [file.read_text() for file in sorted(tmp_path.iterdir())]
    assert (finished.status, said, finished.output) == (0, ["clean\n"] * RANKS, "")


def test_autotuner_and_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 49. Tests of ranks pass with both on, and the rounds are in the timeline by name."""
    timeline, tests = tmp_path / "timeline.json", HERE.parent / "ranks"
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    monkeypatch.setenv("HOROVOD_TIMELINE", str(timeline))
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    monkeypatch.setenv("QUIET_RANKS", str(tmp_path))
    some = ["-k", "not random", "--timeout", str(LIMIT), str(tests / "test_checkpoint.py")]
    quiet = ["sh", str(HERE.parent / "quiet_ranks.sh"), sys.executable, "-m", "pytest", "-q", "-x", *some]
    # The autotuner tries long cycles, too: each operation then waits for up to a tenth of a second.
    finished = launch(["mpirun", "--mca", "mpi_yield_when_idle", "1", "-np", str(RANKS), *quiet], 2 * LIMIT)
    assert finished.status == 0, finished.output
    written = timeline.read_text()
    for phase in ("core", "explorer", "select", "resync"):
        assert f".{phase}" in written, phase
    assert os.path.getsize(timeline) > 10_000
