"""Bytes that training sends, three ways: as the optimizer counted, as the formula says, as the kernel saw.

Start it with ``scripts/netlab.sh``, which gives each rank a host, and so an interface, of its own:

    bash scripts/netlab.sh with 4 unshaped -- python scripts/measure_bytes.py train --exchange allgather

``train`` trains a synthetic model first with plain Horovod, then with Slim-DP (one option for each field of
``SlimConfig``), and prints one JSON line. ``collectives`` measures single collectives, as Horovod and Open MPI carry
them out, and prints one JSON line each. ``table`` makes a Markdown table of such lines from standard input.

The kernel counts whole packets, and everything that a host sends: Horovod's coordination too, a few hundred bytes a
cycle, even when nobody trains. That part is measured while the ranks sleep and subtracted for the time of the loop.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hvd_slim as hvd
from hvd_slim.sets import set_nbytes

# int8 and int4: with two bytes of scale a block of 64 and of 32 values
_VALUE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1 + 2 / 64, "int4": 1 / 2 + 2 / 32}
_INPUTS, _CLASSES, _BATCH = 256, 10, 8
_SECONDS_TO_SETTLE = 0.1  # for acknowledgements still under way
_SLIM_OPTIONS_SHOWN = ("exchange", "explorer", "comm_fraction", "core_fraction")


# What the kernel saw -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Traffic:
    """What one host's interface carried; bytes and seconds."""

    sent: float
    received: float
    seconds: float

    def without(self, idle: Traffic) -> Traffic:
        """Less what an idle host would have carried in the same time."""
        share = self.seconds / idle.seconds
        return Traffic(self.sent - idle.sent * share, self.received - idle.received * share, self.seconds)


class Interface:
    """The kernel's counters of one network interface."""

    def __init__(self, name: str) -> None:
        self._directory = Path("/sys/class/net") / name / "statistics"
        if not self._directory.is_dir():
            sys.exit(f"error: this host has no interface {name}; run this under scripts/netlab.sh, or give --interface")

    def during(self, action: Callable[[], object]) -> Traffic:
        """What this host carries while all ranks run ``action``. Collective."""
        hvd.barrier()
        time.sleep(_SECONDS_TO_SETTLE)
        sent, received, begin = self._read("tx_bytes"), self._read("rx_bytes"), time.monotonic()
        action()
        hvd.barrier()
        time.sleep(_SECONDS_TO_SETTLE)
        return Traffic(self._read("tx_bytes") - sent, self._read("rx_bytes") - received, time.monotonic() - begin)

    def _read(self, counter: str) -> int:
        return int((self._directory / counter).read_text())


# What the formula says -----------------------------------------------------------------------------------------------


def ring_bytes(values: float, value_bytes: float) -> float:
    """What each rank sends in an allreduce of ``values`` values: 2(K-1)/K of them."""
    return 2 * (hvd.size() - 1) / hvd.size() * values * value_bytes


def formula_bytes(config: hvd.SlimConfig, path: str, n: int, rounds: int, reselections: int, resyncs: int) -> float:
    """What each rank sends in that many rounds after the warm-up.

    Args:
        path: how a round moves, ``config.exchange`` or what "auto" has chosen.
        n: parameters, float32.
        rounds, reselections, resyncs: how many. A resync takes a round's place, a re-selection comes before one.
    """
    width = _VALUE_BYTES[config.value_dtype]
    core, explorers, share = config.core_count(n), config.explorer_count(n), (hvd.size() - 1) / hvd.size()
    if path == "dense":
        return rounds * ring_bytes(n, width)
    longest_stratum = math.ceil((n - core) / explorers) if explorers else 0

    def index_bytes(run: int) -> float:
        """Of so many explorers."""
        if config.explorer in ("greedy", "leader"):
            return set_nbytes(run, n - core)
        return run * {"random": 1 if longest_stratum <= 256 else 4, "cyclic": 0, "shared": 0}[config.explorer]

    to_each = math.ceil(explorers / hvd.size())
    explored = {
        "allgather": (hvd.size() - 1) * (explorers * width + index_bytes(explorers)),
        # Owners answer at full width.
        "alltoall": share * explorers * (width + 4.0) + (hvd.size() - 1) * index_bytes(to_each),
        "allreduce": ring_bytes(explorers, width) + share * index_bytes(explorers),
    }
    slim = (rounds - resyncs) * (ring_bytes(core, width) + explored[path])
    return slim + reselections * share * set_nbytes(core, n) + resyncs * ring_bytes(n, 4.0)


