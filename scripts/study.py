"""Does it train as well? Runs a grid of methods on real tasks, and makes its tables and charts.

    python scripts/study.py list                        the groups, and which of their runs are there
    python scripts/study.py run frontier --seeds 0 1 2  trains what is missing; goes on where it was stopped
    python scripts/study.py show                        tables and charts of all that is there, into examples/results
    python scripts/study.py check --runs 2              trains recorded runs again and compares bits and bytes

Every run is one JSON line in --results: command, seed, curve, counted bytes. Times in it are those of a machine that
may have had other work; charts over time reckon it from counted bytes and a link's rate instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from records import Record, horovodrun, read_records, recorded_command, replacing, table  # noqa: E402

RESULTS = ROOT / "examples" / "results"
#: tensors that are ready at the same time are not fused: which ones are is a matter of luck, and sums would differ
ENVIRONMENT = {"HOROVOD_FUSION_THRESHOLD": "0"}


# The grid ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """A method on a task.

    Attributes:
        label: in tables and charts.
        options: of the example's command line, beside the task's.
    """

    label: str
    options: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that are compared with each other.

    Attributes:
        task: ranks, and the example with the options that all rows share.
        better: whether the metric rises (accuracy), or falls (bits).
        rows: the first is what the others are compared with.
    """

    title: str
    ranks: int
    task: str
    metric: str
    better: bool
    rows: tuple[Row, ...]

    def command(self, row: Row, seed: int) -> list[str]:
        """The example's command line, from the project's folder."""
        return [*shlex.split(f"{self.task} {row.options}"), "--seed", str(seed)]


def slim(comm: float, core: float, explorer: str, more: str = "") -> str:
    """Options of a setting; exchange is named, since "auto" would measure and might choose another path each time."""
    path = "allreduce" if explorer in ("shared", "leader") else "alltoall"
    return f"--comm-fraction {comm:g} --core-fraction {core:g} --explorer {explorer} --exchange {path} {more}".strip()


NO_CORE = 1e-6  # one coordinate
DENSE = Row("dense", "--method dense")
REFERENCE = Row("reference: random 0.3, core 0.15", slim(0.3, 0.15, "random"))
SHARED = Row("shared 0.3, core 0.15", slim(0.3, 0.15, "shared"))
FASHION = "examples/fashion_mnist.py"
FRONTIER = f"{FASHION} --epochs 2 --batch-size 16"

