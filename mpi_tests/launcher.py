"""Runs one command, usually a job of several ranks, under a time limit, and leaves no process of it behind.

    python mpi_tests/launcher.py --limit 300 -- mpirun -np 2 python worker.py

The exit status is the command's; 124 when the limit was reached, after the Python stacks of every rank have been
printed; 125 when the command ended but processes that it had started did not. A rank shows its stacks if it has
registered them: ``faulthandler.register(signal.SIGUSR1, all_threads=True)``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType

import psutil

EXPIRED = 124
LEFT_RUNNING = 125

_PR_SET_CHILD_SUBREAPER = 36
GRACE = 20.0  # seconds for processes that were asked to end, or whose job has ended; on a busy machine

_SECONDS_TO_PRINT = 2.0  # for one rank's stacks to come through the job's own pipes
_SECONDS_TO_TAKE = 10.0  # for one rank to take a signal


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a launch went: exit status as above, standard output and error together, wall-clock seconds."""

    status: int
    output: str
    seconds: float


#: beginnings of names: what tells a process that it is part of a job, and what changes how Horovod or Python behave
_OTHERS_SETTINGS = ("OMPI_COMM", "PMI", "SLURM_", "HOROVOD_", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "PYTEST_ADDOPTS")


def forget_settings() -> None:
    """Hand nothing of the job or shell that this process runs in to the jobs and commands that it starts."""
    for name in list(os.environ):
        if name.startswith(_OTHERS_SETTINGS):
            del os.environ[name]


def apart(command: Sequence[str], folder: str | os.PathLike[str]) -> list[str]:
    """``command`` for the ranks of a job, with all that rank k prints in the file ``folder``/k.

    A launcher may put what one rank prints in the middle of another's line.
    """
    script = 'folder="$1"; shift; exec "$@" >"$folder/${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}" 2>&1'
    return ["sh", "-c", script, "sh", str(folder), *command]


def launch(command: Sequence[str], limit: float, grace: float = GRACE) -> Finished:
    """Run ``command`` under ``limit`` seconds by a launcher of its own, and keep its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        begin = time.monotonic()
        launcher = [sys.executable, os.path.abspath(__file__), "--limit", str(limit), "--grace", str(grace), "--"]
        done = subprocess.run([*launcher, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        seconds = time.monotonic() - begin
        output.seek(0)
        return Finished(done.returncode, output.read(), seconds)


def supervise(command: Sequence[str], limit: float, grace: float = GRACE) -> int:
    """Run ``command`` in a session of its own, its output going where ours goes; the exit status as above."""
    # Orphans become children of this process, so that whatever the command starts can be found and ended.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    with tempfile.TemporaryDirectory(prefix="hvd_slim.") as scratch:
        job = subprocess.Popen(command, env=_environment(scratch), stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            status = job.wait(limit)
            left = _wait_for_end(job, grace)
            for process in left:
                _say(f"still running after the command had ended: {_describe(process)}")
            return LEFT_RUNNING if left else status if status >= 0 else 128 - status
        except subprocess.TimeoutExpired:
            _say(f"not finished after {limit:g} seconds: {' '.join(command)}")
            _print_stacks(job)
            return EXPIRED
        finally:
            _end_all(job, grace)


def _environment(scratch: str) -> dict[str, str]:
    """One thread a rank, ranks that wait give way, and temporary files (Open MPI's too) in ``scratch``."""
    environment = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # Without a buffer Python prints a line in pieces, between which other ranks' may come.
    environment.pop("PYTHONUNBUFFERED", None)
    environment |= {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment


def has_signal(signals: str, pid: int, number: signal.Signals) -> bool:
    """Whether the process has the signal among its ``SigCgt``, for which it has a handler, or ``ShdPnd``, to come."""
    with open(f"/proc/{pid}/status") as lines:
        mask = next(line for line in lines if line.startswith(f"{signals}:")).split()[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


def _descendants(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Every process that runs below this one. Those that have ended are reaped on the way."""
    running = []
    job.poll()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
            elif process.pid != job.pid:
                os.waitpid(process.pid, os.WNOHANG)
    return running


def _wait_for_end(job: subprocess.Popen[bytes], grace: float) -> list[psutil.Process]:
    """What still runs after ``grace`` seconds."""
    deadline = time.monotonic() + grace
    while (running := _descendants(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running


def _end_all(job: subprocess.Popen[bytes], grace: float) -> None:
    """Ask every descendant to end, then make it."""
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for process in _descendants(job):
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(process)
        _wait_for_end(job, grace)


def _print_stacks(job: subprocess.Popen[bytes]) -> None:
    for process in _descendants(job):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
            # The launchers pass SIGUSR1 on to every rank, and it ends a process that does not expect it.
            if os.path.basename(process.exe()).startswith("python") and has_signal(
                "SigCgt", process.pid, signal.SIGUSR1
            ):
                _say(f"stacks of {_describe(process)}")
                process.send_signal(signal.SIGUSR1)
                deadline = time.monotonic() + _SECONDS_TO_TAKE
                while has_signal("ShdPnd", process.pid, signal.SIGUSR1) and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(_SECONDS_TO_PRINT)


def _describe(process: psutil.Process) -> str:
    try:
        environment, command = process.environ(), " ".join(process.cmdline())
    except psutil.Error:
        environment, command = {}, "?"
    rank = environment.get("OMPI_COMM_WORLD_RANK", environment.get("HOROVOD_RANK"))
    return f"process {process.pid}{'' if rank is None else f' (rank {rank})'}: {command[:200]}"


def _end_on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(f"[launcher] {text}", file=sys.stderr, flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, required=True, help="seconds that the command may take")
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds that what it started may outlive it")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("no command given; put it after --")
    return supervise(command, arguments.limit, arguments.grace)


if __name__ == "__main__":
    raise SystemExit(main())
