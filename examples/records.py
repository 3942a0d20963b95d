"""What a run leaves behind, and reading it again: JSON lines, tables, charts' files. Needs no Horovod.

Files appear whole or not at all: they are written under a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path in the same folder; it takes the place of ``path`` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_record(path: str | Path, record: Record) -> None:
    """Add one run to a file of JSON lines. One writer at a time."""
    before = Path(path).read_bytes() if Path(path).exists() else b""
    with replacing(path) as temporary:
        temporary.write_bytes(before + json.dumps(record, allow_nan=False).encode() + b"\n")


def read_records(path: str | Path) -> list[Record]:
    """The runs in a file of JSON lines; none if there is no such file.

    Raises:
        ValueError: a line is not JSON; the message names file and line.
    """
    if not Path(path).exists():
        return []
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not a run ({error}); remove the line") from None
    return records


def recorded_command(argv: Sequence[str]) -> str:
    """The command of a run without what does not change its result: where it is logged, and the progress bar."""
    kept, arguments = [], iter(argv)
    for argument in arguments:
        if argument == "--json-out":
            next(arguments, None)
        elif argument not in ("--progress", "--no-progress") and not argument.startswith("--json-out="):
            kept.append(argument)
    return shlex.join(("python", *kept))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well on a terminal; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths)))
        return "| " + " | ".join((first, *others)) + " |"

    rule = "| " + " | ".join("-" * w if not i else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return "\n".join((line(header), rule, *map(line, rows)))


def megabytes(count: float) -> str:
    """Bytes as text, in megabytes (10^6)."""
    return f"{count / 1e6:,.1f} MB"


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
