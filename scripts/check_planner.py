"""Whether the planner picks the fastest path: a round of every path, timed on real ranks, beside what is predicted.

    bash scripts/check_planner.sh                     every network, number of ranks, size and setting; one table
    mpirun -np 2 python scripts/check_planner.py run  one cell of it, on whatever network the ranks have

``run`` prints one JSON line for each size and setting; ``table`` makes a Markdown table of such lines from standard
input, and fails if a pick was more than 15 % slower than the fastest path.

A path's time is the mean over a re-selection period: medians of rounds with and without a new core, paths in turn, and
of each round the time of its slowest rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
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
_TENSORS = 20
_PLAIN_ROUNDS = 2  # after each that chooses a core


class Path:
    """Rounds of one path, on a model of its own."""

    def __init__(self, name: str, config: Any, n: int) -> None:
        from hvd_slim.synchronizer import Synchronizer
        from hvd_slim.transport import make_transport

        generator = torch.Generator().manual_seed(0)
        self.name, self.config = name, dataclasses.replace(config, exchange=name)
        sizes = [n * (i + 1) // _TENSORS - n * i // _TENSORS for i in range(_TENSORS)]
        self._named = [(f"{i}", torch.nn.Parameter(torch.randn(m, generator=generator))) for i, m in enumerate(sizes)]
        for _, parameter in self._named:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.synchronizer = Synchronizer(self.config, make_transport(self.config, f"check.{name}", None), False)
        self.synchronizer.before_step(self._named)
        self.plain: list[float] = []
        self.selecting: list[float] = []
        self.period(0)  # which does not count

    def period(self, number: int) -> None:
        """A few rounds from the beginning of re-selection period ``number``. Collective."""
        self.synchronizer.rounds = number * self.config.reselect_every
        # Dense rounds are all alike.
        selecting, *plain = (self._round() for _ in range(1 if self.name == "dense" else 1 + _PLAIN_ROUNDS))
        if number:
            self.selecting.append(selecting)
            self.plain += plain or [selecting]

    def _round(self) -> float:
        import horovod.torch as hvd

        for _, parameter in self._named:
            parameter.data.add_(parameter.grad, alpha=1e-4 * (1 + hvd.rank()))
        self.synchronizer.before_step(self._named)
        hvd.barrier()
        begin = time.perf_counter()
        self.synchronizer.after_step()
        return time.perf_counter() - begin

    def seconds(self) -> float:
        """The mean over a re-selection period. Collective."""
        import horovod.torch as hvd

        plain, selecting = (
            statistics.median(max(rounds) for rounds in zip(*hvd.allgather_object(times, name=f"{self.name} {kind}")))
            for kind, times in (("plain", self.plain), ("selecting", self.selecting))
        )
        q = self.config.reselect_every
        return (selecting + (q - 1) * plain) / q


def run(args: argparse.Namespace) -> None:
    """Measure and predict; rank 0 prints the lines. Collective."""
    import horovod.torch as hvd

    from hvd_slim import planner, probe
    from hvd_slim.arena import Arena
    from hvd_slim.config import SlimConfig

    torch.set_num_threads(1)
    hvd.init()
    for n in args.parameters:
        for setting in args.settings:
            config = SlimConfig(**SETTINGS[setting])
            paths = [Path(name, config, n) for name in planner.allowed_paths(config, n)]
            for repeat in range(args.repeats):
                for path in paths:
                    path.period(1 + repeat)
            measured = {path.name: path.seconds() for path in paths}
            hvd.barrier()
            begin = time.perf_counter()
            network = probe.measure(paths[0].synchronizer.transport, Arena(paths[0]._named), config)
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