# train ---------------------------------------------------------------------------------------------------------------


def make_model(parameters: int) -> torch.nn.Module:
    """A network with two hidden layers and about that many parameters, the same on every rank."""
    torch.manual_seed(0)
    linear = _INPUTS + 2 + _CLASSES
    hidden = max(1, round((math.sqrt(linear**2 + 4 * (parameters - _CLASSES)) - linear) / 2))
    sizes = (_INPUTS, hidden, hidden, _CLASSES)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def trainer(model: torch.nn.Module, compression: Any) -> tuple[Any, Callable[[int], None]]:
    """The distributed optimizer, and what runs a number of its steps. Data are random, and differ between ranks."""
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    generator = torch.Generator().manual_seed(1 + hvd.rank())

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            inputs = torch.randn(_BATCH, _INPUTS, generator=generator)
            labels = torch.randint(_CLASSES, (_BATCH,), generator=generator)
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if isinstance(compression, hvd.SlimConfig):  # plain Horovod would reduce all gradients once more
            optimizer.synchronize()

    return optimizer, train


def measure_training(args: argparse.Namespace) -> None:
    """Train with plain Horovod and with Slim-DP; rank 0 prints one JSON line. Collective."""
    config, interface = slim_config(args), Interface(args.interface)
    dense_model = make_model(args.parameters)
    slim_model = copy.deepcopy(dense_model)
    n = sum(parameter.numel() for parameter in dense_model.parameters())

    _, train = trainer(dense_model, hvd.Compression.none)
    train(args.skip_rounds)
    idle = interface.during(lambda: time.sleep(args.idle_seconds))
    dense = interface.during(lambda: train(args.dense_rounds))

    optimizer, train = trainer(slim_model, config)
    train(max(args.skip_rounds, config.warmup_rounds) * config.local_steps)
    before = optimizer.stats()
    slim = interface.during(lambda: train(args.rounds * config.local_steps))
    after = optimizer.stats()

    counted = (after["total_bytes_sent"] - before["total_bytes_sent"]) / args.rounds
    done = {key: after[key] - before[key] for key in ("rounds", "reselections", "resyncs")}
    path = optimizer.state_dict()["hvd_slim"]["path"]
    formula = formula_bytes(config, path, n, **done)
    hosts = hvd.allgather_object([counted, idle, dense, slim, dense.without(idle), slim.without(idle)])
    if hvd.rank() != 0:
        return
    counts, idles, denses, slims, net_denses, net_slims = map(list, zip(*hosts))
    dense_formula = ring_bytes(n, 4.0)
    kernel_dense = mean(net_denses) / args.dense_rounds
    kernel_slim = mean(net_slims) / args.rounds
    stats_mean = sum(counts) / len(counts)
    record = {
        "ranks": hvd.size(),
        "rate": args.rate,
        "path": path,
        "config": config.to_dict(),
        "parameters": n,
        "rounds": args.rounds,
        **done,
        "bytes_per_round": {
            "stats": stats_mean,
            "stats_by_rank": counts,
            "formula": formula / args.rounds,
            "kernel": kernel_slim,
            "kernel_sent_by_host": [host.sent / args.rounds for host in net_slims],
            "kernel_received_by_host": [host.received / args.rounds for host in net_slims],
            "kernel_with_idle": mean(slims) / args.rounds,
            "dense_formula": dense_formula,
            "dense_kernel": kernel_dense,
            "dense_kernel_sent_by_host": [host.sent / args.dense_rounds for host in net_denses],
            "dense_kernel_with_idle": mean(denses) / args.dense_rounds,
        },
        "idle_bytes_per_second": mean(idles) / args.idle_seconds,
        "ratios": {
            "stats_to_formula": stats_mean * args.rounds / formula if formula else None,
            "kernel_to_stats": kernel_slim / stats_mean if stats_mean else None,
            "dense_kernel_to_formula": kernel_dense / dense_formula if dense_formula else None,
            "to_dense_by_stats": stats_mean / (dense_formula * config.local_steps) if dense_formula else None,
            "to_dense_by_kernel": kernel_slim / (kernel_dense * config.local_steps) if kernel_dense else None,
        },
    }
    print(json.dumps(record), flush=True)


