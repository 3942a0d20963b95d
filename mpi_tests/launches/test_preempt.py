"""CASES 33: SIGTERM on one rank of the example; all ranks agree, resync, save, and exit together; then it goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launcher import Finished, launch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "resume_and_preempt.py")
LAUNCHER = str(ROOT / "mpi_tests" / "launcher.py")
LIMIT = 150.0  # seconds for a job, on a busy machine
PREEMPTED = 75
OPTIONS = ["--epochs", "2", "--steps-per-epoch", "200", "--batch-size", "4", "--vote-every", "5"]
OPTIONS += ["--comm-fraction", "0.2", "--core-fraction", "0.1", "--reselect-every", "7"]

sys.path.insert(0, str(ROOT / "examples"))
from datasets import default_folder  # noqa: E402

pytestmark = pytest.mark.skipif(
    not Path(default_folder(), "train-images-idx3-ubyte.gz").exists(), reason="Fashion-MNIST is not on this machine"
)


def command(folder: Path, *options: str, ranks: int = 2) -> list[str]:
    return ["mpirun", "-np", str(ranks), sys.executable, EXAMPLE, "--folder", str(folder), *OPTIONS, *options]


def ranks_of(job: subprocess.Popen[bytes]) -> Iterator[psutil.Process]:
    """The Python processes of the example, in order of their ranks."""
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("python") and EXAMPLE in process.cmdline():
                yield process


def preempted(folder: Path, output: Path, number: signal.Signals, rank: int) -> Finished:
    """The job, with the signal sent to ``rank`` as soon as it trains."""
    begin = time.monotonic()
    with open(output, "wb") as stream:
        job = subprocess.Popen(
            [sys.executable, LAUNCHER, "--limit", str(LIMIT), "--", *command(folder)],
            stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        while "training: process" not in output.read_text() and job.poll() is None:
            time.sleep(0.05)
        first = int(re.findall(r"training: process (\d+) is rank 0", output.read_text())[0])
        processes = [process for process in ranks_of(job) if (process.pid == first) == (rank == 0)]
        assert len(processes) == 1
        processes[0].send_signal(number)
        status = job.wait(LIMIT + 30)
    return Finished(status, output.read_text(), time.monotonic() - begin)


def sums(finished: Finished) -> list[str]:
    """The checksums of a job that came to its end."""
    assert finished.status == 0, finished.output
    return re.findall(r"checksums of the ranks' parameters: (.*)", finished.output)[0].split()


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 0)], ids=["TERM-1", "USR1-0"])
def test_stopped_and_resumed(number: signal.Signals, rank: int, tmp_path: Path) -> None:
    """The same bits as a run that never stopped, but resynced at the same step."""
    folder = tmp_path / "checkpoints"
    stopped = preempted(folder, tmp_path / "output", number, rank)
    assert stopped.status == PREEMPTED, stopped.output
    step = int(re.findall(r"stopped and saved after step (\d+)", stopped.output)[0])
    assert step % 5 == 0
    assert sorted(os.listdir(folder)) == ["latest", f"step{step}.rank0of2.pt", f"step{step}.rank1of2.pt"]

    resumed = launch(command(folder), LIMIT)
    assert f"resumed after step {step}" in resumed.output, resumed.output
    never_stopped = launch(command(tmp_path / "none", "--resync-at", str(step)), LIMIT)
    assert sums(resumed) == sums(never_stopped)
    assert len(set(sums(resumed))) == 2, "replicas of a slim run drift apart: the checksums are of the live parameters"
    assert not (tmp_path / "none").exists()

    if rank == 0:
        other = launch(command(folder, ranks=3), LIMIT)
        assert f"resumed after step {step * 2 // 3}" in other.output, other.output
        assert len(sums(other)) == 3
