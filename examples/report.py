"""Prints recorded runs as one table and, with --png, draws test loss against bytes sent.

    python examples/report.py out/quickstart.jsonl --png out/quickstart.png

The runs are JSON lines, as the other examples write them with --json-out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from records import Record, megabytes, read_records, replacing, table


def summary(records: Sequence[Record]) -> str:
    """One row a run."""
    rows = [
        (
            record["method"],
            str(record["ranks"]),
            f"{record['test_accuracy']:.2f} %",
            megabytes(record["bytes_sent"]),
            "-" if record["ratio_to_dense"] is None else f"{record['ratio_to_dense']:.3f}",
            f"{record['images_per_second']:,.0f}",
        )
        for record in records
    ]
    return table(("method", "ranks", "test accuracy", "sent by each rank", "ratio to dense", "images/s"), rows)


def draw(records: Sequence[Record], path: str | Path) -> None:
    """A PNG of test loss against bytes sent, one line a run; the untrained model's point is left out."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.3), layout="constrained")
    for record in records:
        points = [point for point in record["curve"] if point["step"] > 0 and point["test_loss"] is not None]
        axes.plot(
            [point["bytes_sent"] / 1e6 for point in points],
            [point["test_loss"] for point in points],
            marker="o",
            markersize=3.5,
            label=f"{record['method']}, {record['ranks']} ranks: {record['test_accuracy']:.2f} % at the end",
        )
    axes.set_xlabel("sent by each rank (MB)")
    axes.set_ylabel("test loss (cross-entropy, nats)")
    axes.set_title(f"{records[0]['example']}: test loss against bytes sent", fontsize=11)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="JSON lines written with --json-out")
    parser.add_argument("--png", metavar="FILE", help="draw the curves into this file")
    args = parser.parse_args()
    if not Path(args.file).is_file():
        sys.exit(f"error: there is no file {args.file}; give the file that was named with --json-out")
    try:
        records = read_records(args.file)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not records:
        sys.exit(f"error: {args.file} holds no runs; give the file that was named with --json-out")
    print(summary(records))
    if args.png:
        draw(records, args.png)
        print(f"test loss against bytes sent: {args.png}")


if __name__ == "__main__":
    main()
