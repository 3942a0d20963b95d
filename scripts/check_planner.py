"""Whether the planner picks the fastest path: a round of every path, timed on real ranks, beside what is predicted.

    bash scripts/check_planner.sh                     every network, number of ranks, size and setting; one table
    mpirun -np 2 python scripts/check_planner.py run  one cell of it, on whatever network the ranks have

``run`` prints one JSON line for each size and setting; ``table`` makes a Markdown table of such lines from standard
input, and fails if a pick was more than 15 % slower than the fastest path.

How a path's time is measured, ``hvd_slim.benchmark`` says; paths take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch

TOLERANCE = 1.15
SETTINGS: dict[str, dict[str, Any]] = {
    "reference": {},
    "shared 0.02": {"explorer": "shared", "comm_fraction": 0.02, "core_fraction": 0.01},
    "leader 0.02": {"explorer": "leader", "comm_fraction": 0.02, "core_fraction": 0.01},
}


def run(args: argparse.Namespace) -> None:
    """Measure and predict; rank 0 prints the lines. Collective."""
    import horovod.torch as hvd

    from hvd_slim import planner
    from hvd_slim.benchmark import BenchedSetting, stand_in
    from hvd_slim.config import SlimConfig

    torch.set_num_threads(1)
    hvd.init()
    for n in args.parameters:
        for setting in args.settings:
            config = SlimConfig(**SETTINGS[setting])
            paths = {
                name: BenchedSetting(dataclasses.replace(config, exchange=name), stand_in(n), f"check.{name}")
                for name in planner.allowed_paths(config, n)
            }
            for repeat in range(args.repeats):
                for path in paths.values():
                    path.period(1 + repeat)
            measured = {name: path.seconds() for name, path in paths.items()}
            hvd.barrier()
            begin = time.perf_counter()
            network = next(iter(paths.values())).network()
            probing = time.perf_counter() - begin
            predictions = planner.predict(n, hvd.size(), config, network)
            if hvd.rank() == 0:
                record = {
                    "network": args.network,
                    "ranks": hvd.size(),
                    "n": n,
                    "setting": setting,
                    "measured": measured,
                    "predicted": {prediction.path: prediction.seconds for prediction in predictions},
                    "own_work": {prediction.path: prediction.work_seconds for prediction in predictions},
                    "picked": planner.choose(predictions)[0],
                    "probe_seconds": probing,
                    "probe": dataclasses.asdict(network),
                }
                print(json.dumps(record), flush=True)
    hvd.shutdown()


def table() -> int:
    """Markdown; the exit status says whether every pick was good enough."""
    records = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    print(
        "| network | K | n | setting | ms a round, measured (predicted) | fastest | picked | picked / fastest | probe |"
    )
    print("|---|---:|---:|---|---|---|---|---:|---:|")
    ratios = []
    for record in records:
        measured, predicted = record["measured"], record["predicted"]
        fastest = min(measured, key=measured.__getitem__)
        ratio = measured[record["picked"]] / measured[fastest]
        ratios.append(ratio)
        times = ", ".join(f"{path} {measured[path] * 1e3:.3g} ({predicted[path] * 1e3:.3g})" for path in measured)
        cells = [record["network"], str(record["ranks"]), f"{record['n']:,}", record["setting"], times, fastest,
                 record["picked"], f"{ratio:.2f}", f"{record['probe_seconds']:.1f} s"]  # fmt: skip
        print(f"| {' | '.join(cells)} |")
    good = sum(ratio <= TOLERANCE for ratio in ratios)
    print(
        f"\n{good} of {len(ratios)} picks are the fastest path or within 15 % of it; worst {max(ratios, default=0):.2f}"
    )
    return 0 if ratios and good == len(ratios) else 1


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="one network: JSON lines")
    runs.add_argument("--network", default="as it is", help="name of the network, for the record")
    runs.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 4_000_000])
    runs.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=list(SETTINGS))
    runs.add_argument("--repeats", type=int, default=3, help="re-selection periods that are sampled")
    verbs.add_parser("table", help="JSON lines from standard input to Markdown")
    args = parser.parse_args()
    if args.verb == "table":
        return table()
    run(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
