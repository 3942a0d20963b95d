"""Does it train as well? Runs a grid of methods on real tasks, and makes its tables and charts.

    python scripts/study.py list                        the groups, and which of their runs are there
    python scripts/study.py run frontier --seeds 0 1 2  trains what is missing; goes on where it was stopped
    python scripts/study.py show                        tables and charts of all that is there, into examples/results
    python scripts/study.py check --runs 2              trains recorded runs again and compares bits and bytes

Every run is one JSON line in --results: command, seed, curve, counted bytes. Times in it are those of a machine that
may have had other work; charts over time reckon it from counted bytes and a link's rate instead. ``study_grid.py`` says
what is run.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from records import Record, horovodrun, read_records, replacing  # noqa: E402
from study_grid import GROUPS  # noqa: E402
from study_pages import draw_curves, draw_frontier, find, found, markdown  # noqa: E402

RESULTS = ROOT / "examples" / "results"
#: tensors that are ready at the same time are not fused: which ones are is a matter of luck, and sums would differ
ENVIRONMENT = {"HOROVOD_FUSION_THRESHOLD": "0"}


# Runs ----------------------------------------------------------------------------------------------------------------


def train(ranks: int, command: Sequence[str], results: Path, limit: float) -> bool:
    """One launch; whether its line is in ``results``."""
    print(f"{ranks} ranks: python {shlex.join(command)}", flush=True)
    os.environ.update(ENVIRONMENT)
    status = horovodrun(ranks, [sys.executable, *command, "--json-out", str(results), "--no-progress"], limit, ROOT)
    return status == 0 and find(records_in(results), ranks, command) is not None


def records_in(results: Path) -> list[Record]:
    """The recorded runs, none if there is no file yet."""
    return list(read_records(results)) if results.exists() else []


def run(args: argparse.Namespace) -> int:
    """Train what is missing; 1 if a run failed."""
    labels = {row.label for name in args.groups for row in GROUPS[name].rows}
    unknown = sorted(set(args.rows or ()) - labels)
    if unknown:
        print(f"error: no row {unknown[0]!r} in {', '.join(args.groups)}; `list` shows the labels", file=sys.stderr)
        return 2
    failed = 0
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for name in args.groups:
            group = GROUPS[name]
            for row in group.rows:
                command = group.command(row, seed)
                wanted = not args.rows or row.label in args.rows
                if wanted and find(records_in(args.results), group.ranks, command) is None:
                    failed += not train(group.ranks, command, args.results, args.limit)
    if failed:
        print(f"error: {failed} run(s) failed; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


def list_groups(args: argparse.Namespace) -> int:
    """Say which runs are there."""
    records = records_in(args.results)
    for name, group in GROUPS.items():
        print(f"{name}: {group.title}")
        for row in group.rows:
            there = [seed for seed in range(10) if find(records, group.ranks, group.command(row, seed))]
            print(f"    {row.label}: {'seeds ' + ', '.join(map(str, there)) if there else 'not run'}")
    return 0


def check(args: argparse.Namespace) -> int:
    """Train some recorded runs again; 1 if bits or bytes differ."""
    records = records_in(args.results)
    if not records:
        print(f"error: {args.results} holds no runs", file=sys.stderr)
        return 2
    differ = 0
    for old in random.Random(args.pick).sample(records, min(args.runs, len(records))):
        with tempfile.TemporaryDirectory() as folder:
            again = Path(folder) / "again.jsonl"
            command = shlex.split(old["command"])[1:]
            if not train(old["ranks"], command, again, args.limit):
                return 1
            (new,) = records_in(again)
        same = all(new[key] == old[key] for key in ("checksum", "bytes_sent", old["metric"]))
        differ += not same
        print(f"{'the same bits and bytes' if same else 'DIFFERENT'}: {old['checksum']} then, {new['checksum']} now")
    return 1 if differ else 0


# Tables and charts ---------------------------------------------------------------------------------------------------


def show(args: argparse.Namespace) -> int:
    """Write tables and charts of what is there."""
    records = records_in(args.results)
    groups = {name: group for name, group in GROUPS.items() if len(list(found(group, records))) > 1 and name != "small"}
    if not groups:
        print(f"error: {args.results} holds no runs of the grid; `run` makes them", file=sys.stderr)
        return 2
    text = "\n".join(markdown(group, records) for group in groups.values())
    print(text)
    with replacing(args.out / "study.md") as temporary:
        Path(temporary).write_text(
            "# Tables of the study\n\nPrinted by `python scripts/study.py show` from study.jsonl.\n\n" + text
        )
    draw_frontier(groups, records, args.out / "frontier.png")
    for name, group in groups.items():
        draw_curves(group, records, args.out / f"curves_{name}.png", args.step_ms)
    return 0


# Command line --------------------------------------------------------------------------------------------------------


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "study.jsonl", help="JSON lines of the runs")
    parser.add_argument("--limit", type=float, default=900, help="seconds that one run may take")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="which runs are there").set_defaults(action=list_groups)
    runs = verbs.add_parser("run", help="train what is missing")
    runs.add_argument("groups", nargs="*", choices=[*GROUPS, []], help=f"of {', '.join(GROUPS)}; all by default")
    runs.add_argument("--seeds", type=int, nargs="+", default=[0])
    runs.add_argument("--rows", nargs="+", metavar="LABEL", help="only these")
    runs.set_defaults(action=run)
    shows = verbs.add_parser("show", help="tables and charts")
    shows.add_argument("--out", type=Path, default=RESULTS)
    shows.add_argument("--step-ms", type=float, default=5.0, help="milliseconds that a rank computes a step")
    shows.set_defaults(action=show)
    checks = verbs.add_parser("check", help="train recorded runs again, and compare")
    checks.add_argument("--runs", type=int, default=1)
    checks.add_argument("--pick", type=int, default=0, help="another number picks other runs")
    checks.set_defaults(action=check)
    args = parser.parse_args()
    if args.verb == "run" and not args.groups:
        args.groups = [name for name in GROUPS if name != "small"]
    # An error like any other then, so that the launch is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return int(args.action(args))


if __name__ == "__main__":
    raise SystemExit(main())
