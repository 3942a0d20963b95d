"""The command of a run, and running one on several processes. Needs no Horovod itself."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_slim.records import Record, append_record, megabytes, read_records, replacing, table

__all__ = [
    "Record",
    "append_record",
    "horovodrun",
    "megabytes",
    "read_records",
    "recorded_command",
    "replacing",
    "table",
]


#: options that do not change a run's result: where it is logged and saved
_VALUED = ("--json-out", "--tensorboard", "--checkpoint", "--checkpoint-every", "--stop-at")


def recorded_command(argv: Sequence[str]) -> str:
    """The command of a run without what does not change its result: where it is logged and saved, the progress bar."""
    kept, arguments = [], iter(argv)
    for argument in arguments:
        if argument in _VALUED:
            next(arguments, None)
        elif argument not in ("--progress", "--no-progress") and argument.partition("=")[0] not in _VALUED:
            kept.append(argument)
    return shlex.join(("python", *kept))


def horovodrun(ranks: int, command: Sequence[str], limit: float, folder: str | Path = ".") -> int:
    """Run ``command`` on ``ranks`` processes of this machine with this Python's horovodrun and MPI.

    More ranks than cores are fine: idle ranks give their core away (``mpi_yield_when_idle``).

    Args:
        limit: seconds after which the launch is ended.
        folder: where to run.

    Returns:
        The exit status; 124 when the limit was reached.
    """
    launcher = str(Path(sys.executable).with_name("horovodrun"))
    options = "--oversubscribe --mca mpi_yield_when_idle 1"
    run = [launcher, "--disable-cache", "-np", str(ranks), "--mpi", f"--mpi-args={options}", *command]
    # coreutils' timeout ends the launcher and whatever it started on this machine.
    process = subprocess.Popen(
        ["timeout", "--kill-after=30", str(limit), *run], env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder
    )
    try:
        return process.wait()
    finally:
        process.terminate()
        process.wait()
