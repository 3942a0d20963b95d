"""Does Slim-DP reach dense accuracy? Trains fashion_mnist.py dense and slim over ranks and seeds, and prints the table.

    python examples/compare_accuracy.py

Runs go one after another. A run whose JSON line is already in the results is not repeated, so an interrupted
comparison goes on where it stopped, and a complete one prints its table at once.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from records import Record, horovodrun, megabytes, read_records, recorded_command, table

EXAMPLES = Path(__file__).resolve().parent
SCRIPT = "examples/fashion_mnist.py"
METHODS = {
    "dense": ("--method", "dense"),
    "slim": (
        *("--method", "slim", "--comm-fraction", "0.3", "--core-fraction", "0.15"),
        *("--reselect-every", "20", "--explorer", "random", "--exchange", "allgather"),
    ),
}


def command(method: str, seed: int, epochs: int) -> list[str]:
    """The example's command line, from the project's folder."""
    return [SCRIPT, *METHODS[method], "--epochs", str(epochs), "--seed", str(seed)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--results", default=str(EXAMPLES / "results" / "fashion_mnist_reference.jsonl"))
    parser.add_argument("--limit", type=float, default=900, help="seconds that one run may take")
    return parser.parse_args()


def run_missing(args: argparse.Namespace) -> dict[tuple[int, str, int], Record]:
    """The run of each (ranks, method, seed), from the results or trained now."""
    runs: dict[tuple[int, str, int], Record] = {}
    for ranks in args.ranks:
        for seed in args.seeds:
            for method in METHODS:
                wanted = command(method, seed, args.epochs)
                found = find(args.results, ranks, wanted)
                if found is None:
                    print(f"{ranks} ranks: python {' '.join(wanted)}", flush=True)
                    status = horovodrun(
                        ranks, [sys.executable, *wanted, "--json-out", args.results], args.limit, EXAMPLES.parent
                    )
                    found = find(args.results, ranks, wanted)
                    if status or found is None:
                        sys.exit(f"the run failed with status {status}; finished runs are kept in {args.results}")
                runs[ranks, method, seed] = found
    return runs


def find(results: str, ranks: int, wanted: Sequence[str]) -> Record | None:
    """The last recorded run of this command on so many ranks."""
    matching = [
        record
        for record in read_records(results)
        if record["ranks"] == ranks and record["command"] == recorded_command(wanted)
    ]
    return matching[-1] if matching else None


def comparison(runs: dict[tuple[int, str, int], Record], ranks: Sequence[int], seeds: Sequence[int]) -> str:
    """One row for each number of ranks and method: accuracies (percent), their mean, and what was sent."""
    rows = []
    for count in ranks:
        means: dict[str, float] = {}
        for method in METHODS:
            group = [runs[count, method, seed] for seed in seeds]
            accuracies = [record["test_accuracy"] for record in group]
            means[method] = statistics.mean(accuracies)
            rows.append(
                (
                    f"{count} ranks, {method}",
                    *(f"{accuracy:.2f}" for accuracy in accuracies),
                    f"{means[method]:.2f}",
                    "" if method == "dense" else f"{means[method] - means['dense']:+.2f}",
                    megabytes(statistics.mean(record["bytes_sent"] for record in group)),
                    f"{statistics.mean(record['ratio_to_dense'] for record in group):.3f}",
                )
            )
    header = ("test accuracy, %", *(f"seed {seed}" for seed in seeds), "mean", "slim - dense", "sent a rank", "ratio")
    return table(header, rows)


def main() -> None:
    args = parse_arguments()
    # An error like any other then, so that the launch is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.results = str(Path(args.results).resolve())
    try:
        runs = run_missing(args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(comparison(runs, args.ranks, args.seeds))


if __name__ == "__main__":
    main()
