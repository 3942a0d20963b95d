"""Whether the planner is right: rounds of every path, timed on real ranks, beside what is predicted.

    bash scripts/check_planner.sh                     every network, number of ranks, size and setting; two tables
    mpirun -np 2 python scripts/check_planner.py run  one network and number of ranks, whatever the ranks have

``run`` prints one JSON line for each size and setting. ``table`` makes two Markdown tables of such lines from standard
input, and its exit status is 1 if

- a predicted time, on a network whose links are shaped, is not within 25 % of the measured one, or
- the path that the planner would pick from the same predictions is more than 15 % slower than the fastest.

How a path's time is measured, ``hvd_slim.benchmark`` says. All settings take turns, period by period, and after each
period the probe measures anew, as a run would at its start. Lower quartiles of periods and of probes are compared: what
else runs on a machine only ever adds. The ranges say how much that was. Where a setting is off, more periods and probes
are added to its samples before it counts as off.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch

#: a pick may be that much slower than the fastest path
SLOWER = 1.15
#: a prediction on shaped links may be off by that much of the measured time
OFF = 0.25
#: settings that are off are sampled so many times as often before they count as off
MOST_TIMES = 3
#: networks whose times are those of their links, not of a machine that all ranks share
UNSHAPED = ("unshaped", "loopback", "as it is")
#: by name: the options, and the paths that are compared for a pick beside "dense"; none for a path that is the only one
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "reference": ({}, ("allgather", "alltoall")),
    "cyclic 0.1": ({"explorer": "cyclic", "comm_fraction": 0.1, "core_fraction": 0.05}, ("allgather", "alltoall")),
    "greedy 0.1": ({"explorer": "greedy", "comm_fraction": 0.1, "core_fraction": 0.05}, ("allgather", "alltoall")),
    "shared 0.3": ({"explorer": "shared"}, ("allreduce",)),
    "shared 0.02": ({"explorer": "shared", "comm_fraction": 0.02, "core_fraction": 0.01}, ("allreduce",)),
    "leader 0.3": ({"explorer": "leader"}, ("allreduce",)),
    "leader 0.02": ({"explorer": "leader", "comm_fraction": 0.02, "core_fraction": 0.01}, ("allreduce",)),
    "dense int8": ({"exchange": "dense", "value_dtype": "int8"}, ()),
}


def run(args: argparse.Namespace) -> None:
    """Measure and predict; rank 0 prints the lines. Collective."""
    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    for n in args.parameters:
        for record in _measured(n, args.settings, args.repeats):
            if hvd.rank() == 0:
                print(json.dumps({"network": args.network, "ranks": hvd.size(), "n": n, **record}), flush=True)
    hvd.shutdown()


def _measured(n: int, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """One record for each setting, on ``n`` parameters. Collective."""
    import horovod.torch as hvd

    from hvd_slim import planner
    from hvd_slim.benchmark import BenchedSetting, stand_in
    from hvd_slim.config import SlimConfig

    dense = BenchedSetting(SlimConfig(exchange="dense"), stand_in(n), "check.dense")
    benched: dict[str, dict[str, BenchedSetting]] = {}
    for name in names:
        options, paths = SETTINGS[name]
        benched[name] = {
            path: BenchedSetting(SlimConfig(**{"exchange": path, **options}), stand_in(n), f"check.{name}.{path}")
            for path in paths or ("dense",)
        }
        if paths:
            benched[name]["dense"] = dense
    predicted: dict[str, list[list[planner.Prediction]]] = {name: [] for name in names}
    probing: dict[str, list[float]] = {name: [] for name in names}
    left = names
    for period in range(1, 1 + MOST_TIMES * repeats):
        dense.period(period)
        for name in left:
            for path in benched[name].values():
                if path is not dense:
                    path.period(period)
            hvd.barrier()
            begin = time.perf_counter()
            network = next(iter(benched[name].values())).network(SlimConfig(**SETTINGS[name][0]))
            probing[name].append(time.perf_counter() - begin)
            predicted[name].append(planner.predict(n, hvd.size(), SlimConfig(**SETTINGS[name][0]), network))
        if period % repeats == 0:
            left = [name for name in left if not _is_accurate(benched[name], predicted[name])]
            if not left:
                break
    records = []
    for name, paths in benched.items():
        records.append({
            "setting": name,
            "measured": {path: bench.seconds_of_periods() for path, bench in paths.items()},
            "predicted": _of_paths(predicted[name], "seconds"),
            "own_work": _of_paths(predicted[name], "work_seconds"),
            "picked": planner.choose(_typical(predicted[name]))[0],
            "picked_by_each": [planner.choose(predictions)[0] for predictions in predicted[name]],
            "probe_seconds": probing[name],
        })  # fmt: skip
    for path in [dense, *(path for paths in benched.values() for path in paths.values() if path is not dense)]:
        path.close()
    return records


def _is_accurate(paths: dict[str, Any], probes: list[list[Any]]) -> bool:
    """Whether the predictions so far are good enough, the same on all ranks. Collective."""
    seconds = _of_paths(probes, "seconds")
    measured = {path: bench.seconds_of_periods() for path, bench in paths.items()}
    return all(abs(_ratio(seconds[path], of_periods) - 1) <= OFF for path, of_periods in measured.items())


def _of_paths(probes: list[list[Any]], field: str) -> dict[str, list[float]]:
    """What each probe predicted for each path."""
    paths = [prediction.path for prediction in probes[0]]
    return {path: [getattr(prediction, field) for probe in probes for prediction in probe if prediction.path == path]
            for path in paths}  # fmt: skip


def _typical(probes: list[list[Any]]) -> list[Any]:
    """What would be predicted if none of the probes had been disturbed, fastest first."""
    seconds = _of_paths(probes, "seconds")
    typical = [dataclasses.replace(one, seconds=_undisturbed(seconds[one.path])) for one in probes[0]]
    return sorted(typical, key=lambda prediction: prediction.seconds)


# Tables --------------------------------------------------------------------------------------------------------------


def table() -> int:
    """Markdown; the exit status says whether all predictions and picks were good enough."""
    records = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    accurate, picked = _times_table(records), _picks_table(records)
    return 0 if records and accurate and picked else 1


def _times_table(records: list[dict[str, Any]]) -> bool:
    """Predicted beside measured, a row a path; whether all on shaped links are good enough."""
    print("| network | K | n | setting | path | measured, ms (periods) | predicted, ms (probes) | own work | ratio |")
    print("|---|---:|---:|---|---|---|---|---:|---:|")
    ratios, seen = [], set()
    for record in records:
        where = (record["network"], str(record["ranks"]), f"{record['n']:,}")
        for path, of_periods in record["measured"].items():
            name = "-" if path == "dense" and SETTINGS[record["setting"]][1] else record["setting"]
            if (*where, name, path) in seen:
                continue  # dense, beside every setting
            seen.add((*where, name, path))
            of_probes = record["predicted"][path]
            ratio = _ratio(of_probes, of_periods)
            shaped = record["network"] not in UNSHAPED
            if shaped:
                ratios.append(ratio)
            mark = "" if abs(ratio - 1) <= OFF else " off" if shaped else " (off)"
            cells = [*where, name, path, _with_range(of_periods), _with_range(of_probes),
                     f"{_undisturbed(record['own_work'][path]) * 1e3:.3g}", f"{ratio:.2f}{mark}"]  # fmt: skip
            print(f"| {' | '.join(cells)} |")
    good = sum(abs(ratio - 1) <= OFF for ratio in ratios)
    worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=0.0)
    print(f"\n{good} of {len(ratios)} predictions on shaped links within 25 % of measured; worst {worst:.2f}\n")
    return good == len(ratios)


def _undisturbed(of_repeats: list[float]) -> float:
    """The lower quartile."""
    return sorted(of_repeats)[(len(of_repeats) - 1) // 4]


def _ratio(of_probes: list[float], of_periods: list[float]) -> float:
    return _undisturbed(of_probes) / _undisturbed(of_periods)


def _with_range(of_repeats: list[float]) -> str:
    return f"{_undisturbed(of_repeats) * 1e3:.3g} ({min(of_repeats) * 1e3:.3g} to {max(of_repeats) * 1e3:.3g})"


def _picks_table(records: list[dict[str, Any]]) -> bool:
    """The path that would be picked beside the fastest, a row a setting; whether all are good enough."""
    print("| network | K | n | setting | fastest | picked | picked / fastest | by each probe | probe |")
    print("|---|---:|---:|---|---|---|---:|---|---:|")
    ratios, of_single = [], []
    for record in records:
        measured = {path: _undisturbed(of_periods) for path, of_periods in record["measured"].items()}
        if len(measured) == 1:
            continue
        fastest = min(measured, key=measured.__getitem__)
        ratios.append(measured[record["picked"]] / measured[fastest])
        of_single += [measured[path] / measured[fastest] for path in record["picked_by_each"]]
        cells = [record["network"], str(record["ranks"]), f"{record['n']:,}", record["setting"], fastest,
                 record["picked"], f"{ratios[-1]:.2f}", ", ".join(record["picked_by_each"]),
                 f"{_undisturbed(record['probe_seconds']):.1f} s"]  # fmt: skip
        print(f"| {' | '.join(cells)} |")
    good = sum(ratio <= SLOWER for ratio in ratios)
    worst = max(ratios, default=0.0)
    print(f"\n{good} of {len(ratios)} picks are the fastest path or within 15 % of it; worst {worst:.2f}")
    print(f"Of single probes, {sum(ratio <= SLOWER for ratio in of_single)} of {len(of_single)}.")
    return good == len(ratios)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="one network: JSON lines")
    runs.add_argument("--network", default="as it is", help="name of the network, for the record")
    runs.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 4_000_000])
    runs.add_argument("--settings", nargs="+", choices=sorted(SETTINGS), default=list(SETTINGS))
    runs.add_argument("--repeats", type=int, default=3, help="re-selection periods that are sampled, and probes")
    verbs.add_parser("table", help="JSON lines from standard input to Markdown")
    args = parser.parse_args()
    if args.verb == "table":
        return table()
    run(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