GROUPS = {
    "frontier": Group(
        "Small CNN, SGD, 8 ranks: accuracy against bytes", 8, FRONTIER, "test_accuracy", True,
        (
            DENSE,
            REFERENCE,
            Row("leader 0.1, core 0.05", slim(0.1, 0.05, "leader")),
            Row("leader 0.1, no core", slim(0.1, NO_CORE, "leader")),
            Row("leader 0.09, core 0.045", slim(0.09, 0.045, "leader")),
            Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader")),
            Row("leader 0.02, no core", slim(0.02, NO_CORE, "leader")),
            Row("leader 0.02, core 0.01, 8 local steps", slim(0.02, 0.01, "leader", "--local-steps 8")),
            Row("leader 0.02, no core, 8 local steps", slim(0.02, NO_CORE, "leader", "--local-steps 8")),
            Row("leader 0.018, core 0.009, resync at the end", slim(0.018, 0.009, "leader", "--resync-every 936")),
            Row("leader 0.01, core 0.005, 8 local steps, resync at the end",
                slim(0.01, 0.005, "leader", "--local-steps 8 --resync-every 117")),
        ),
    ),
    "overlap": Group(
        "Small CNN, SGD, 8 ranks: rounds one step late", 8, FRONTIER, "test_accuracy", True,
        (
            DENSE,
            Row("reference, overlap", slim(0.3, 0.15, "random", "--overlap")),
            Row("leader 0.02, core 0.01, overlap", slim(0.02, 0.01, "leader", "--overlap")),
        ),
    ),
    "ablations": Group(
        "Small CNN, SGD, 8 ranks: one choice at a time", 8, FRONTIER, "test_accuracy", True,
        (
            DENSE,
            Row("dense, int8 (Quant-DP)", "--exchange dense --value-dtype int8"),
            Row("random 0.1, core 0.05", slim(0.1, 0.05, "random")),
            Row("random 0.02, core 0.01", slim(0.02, 0.01, "random")),
            Row("random 0.02, no core", slim(0.02, NO_CORE, "random")),
            Row("cyclic 0.02, core 0.01", slim(0.02, 0.01, "cyclic")),
            Row("greedy 0.02, core 0.01", slim(0.02, 0.01, "greedy")),
            Row("greedy 0.005, no core", slim(0.005, NO_CORE, "greedy")),
            SHARED,
            Row("shared 0.1, core 0.05", slim(0.1, 0.05, "shared")),
            Row("shared 0.1, no core (as SPARTA)", slim(0.1, NO_CORE, "shared")),
            Row("shared 0.02, core 0.01", slim(0.02, 0.01, "shared")),
            Row("core 0.1 only", slim(0.1, 0.1, "shared")),
            Row("leader 0.05, core 0.025", slim(0.05, 0.025, "leader")),
            Row("leader 0.01, core 0.005", slim(0.01, 0.005, "leader")),
            Row("leader 0.02, int8", slim(0.02, 0.01, "leader", "--value-dtype int8")),
            Row("leader 0.02, |w| only", slim(0.02, 0.01, "leader", "--gradient-weight 0")),
            Row("leader 0.02, c = 0.3", slim(0.02, 0.01, "leader", "--gradient-weight 0.3")),
            Row("leader 0.02, c = 3", slim(0.02, 0.01, "leader", "--gradient-weight 3")),
            Row("leader 0.02, |g| only", slim(0.02, 0.01, "leader", "--gradient-weight 1e6")),
            Row("leader 0.02, q = 5", slim(0.02, 0.01, "leader", "--reselect-every 5")),
            Row("leader 0.02, q = 100", slim(0.02, 0.01, "leader", "--reselect-every 100")),
            Row("leader 0.02, resync 100", slim(0.02, 0.01, "leader", "--resync-every 100")),
            Row("leader 0.02, 4 local steps", slim(0.02, 0.01, "leader", "--local-steps 4")),
            Row("leader 0.02, 16 local steps", slim(0.02, 0.01, "leader", "--local-steps 16")),
        ),
    ),
    "vgg": Group(
        "VGG-style network, SGD, 4 ranks", 4, f"{FASHION} --model vgg --batch-norm --batch-size 32 --epochs 2",
        "test_accuracy", True,
        (DENSE, REFERENCE, SHARED, Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader"))),
    ),
    "googlenet": Group(
        "GoogLeNet-style network, SGD, 4 ranks", 4, f"{FASHION} --model googlenet --batch-size 32 --steps 600",
        "test_accuracy", True,
        (DENSE, REFERENCE, SHARED, Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader"))),
    ),
    "gpt": Group(
        "Small GPT, AdamW, 2 ranks", 2, "examples/char_gpt.py --steps 1000 --batch-size 16",
        "bits_per_character", False,
        (
            DENSE,
            REFERENCE,
            Row("reference, no restored norm", slim(0.3, 0.15, "random", "--restore-norm False")),
            SHARED,
            Row("leader 0.1, core 0.05", slim(0.1, 0.05, "leader")),
            Row("dense, half the learning rate", "--method dense --lr 0.003"),
            Row("dense, twice the learning rate", "--method dense --lr 0.012"),
            Row("reference, half the learning rate", slim(0.3, 0.15, "random", "--lr 0.003")),
            Row("reference, twice the learning rate", slim(0.3, 0.15, "random", "--lr 0.012")),
        ),
    ),
    "gpt-4-ranks": Group(
        "Small GPT, AdamW, 4 ranks", 4, "examples/char_gpt.py --steps 1000", "bits_per_character", False,
        (
            DENSE,
            REFERENCE,
            Row("reference, no restored norm", slim(0.3, 0.15, "random", "--restore-norm False")),
            SHARED,
            Row("leader 0.1, core 0.05", slim(0.1, 0.05, "leader")),
            Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader")),
            Row("reference, twice the learning rate", slim(0.3, 0.15, "random", "--lr 0.012")),
            Row("dense, twice the learning rate", "--method dense --lr 0.012"),
        ),
    ),
    "embedding": Group(
        "A large embedding table, Adam, 2 ranks", 2, "examples/embedding_lm.py", "bits_per_word", False,
        (DENSE, REFERENCE, SHARED, Row("leader 0.1, core 0.05", slim(0.1, 0.05, "leader"))),
    ),
    "learning-rates": Group(
        "Dense at other learning rates: was it tuned with equal care?", 4, FASHION, "test_accuracy", True,
        tuple(
            Row(f"{model}, lr {rate:g}", f"{options} --method dense --lr {rate:g}")
            for model, options in (
                ("vgg", "--model vgg --batch-norm --batch-size 32 --epochs 2"),
                ("googlenet", "--model googlenet --batch-size 32 --steps 600"),
            )
            for rate in (0.02, 0.1)
        ),
    ),
    "small": Group(
        "A few steps of each method, for the tests", 2, f"{FASHION} --steps 20 --evals 2", "test_accuracy", True,
        (DENSE, Row("leader 0.02, core 0.01", slim(0.02, 0.01, "leader"))),
    ),
}  # fmt: skip


# Runs ----------------------------------------------------------------------------------------------------------------


def find(records: Sequence[Record], ranks: int, command: Sequence[str]) -> Record | None:
    """The recorded run of ``command``."""
    wanted = recorded_command(command)
    return next((r for r in records if r["ranks"] == ranks and r["command"] == wanted), None)


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


def found(group: Group, records: Sequence[Record]) -> Iterator[tuple[Row, list[Record]]]:
    """The rows that have runs, with them."""
    for row in group.rows:
        runs = [r for seed in range(10) if (r := find(records, group.ranks, group.command(row, seed)))]
        if runs:
            yield row, runs


def mean_and_spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation of the sample, or the one value there is."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def ratio(group: Group, run: Record) -> float:
    """Bytes of the whole run, warm-up, indices, core broadcasts and resyncs included, to dense training's."""
    return float(run["bytes_sent"] / run["dense_bytes"])


def markdown(group: Group, records: Sequence[Record]) -> str:
    """The group's table."""
    rows, digits = [], 2 if group.better else 4
    base: dict[int, float] = {}
    for row, runs in found(group, records):
        values = [run[group.metric] for run in runs]
        base = base or {run["seed"]: run[group.metric] for run in runs}
        same = [(run[group.metric], base[run["seed"]]) for run in runs if run["seed"] in base]
        relative = "-"
        if same:  # seed against the same seed
            difference, dense = (statistics.mean(values) for values in ([a - b for a, b in same], [b for _, b in same]))
            relative = f"{difference:+.2f}" if group.better else f"{100 * difference / dense:+.2f} %"
        sent = statistics.mean(ratio(group, run) for run in runs)
        rows.append((
            row.label, str(len(runs)), mean_and_spread(values, digits), relative, f"{sent:.4f}",
            f"{statistics.mean(run['bytes_sent'] for run in runs) / 1e6:,.1f}",
        ))  # fmt: skip
    header = ("method", "seeds", group.metric.replace("_", " "), "to the first row", "ratio of bytes", "MB a rank")
    return f"## {group.title}\n\n`{group.task}`, {group.ranks} ranks\n\n{table(header, rows, left=1)}\n"


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


def _axes(columns: int, width: float) -> tuple[object, list]:  # type: ignore[type-arg]
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width, 4.6), layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def draw_frontier(groups: dict[str, Group], records: Sequence[Record], path: Path) -> None:
    """Accuracy against bytes for every method on the frontier's task, on one axis."""
    figure, (axis,) = _axes(1, 10)
    markers = iter("osv^<>DPX*pHhd+x12348" * 4)
    for name in ("frontier", "overlap", "ablations"):
        for row, runs in found(groups[name], records) if name in groups else ():
            if name != "frontier" and row == DENSE:
                continue
            values = [run["test_accuracy"] for run in runs]
            middle = statistics.mean(values)
            spread = [[middle - min(values)], [max(values) - middle]]
            at = statistics.mean(ratio(groups[name], run) for run in runs)
            colour = "tab:blue" if name == "frontier" else "tab:green" if name == "overlap" else "tab:gray"
            axis.errorbar([at], [middle], yerr=spread, marker=next(markers), color=colour, capsize=2, linestyle="none",
                          label=row.label)  # fmt: skip
    axis.set_xscale("log")
    axis.set_xlabel("bytes of the whole run, part of dense training's")
    axis.set_ylabel("test accuracy, %")
    axis.set_title("Small CNN on Fashion-MNIST, 8 ranks: accuracy against bytes (bars: least to most over seeds)")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=110)  # type: ignore[attr-defined]