def mean(hosts: list[Traffic]) -> float:
    """Bytes sent, mean over hosts."""
    return sum(host.sent for host in hosts) / len(hosts)


# collectives ---------------------------------------------------------------------------------------------------------


def measure_collectives(args: argparse.Namespace) -> None:
    """Repeat each collective; rank 0 prints one JSON line for each size. Collective."""
    interface, size = Interface(args.interface), hvd.size()
    hvd.allreduce(torch.zeros(1), name="start")
    idle = interface.during(lambda: time.sleep(args.idle_seconds))
    for nbytes in args.bytes:
        values = torch.zeros(nbytes // 4)
        raw = torch.zeros(nbytes // size * size, dtype=torch.uint8)
        splits = torch.full((size,), nbytes // size, dtype=torch.int32)
        share = (size - 1) / size
        table: dict[str, tuple[Callable[[], object], float]] = {
            "allreduce": (partial(hvd.allreduce, values, name="sum", op=hvd.Sum), 2 * share * nbytes),
            "allgather": (partial(hvd.allgather, raw.view(1, -1), name="gather"), (size - 1) * nbytes),
            "alltoall": (partial(hvd.alltoall, raw, splits, name="all"), share * nbytes),
            "broadcast": (partial(hvd.broadcast, raw, 0, name="copy"), share * nbytes),
        }
        for name, (collective, formula) in table.items():
            collective()
            traffic = interface.during(partial(repeat, collective, args.repeats))
            hosts = hvd.allgather_object(traffic.without(idle))
            if hvd.rank() == 0:
                sent = [host.sent / args.repeats for host in hosts]
                record = {
                    "collective": name,
                    "ranks": size,
                    "bytes": nbytes,
                    "formula": formula,
                    "sent_by_host": sent,
                    "received_by_host": [host.received / args.repeats for host in hosts],
                    "mean_to_formula": sum(sent) / size / formula if formula else None,
                    "milliseconds": traffic.seconds / args.repeats * 1e3,
                }
                print(json.dumps(record), flush=True)


def repeat(action: Callable[[], object], times: int) -> None:
    """The action, so many times."""
    for _ in range(times):
        action()


# table ---------------------------------------------------------------------------------------------------------------


def print_table() -> None:
    """Markdown, one row for each JSON line of ``train`` or ``collectives`` on standard input."""
    records = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    trained = [record for record in records if "config" in record]
    collectives = [record for record in records if "collective" in record]
    if trained:
        print_row("K", "configuration", "formula", "stats()", "kernel", "busiest host", "stats() / formula",
                  "kernel / stats()", "to dense, stats()", "to dense, kernel", "dense: kernel / formula")  # fmt: skip
        print_row(*["---"] * 2, *["---:"] * 9)
    for record in trained:
        size, ratios = record["bytes_per_round"], record["ratios"]
        print_row(
            str(record["ranks"]),
            describe(record["path"], record["config"]),
            *(f"{size[key]:,.0f}" for key in ("formula", "stats", "kernel")),
            f"{max(size['kernel_sent_by_host']):,.0f}",
            *("-" if ratios[key] is None else f"{ratios[key]:.3f}" for key in (
                "stats_to_formula", "kernel_to_stats", "to_dense_by_stats", "to_dense_by_kernel",
                "dense_kernel_to_formula")),
        )  # fmt: skip
    if collectives:
        print_row("K", "collective", "bytes", "formula", "kernel, mean", "kernel, most", "mean / formula", "ms")
        print_row(*["---"] * 2, *["---:"] * 6)
    for record in collectives:
        sent = record["sent_by_host"]
        print_row(
            str(record["ranks"]),
            record["collective"],
            *(f"{value:,.0f}" for value in (record["bytes"], record["formula"], sum(sent) / len(sent), max(sent))),
            f"{record['mean_to_formula']:.3f}",
            f"{record['milliseconds']:.1f}",
        )


def print_row(*cells: str) -> None:
    """One line of a Markdown table."""
    print(f"| {' | '.join(cells)} |")


def describe(path: str, config: dict[str, Any]) -> str:
    """Path, explorer and fractions, and whatever else differs from its default."""
    defaults = hvd.SlimConfig().to_dict()
    shown = [f"{key} {value}" for key, value in config.items()
             if key not in _SLIM_OPTIONS_SHOWN and value != defaults.get(key)]  # fmt: skip
    sizes = f"{config['comm_fraction']:g}/{config['core_fraction']:g}"
    return ", ".join([path if path == "dense" else f"{path}, {config['explorer']}, {sizes}", *shown])


# Command line --------------------------------------------------------------------------------------------------------


def add_slim_options(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``SlimConfig``, with its default."""
    group = parser.add_argument_group("the configuration (hvd_slim.SlimConfig)")
    for field in dataclasses.fields(hvd.SlimConfig):
        option = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default)
        elif isinstance(field.default, (int, float, str)):
            group.add_argument(option, type=type(field.default), default=field.default)
        else:
            group.add_argument(option, type=_literal, default=field.default, metavar="VALUE")


def _literal(text: str) -> Any:
    """A Python value where the text is one (None, True, 0.5), else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def slim_config(args: argparse.Namespace) -> hvd.SlimConfig:
    """The configuration that the options say."""
    try:
        return hvd.SlimConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(hvd.SlimConfig)})
    except (ValueError, TypeError) as error:
        if hvd.rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        hvd.barrier()  # The launcher ends all ranks as soon as one has failed, and rank 0 must have spoken by then.
        sys.exit(2)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    train = verbs.add_parser("train", help="training, plain Horovod and slim", allow_abbrev=False)
    single = verbs.add_parser("collectives", help="single collectives", allow_abbrev=False)
    verbs.add_parser("table", help="JSON lines from standard input to Markdown")
    for verb in (train, single):
        verb.add_argument("--interface", default=os.environ.get("HOROVOD_GLOO_IFACE", "lab0"))
        verb.add_argument("--idle-seconds", type=float, default=1.0, help="how long the baseline is measured")
    train.add_argument("--parameters", type=int, default=1_000_000, help="of the model, about")
    train.add_argument("--rounds", type=int, default=60, help="slim rounds that are measured")
    train.add_argument("--dense-rounds", type=int, default=20, help="steps of plain Horovod that are measured")
    train.add_argument("--skip-rounds", type=int, default=2, help="rounds before the measurement, at least 1")
    train.add_argument("--rate", default=os.environ.get("NETLAB_RATE"), help="of the links, for the record")
    add_slim_options(train)
    single.add_argument("--bytes", type=int, nargs="+", default=[600_000, 60_000], help="of each rank's tensor")
    single.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if args.verb == "table":
        print_table()
        return
    torch.set_num_threads(1)
    hvd.init()
    measure_training(args) if args.verb == "train" else measure_collectives(args)
    hvd.shutdown()


if __name__ == "__main__":
    main()
