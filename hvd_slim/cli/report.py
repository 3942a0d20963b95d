"""``hvd-slim report``: a page, or pictures, of what runs learned, sent and waited for."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hvd_slim
from hvd_slim.cli import charts, run_charts
from hvd_slim.cli.errors import OK, UsageError
from hvd_slim.cli.options import HelpFormatter
from hvd_slim.cli.page import page
from hvd_slim.cli.runs import Run, read_runs
from hvd_slim.config import SlimConfig
from hvd_slim.records import replacing, table

_EPILOG = """examples:
  hvd-slim report run.jsonl                                    run.html
  hvd-slim report dense.jsonl slim.jsonl --out compared.html   two runs in the same charts
  hvd-slim report run.jsonl --png pictures                     pictures/loss.png, pictures/time.png, ...

FILE holds JSON lines that hvd.TrainingLog wrote, or an example's --json-out.
"""
_HEADER = ("run", "ranks", "steps", "sent by each rank", "ratio to dense", "time", "ms a step")


def add_parser(verbs: Any) -> None:
    """``hvd-slim report``'s command line."""
    parser = verbs.add_parser(
        "report", help="make a page of a run's JSON lines", epilog=_EPILOG, description=__doc__,
        formatter_class=HelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON lines")
    parser.add_argument("--out", metavar="FILE", help="the page; by default beside the first file, ending in .html")
    parser.add_argument(
        "--png", metavar="FOLDER", help="write pictures into this folder; no page then, unless --out is given"
    )
    parser.add_argument(
        "--value", nargs="+", metavar="NAME", help='values to draw; by default those with "loss" in their name'
    )
    parser.add_argument("--title", help="of the page")


def run(args: argparse.Namespace) -> int:
    """Read, draw, write; print the table and what was written."""
    charts.require()
    runs = read_runs(args.files)
    values = _values(runs, args.value)
    drawn = run_charts.all_charts(runs, values)
    rows = [_row(one, values) for one in runs]
    header = (*_HEADER, *(value.replace("_", " ") for value in values))
    print(table(header, rows))
    if args.png:
        for chart in drawn:
            charts.write(chart.draw, Path(args.png) / f"{chart.name}.png")
            print(f"written: {Path(args.png) / chart.name}.png")
    if args.out or not args.png:
        out = Path(args.out) if args.out else Path(args.files[0]).with_suffix(".html")
        if out.suffix not in (".html", ".htm"):
            raise UsageError(f"--out {out} does not end in .html; pictures are written by --png FOLDER")
        title = args.title or f"Training report: {', '.join(Path(name).stem for name in args.files)}"
        counted = "Bytes are counted at the hand-over to the network" + (
            "" if all(one.counted for one in runs)
            else ", in dense runs what a ring allreduce of every gradient sends, for plain Horovod does not count"
        ) + "."  # fmt: skip
        text = page(title, counted, header, rows, drawn, _facts(runs), f"hvd_slim {hvd_slim.__version__}")
        _write(out, text)
        print(f"written: {out}")
    return OK


def _write(out: Path, text: str) -> None:
    try:
        with replacing(out) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error}") from None


def _values(runs: Sequence[Run], wanted: Sequence[str] | None) -> list[str]:
    """Which values to draw."""
    counts = Counter(name for run in runs for name in {name for point in run.points for name in point.values})
    if wanted:
        missing = [name for name in wanted if name not in counts]
        if missing:
            raise UsageError(f"no run has a value {missing[0]!r}; there are: {', '.join(sorted(counts)) or 'none'}")
        return list(wanted)
    return sorted(name for name in counts if "loss" in name.lower())


def _row(run: Run, values: Sequence[str]) -> list[str]:
    last = run.last
    seconds = last.seconds
    ratio = f"{last.bytes_sent / last.dense_bytes:.3f}" if last.dense_bytes else "-"
    cells = [run.name, str(run.ranks), f"{last.step:,}", f"{last.bytes_sent / 1e6:,.1f} MB", ratio]
    cells += ["-", "-"] if not seconds or not last.step else [_time(seconds), f"{1e3 * seconds / last.step:.3g}"]
    for value in values:
        of_run = [point.values[value] for point in run.points if value in point.values]
        cells.append(f"{of_run[-1]:.4g}" if of_run else "-")
    return cells


def _time(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{seconds:.1f} s" if seconds < 120 else f"{int(minutes)} min {rest:.0f} s"


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What each run was set to: what differs from the defaults."""
    facts = []
    defaults = SlimConfig().to_dict()
    for run in runs:
        changed = [f"{name} {value}" for name, value in (run.config or {}).items() if defaults.get(name) != value]
        what = "plain Horovod" if run.config is None else "slim, " + (", ".join(changed) or "all defaults")
        facts.append((run.name, f"{run.parameters:,} parameters; {what}"))
    return facts