def draw_curves(group: Group, records: Sequence[Record], path: Path, step_ms: float) -> None:
    """Test loss against steps, against bytes, and against time reckoned for a link of 1 Gbit/s; seed 0."""
    figure, axes = _axes(3, 15)
    for row, runs in found(group, records):
        points = [point for point in runs[0]["curve"] if point["step"] > 0]
        steps, sent = [point["step"] for point in points], [point["bytes_sent"] for point in points]
        loss = [point["test_loss"] for point in points]
        time = [step * step_ms / 1e3 + nbytes * 8 / 1e9 for step, nbytes in zip(steps, sent)]
        for axis, at in zip(axes, (steps, [nbytes / 1e6 for nbytes in sent], time)):
            axis.plot(at, loss, marker="o", markersize=2.5, label=row.label)
    axes[1].set_xscale("log")
    axes[0].set_xlabel("steps")
    axes[1].set_xlabel("sent by each rank, MB")
    axes[2].set_xlabel(f"seconds: {step_ms:g} ms a step, and bytes at 1 Gbit/s, nothing overlapped")
    axes[0].set_ylabel("test loss, nats")
    axes[2].legend(fontsize=7, frameon=False)
    figure.suptitle(group.title)  # type: ignore[attr-defined]
    figure.savefig(path, dpi=90)  # type: ignore[attr-defined]


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
    return int(args.action(args))


if __name__ == "__main__":
    raise SystemExit(main())
