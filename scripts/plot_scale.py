"""Slim-DP on paper: bytes and seconds of a round for up to 4,096 ranks, as ``hvd_slim.planner.predict`` says.

    python scripts/plot_scale.py        writes docs/scale.png and docs/scale.md

Needs neither Horovod nor a network. The reference setting; ``allreduce`` with the ``shared`` explorer, the others with
``random``. Collectives are those of a network on paper: a rank sends at the link's full rate, a collective takes
50 µs, and 5 µs more for each message after the other. Own work is that of one CPU core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from hvd_slim.config import SlimConfig
from hvd_slim.planner import Network, Prediction, predict

ROOT = Path(__file__).resolve().parents[1]
PARAMETERS = {25_600_000: "25.6 M", 138_000_000: "138 M", 1_300_000_000: "1.3 G"}
GIGABITS = (1, 10, 100)
RANKS = [2**power for power in range(1, 13)]
TABLE_RANKS = (2, 8, 64, 512, 4096)
CONFIGS = {
    "dense": SlimConfig(exchange="dense"),
    "allgather": SlimConfig(exchange="allgather"),
    "alltoall": SlimConfig(exchange="alltoall"),
    "allreduce": SlimConfig(exchange="allreduce", explorer="shared"),
}
LABELS = {
    "dense": "dense (data parallelism)",
    "allgather": "allgather, random explorer",
    "alltoall": "alltoall, random explorer",
    "allreduce": "allreduce, shared explorer",
}
# Okabe and Ito's colours, told apart by everybody.
STYLES = {
    "dense": {"color": "#000000", "marker": "s"},
    "allgather": {"color": "#D55E00", "marker": "^"},
    "alltoall": {"color": "#0072B2", "marker": "o"},
    "allreduce": {"color": "#009E73", "marker": "D"},
}


def prediction(path: str, n: int, ranks: int, gigabits: float) -> Prediction:
    """One path on a network on paper."""
    (only,) = predict(n, ranks, CONFIGS[path], Network.uniform(gigabits * 1e9 / 8))
    return only


def plot(file: Path) -> None:
    """Ratio of bytes above, seconds below."""
    figure = plt.figure(figsize=(11, 13), layout="constrained")
    grid = figure.add_gridspec(4, 3, height_ratios=[1.25, 1, 1, 1])
    ratio = figure.add_subplot(grid[0, :2])
    for path, style in STYLES.items():
        values = [prediction(path, 25_600_000, ranks, 1).ratio for ranks in RANKS]
        ratio.plot(RANKS, values, label=LABELS[path], markersize=5, **style)
    ratio.set_xscale("log", base=2)
    ratio.set_ylim(0, 1.6)
    ratio.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS])
    ratio.set_xlabel("ranks")
    ratio.set_ylabel("bytes a rank sends, relative to dense")
    ratio.set_title("Traffic at the reference setting (comm_fraction 0.3, core_fraction 0.15, float32)", fontsize=10)
    ratio.grid(alpha=0.3)
    ratio.annotate("allgather leaves the picture:\nit grows with the ranks", (16, 1.5), xytext=(40, 1.2), fontsize=9)

    legend = figure.add_subplot(grid[0, 2])
    legend.axis("off")
    handles, labels = ratio.get_legend_handles_labels()
    handles.append(legend.plot([], [], color="gray", linestyle=":")[0])
    labels.append("the collectives alone, were a\nrank's own work done in no time")
    legend.legend(handles, labels, loc="center", fontsize=9, frameon=False, title="Path")

    for row, (n, name) in enumerate(PARAMETERS.items()):
        axes = [figure.add_subplot(grid[1 + row, column]) for column in range(len(GIGABITS))]
        for axis, gigabits in zip(axes, GIGABITS):
            for path, style in STYLES.items():
                predictions = [prediction(path, n, ranks, gigabits) for ranks in RANKS]
                axis.plot(RANKS, [p.seconds for p in predictions], markersize=4, **style)
                alone = [p.seconds - p.work_seconds for p in predictions]
                axis.plot(RANKS, alone, linestyle=":", color=style["color"])
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(RANKS[::2], [f"{ranks:,}" for ranks in RANKS[::2]])
            axis.set_title(f"{name} parameters, {gigabits} Gbit/s", fontsize=10)
            axis.grid(alpha=0.3)
            axis.set_xlabel("ranks" if row == len(PARAMETERS) - 1 else "")
        low = min(axis.get_ylim()[0] for axis in axes)
        dense = prediction("dense", n, 4096, GIGABITS[0]).seconds
        for axis in axes:
            axis.set_ylim(low, 20 * dense)
        axes[0].set_ylabel("seconds a round")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def table(file: Path) -> None:
    """The same numbers as Markdown."""
    lines = [
        "# Scale on paper",
        "",
        "What `hvd_slim.planner.predict` says of a round at the reference setting (comm_fraction 0.3, core_fraction",
        "0.15, reselect_every 20, float32), the mean over rounds, core broadcasts and resyncs included. `allreduce`",
        "with the `shared` explorer, `allgather` and `alltoall` with `random`. A rank sends at the link's full rate; a",
        "collective takes 50 µs, and 5 µs more for each message after the other; own work is that of one CPU core (the",
        "defaults of `planner.Network.uniform`). Nothing here was measured on so many ranks.",
        "",
        "This file and the plot beside it are made by `python scripts/plot_scale.py`.",
        "",
        "![Predicted traffic and time](scale.png)",
        "",
        "## Bytes that a rank sends, relative to dense (25.6 M parameters)",
        "",
        "| ranks | allgather | alltoall | allreduce |",
        "|---:|---:|---:|---:|",
    ]
    for ranks in RANKS:
        ratios = [
            f"{prediction(path, 25_600_000, ranks, 1).ratio:.3f}" for path in ("allgather", "alltoall", "allreduce")
        ]
        lines.append(f"| {ranks:,} | {' | '.join(ratios)} |")
    lines += [
        "",
        "## Milliseconds a round (in brackets: of which collectives)",
        "",
        "| parameters | Gbit/s | ranks | dense | allgather | alltoall | allreduce | fastest |",
        "|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for n, name in PARAMETERS.items():
        for gigabits in GIGABITS:
            for ranks in TABLE_RANKS:
                of_path = {path: prediction(path, n, ranks, gigabits) for path in CONFIGS}
                cells = [
                    f"{p.seconds * 1e3:,.0f} ({(p.seconds - p.work_seconds) * 1e3:,.0f})" for p in of_path.values()
                ]
                fastest = min(of_path, key=lambda path: of_path[path].seconds)
                lines.append(f"| {name} | {gigabits} | {ranks:,} | {' | '.join(cells)} | {fastest} |")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of scale.png and scale.md")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plot(args.out / "scale.png")
    table(args.out / "scale.md")


if __name__ == "__main__":
    main()
