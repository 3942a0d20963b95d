"""What a run leaves behind, and reading it again: files that appear whole, JSON lines, tables. Needs no Horovod."""

from __future__ import annotations

import contextlib
import json
import math
import os
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
    """The objects in a file of JSON lines; none if there is no such file.

    Raises:
        ValueError: a line is not a JSON object; the message names file and line.
    """
    if not Path(path).exists():
        return []
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not a run ({error}); remove the line") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is not a run but a {type(record).__name__}; remove the line")
        records.append(record)
    return records


def finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON has not, as None: a run that diverged is recorded too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table that also reads well on a terminal; the first ``left`` columns lean left, the others right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths)))
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join("-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return "\n".join((line(header), rule, *map(line, rows)))


def megabytes(count: float) -> str:
    """Bytes as text, in megabytes (10^6)."""
    return f"{count / 1e6:,.1f} MB"
