"""What the examples share while they run on many ranks: the command line, and a common way to stop."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import hvd_slim as hvd
from hvd_slim.config import SHARED_EXPLORERS

T = TypeVar("T")

_SLIM_HELP = {
    "comm_fraction": "part of the model that each rank sends a round",
    "core_fraction": "part of the model in the core set, at most comm_fraction",
    "reselect_every": "rounds between two choices of the core set",
    "resync_every": "rounds between two dense exchanges that make all replicas equal; 0 is never",
    "local_steps": "optimizer steps between two rounds",
    "local_rate": "part of the learning rate for a rank's own steps; merged changes are divided by it",
    "overlap": "merge a round one step after its launch: it travels while the next step is computed",
    "gradient_weight": "weight of |gradient| beside |parameter| in the significance",
    "normalize": "divide |parameter| and |gradient| by their root mean square first",
    "explorer": "which coordinates outside the core travel: random, cyclic, shared, greedy, leader",
    "exchange": "how a round moves: allgather, alltoall, allreduce, dense, or auto, which may choose dense "
    "(default: allreduce for shared and leader, else allgather)",
    "transport": "who carries the bytes: horovod, mpi",
    "value_dtype": "width of values on the wire: float32, float16, bfloat16, int8, int4",
    "rounding": "of int8 and int4: nearest, stochastic",
    "restore_norm": "scale merged changes for adaptive optimizers: True, False; None is by optimizer",
    "on_nonfinite": "what to do about a NaN or infinity on any rank: raise, skip, ignore",
    "checksum_every": "rounds between two comparisons of the global model across ranks; 0 is never",
    "warn_after": "seconds of waiting for other ranks before a warning",
    "stall_limit": "seconds of waiting for other ranks before an error",
    "warmup_rounds": "rounds at the beginning that send more",
    "warmup": "what they send: dense, linear",
    "max_message_bytes": "bytes that one collective may carry, summed over ranks",
    "seed": "of the explorers' draws and of stochastic rounding",
}


# Stopping together ---------------------------------------------------------------------------------------------------


def stop(message: str, status: int = 1) -> NoReturn:
    """End all ranks with ``status``, after rank 0 has printed the message. Collective."""
    if hvd.rank() == 0 and message:
        stream = sys.stdout if status == 0 else sys.stderr
        stream.write(message + "\n")  # one write, so that the launcher does not cut it
        stream.flush()
    # The launcher ends the others as soon as one rank fails, so rank 0 must have printed by then.
    hvd.barrier()
    hvd.shutdown()
    sys.exit(status)


def on_every_rank(action: Callable[[], T], expected: type[Exception]) -> T:
    """The result of ``action``. If it raised ``expected`` on any rank, all ranks stop with its message. Collective."""
    result: T | None = None
    message = ""
    try:
        result = action()
    except expected as error:
        message = str(error)
    messages = hvd.allgather_object(message)
    for rank, text in enumerate(messages):
        if text:
            stop(f"error: {text}" + (f" (rank {rank})" if rank else ""), 2)
    return result  # type: ignore[return-value]


# Command line --------------------------------------------------------------------------------------------------------


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults and keeps the examples' lines."""


class Parser(argparse.ArgumentParser):
    """An argument parser for many ranks: only rank 0 speaks, and all ranks leave together.

    Options are not abbreviated, so that a recorded command means the same when options are added.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter, **settings})

    def _print_message(self, message: str, file: Any = None) -> None:
        if hvd.rank() == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        stop(f"{self.prog}: error: {message} (--help shows all options)", 2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        stop((message or "").rstrip(), status)


#: options that say where and how a run is launched and logged, not what it computes
ABOUT_THE_LAUNCH = {"json_out", "progress", "tensorboard", "checkpoint", "checkpoint_every", "stop_at"}


def parse_run(parser: Parser, *at_least_one: str, **defaults: Any) -> tuple[argparse.Namespace, hvd.SlimConfig | None]:
    """All of a run's options, and the Slim-DP configuration if that is the method. Collective if they are refused.

    Args:
        parser: has the example's own options; those that every example has, and those of ``SlimConfig``, are added.
        at_least_one: the example's whole numbers that must be.
        defaults: others than ``_add_run_options`` gives.
    """
    _add_run_options(parser)
    add_slim_options(parser)
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    require_at_least(parser, args, 1, "threads", "evals", "checkpoint_every", "stop_at", *at_least_one)
    require_at_least(parser, args, 0, "seed", "warmup_steps")
    config = slim_config(parser, args)
    return args, config if args.method == "slim" else None


def _add_run_options(parser: Parser) -> None:
    """Options that every example has: method, schedule, seed, threads, log, progress bar and checkpoints."""
    parser.add_argument("--method", choices=("dense", "slim"), default="slim", help="dense: plain Horovod")
    parser.add_argument("--warmup-steps", type=int, default=0, help="over which the learning rate rises to --lr")
    parser.add_argument("--seed", type=int, default=0, help="of initial parameters and order of the data")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--evals", type=int, default=12, help="points on the curve")
    parser.add_argument("--json-out", metavar="FILE", help="add the run to this file, as one JSON line")
    parser.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard's event files there")
    parser.add_argument("--checkpoint", metavar="DIR", help="save the run there, and go on from what is there already")
    parser.add_argument("--checkpoint-every", type=int, default=500, help="steps between two checkpoints")
    parser.add_argument("--stop-at", type=int, help="end this launch after that step; with --checkpoint it is saved")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="progress bar on rank 0; by default on a terminal only",
    )


def add_slim_options(parser: Parser) -> None:
    """One option for each field of ``SlimConfig``, with its default; its seed is ``--slim-seed``.

    Only ``--exchange`` has a default of its own: examples name their path, because what ``auto`` picks depends on the
    network, and on one machine it may well be ``dense``.
    """
    group = parser.add_argument_group("options of --method slim (hvd_slim.SlimConfig)")
    for field in dataclasses.fields(hvd.SlimConfig):
        option = "--" + destination(field.name).replace("_", "-")
        about = _SLIM_HELP.get(field.name, "see hvd_slim.SlimConfig")
        if field.name == "exchange":
            group.add_argument(option, default=argparse.SUPPRESS, help=about)
        elif isinstance(field.default, bool):
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default, help=about)
        elif field.default is None:
            group.add_argument(option, type=_python_value, default=None, help=about)
        else:
            group.add_argument(option, type=type(field.default), default=field.default, help=about)


def slim_config(parser: Parser, args: argparse.Namespace) -> hvd.SlimConfig:
    """The configuration that the options say; an impossible one stops all ranks with its reason."""
    args.exchange = getattr(args, "exchange", "allreduce" if args.explorer in SHARED_EXPLORERS else "allgather")
    try:
        return hvd.Compression.slim(
            **{field.name: getattr(args, destination(field.name)) for field in dataclasses.fields(hvd.SlimConfig)}
        )
    except (ValueError, TypeError) as error:
        parser.error(str(error))


def require_at_least(parser: Parser, args: argparse.Namespace, least: int, *names: str) -> None:
    """Refuse options below ``least``, if they are given."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"argument --{name.replace('_', '-')}: {getattr(args, name)} is below {least}")


def _python_value(text: str) -> Any:
    """A number, True, False or None as Python writes it; any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def destination(field: str) -> str:
    """Where the parsed options hold a field of ``SlimConfig``."""
    return "slim_seed" if field == "seed" else field
