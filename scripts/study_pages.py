"""Tables and charts of the study's runs."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from records import Record, recorded_command, table  # noqa: E402
from study_grid import DENSE, Group, Row  # noqa: E402


def find(records: Sequence[Record], ranks: int, command: Sequence[str]) -> Record | None:
    """The recorded run of ``command``."""
    wanted = recorded_command(command)
    return next((r for r in records if r["ranks"] == ranks and r["command"] == wanted), None)


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
