"""``hvd-slim bench``, under a launcher: what a round of every setting takes here, beside what is predicted.

Dense rounds and plain Horovod's own allreduce are measured beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hvd_slim import horovod_module, launchers
from hvd_slim.cli.errors import MISUSED, OK, UsageError
from hvd_slim.cli.options import (
    MODEL_HELP,
    HelpFormatter,
    Named,
    add_settings,
    described,
    parameters_of,
    settings,
    size_and_dtype,
    whole,
)
from hvd_slim.config import SlimConfig
from hvd_slim.records import table

T = TypeVar("T")

_EPILOG = """examples:
  mpirun -np 4 hvd-slim bench 4M
  horovodrun -np 2 hvd-slim bench 1M --explorer random shared --fractions 0.3:0.15 0.02:0.01
  srun --mpi=pmix hvd-slim bench torchvision.models:resnet50 --value-dtype float32 int8 --json

"predicted" is what exchange="auto" would reckon with here: it measures collectives and a rank's own work for a moment.
"""


def add_parser(verbs: Any) -> None:
    """``hvd-slim bench``'s command line."""
    parser = verbs.add_parser(
        "bench", help="measure rounds under a launcher, beside the plan", epilog=_EPILOG, description=__doc__,
        formatter_class=HelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("model", help=MODEL_HELP)
    add_settings(parser)
    parser.add_argument("--repeats", type=whole(1), default=3, help="re-selection periods that are sampled")
    parser.add_argument("--threads", type=whole(1), default=1, help="CPU threads of each rank")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure on all ranks, print on rank 0. Collective."""
    import torch

    hvd = horovod_module.module
    if hvd is None:
        raise UsageError(str(horovod_module.problem))
    hvd.init()
    try:
        problem = launchers.lonely_task(hvd.size())
        if hvd.size() == 1:
            raise UsageError(problem or "one rank exchanges nothing; start several: mpirun -np 2 hvd-slim bench ...")
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)  # the same model on every rank
        parameters = _on_every_rank(hvd, lambda: parameters_of(args.model))
        if parameters is None:
            return MISUSED
        rows = _measured(hvd, parameters, args)
        if hvd.rank() == 0:
            print(json.dumps(rows) if args.json else _as_text(rows, size_and_dtype(parameters)[0], hvd.size()))
            sys.stdout.flush()
        hvd.barrier()
    finally:
        hvd.shutdown()
    return OK


def _on_every_rank(hvd: Any, action: Callable[[], T]) -> T | None:
    """The result of ``action``; None, after rank 0 has said why, if it was refused on any rank. Collective."""
    result, problem = None, None
    try:
        result = action()
    except UsageError as error:
        problem = str(error)
    problems = [text for text in hvd.allgather_object(problem, name="bench.problems") if text]
    if not problems:
        return result
    if hvd.rank() == 0:
        print(f"hvd-slim bench: error: {problems[0]}", file=sys.stderr, flush=True)
    hvd.barrier()  # launchers end the job when one rank fails: rank 0 must have said it by then
    return None


def _measured(hvd: Any, parameters: Named | int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for plain Horovod and each setting, fastest first; bytes and seconds a round. Collective."""
    from hvd_slim.benchmark import BenchedSetting, stand_in, time_plain_horovod
    from hvd_slim.planner import predict

    n, dtype = size_and_dtype(parameters)
    original = stand_in(n) if isinstance(parameters, int) else parameters
    configs = [SlimConfig(exchange="dense"), *(c for c in settings(args) if c.core_count(n) < n)]
    rows: list[dict[str, Any]] = []
    with _progress(1 + len(configs) * (1 + args.repeats), hvd.rank()) as advance:
        plain = time_plain_horovod(original, 3 * args.repeats)
        advance("plain Horovod")
        for number, config in enumerate(configs):
            name = " ".join(described(config))
            setting = BenchedSetting(config, copy.deepcopy(original), f"bench.{number}")
            for repeat in range(args.repeats):
                setting.period(1 + repeat)
                advance(name)
            (prediction,) = predict(n, hvd.size(), config, setting.network(), dtype)
            rows.append({
                "config": config.to_dict(), "seconds": setting.seconds(), "bytes_sent": setting.bytes_sent(),
                "predicted": dataclasses.asdict(prediction),
            })  # fmt: skip
            setting.close()
            advance(name)
    dense = rows[0]
    horovod = dense["predicted"]["seconds"] - dense["predicted"]["work_seconds"]
    rows.append({
        "config": None, "seconds": plain, "bytes_sent": None,
        "predicted": {**dense["predicted"], "path": None, "seconds": horovod, "work_seconds": 0.0},
    })  # fmt: skip
    return sorted(rows, key=lambda row: row["seconds"])


@contextlib.contextmanager
def _progress(total: int, rank: int) -> Iterator[Callable[[str], None]]:
    """A function to call after each piece of work, with its name: a bar on rank 0, if it writes to a terminal."""
    if rank != 0 or not sys.stderr.isatty():
        yield lambda name: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda name: print(f"measured: {name}", file=sys.stderr)
        return
    with tqdm(total=total, desc="bench", leave=False, dynamic_ncols=True) as bar:

        def advance(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield advance


def _as_text(rows: list[dict[str, Any]], n: int, ranks: int) -> str:
    cells = []
    plain = next(row["seconds"] for row in rows if row["config"] is None)
    for row in rows:
        predicted = row["predicted"]
        name = ("Horovod", "-", "1", "-") if row["config"] is None else described(SlimConfig(**row["config"]))
        sent = "-" if row["bytes_sent"] is None else f"{row['bytes_sent'] / 1e6:.3f}"
        cells.append((
            *name, f"{row['seconds'] * 1e3:.3g}", f"{predicted['seconds'] * 1e3:.3g}", sent,
            f"{predicted['bytes_sent'] / 1e6:.3f}", f"{plain / row['seconds']:.2f}",
        ))  # fmt: skip
    header = ("path", "explorer", "fractions", "width", "ms", "predicted", "MB sent", "predicted", "speed-up")
    best = rows[0]
    fastest = "plain Horovod" if best["config"] is None else " ".join(described(SlimConfig(**best["config"])))
    return (
        f"{n:,} parameters, {ranks} ranks; a round, bytes from each rank\n\n{table(header, cells, left=4)}\n\n"
        f"fastest here: {fastest}"
    )
