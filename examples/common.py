"""What the examples share while they run on many ranks: command line, a common way to stop, the log of a run."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import horovod
import numpy as np
import torch
from records import Record, append_record, megabytes, recorded_command
from tqdm import tqdm

import hvd_slim as hvd

T = TypeVar("T")

_SLIM_HELP = {
    "comm_fraction": "part of the model that each rank sends a round",
    "core_fraction": "part of the model in the core set, at most comm_fraction",
    "reselect_every": "rounds between two choices of the core set",
    "resync_every": "rounds between two dense exchanges that make all replicas equal; 0 is never",
    "local_steps": "optimizer steps between two rounds",
    "gradient_weight": "weight of |gradient| beside |parameter| in the significance",
    "normalize": "divide |parameter| and |gradient| by their root mean square first",
    "explorer": "which coordinates outside the core travel: random, cyclic, shared, greedy, leader",
    "exchange": "how a round moves: allgather, alltoall, allreduce, dense; auto may choose dense",
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
        print(message, file=sys.stdout if status == 0 else sys.stderr, flush=True)
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


class Parser(argparse.ArgumentParser):
    """An argument parser for many ranks: only rank 0 speaks, and all ranks leave together.

    Options are not abbreviated, so that a recorded command means the same when options are added.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def _print_message(self, message: str, file: Any = None) -> None:
        if hvd.rank() == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        stop(f"{self.prog}: error: {message} (--help shows all options)", 2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        stop((message or "").rstrip(), status)


def add_run_options(parser: Parser) -> None:
    """Options that every example has: method, seed, threads, log and progress bar."""
    parser.add_argument("--method", choices=("dense", "slim"), default="slim", help="dense: plain Horovod")
    parser.add_argument("--seed", type=int, default=0, help="of initial parameters and order of the data")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--evals-per-epoch", type=int, default=4, help="points on the curve")
    parser.add_argument("--json-out", metavar="FILE", help="add the run to this file, as one JSON line")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="progress bar on rank 0; by default on a terminal only",
    )


def add_slim_options(parser: Parser) -> None:
    """One option for each field of ``SlimConfig``, with its default; its seed is ``--slim-seed``."""
    group = parser.add_argument_group("options of --method slim (hvd_slim.SlimConfig)")
    for field in dataclasses.fields(hvd.SlimConfig):
        option = "--" + _destination(field.name).replace("_", "-")
        about = _SLIM_HELP.get(field.name, "see hvd_slim.SlimConfig")
        if isinstance(field.default, bool):
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default, help=about)
        elif field.default is None:
            group.add_argument(option, type=_python_value, default=None, help=about)
        else:
            group.add_argument(option, type=type(field.default), default=field.default, help=about)


def slim_config(parser: Parser, args: argparse.Namespace) -> hvd.SlimConfig:
    """The configuration that the options say; an impossible one stops all ranks with its reason."""
    try:
        return hvd.Compression.slim(
            **{field.name: getattr(args, _destination(field.name)) for field in dataclasses.fields(hvd.SlimConfig)}
        )
    except (ValueError, TypeError) as error:
        parser.error(str(error))


def require_at_least(parser: Parser, args: argparse.Namespace, least: int, *names: str) -> None:
    """Refuse options below ``least``."""
    for name in names:
        if getattr(args, name) < least:
            parser.error(f"argument --{name.replace('_', '-')}: {getattr(args, name)} is below {least}")


def _python_value(text: str) -> Any:
    """A number, True, False or None as Python writes it; any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _destination(field: str) -> str:
    return "slim_seed" if field == "seed" else field


# The log of a run ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One point of the curve: mean test loss, test accuracy (percent), bytes that this rank has sent so far."""

    step: int
    epoch: float
    test_loss: float
    test_accuracy: float
    bytes_sent: float


class RunLog:
    """Follows one training run: progress bar and lines on rank 0, the curve, the speed, the JSON line at the end.

    Args:
        args: the parsed options; all are recorded.
        optimizer: what ``DistributedOptimizer`` returned.
        model: its trainable parameters are counted.
        images_per_step: over all ranks.
        total_steps: of the run.
    """

    def __init__(
        self, args: argparse.Namespace, optimizer: Any, model: torch.nn.Module, images_per_step: int, total_steps: int
    ) -> None:
        self.args, self.optimizer = args, optimizer
        self.images_per_step, self.step = images_per_step, 0
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in trainable)
        # Plain Horovod does not count its bytes: this is what its ring allreduce of every gradient sends a step.
        self._ring_bytes = 2 * (hvd.size() - 1) / hvd.size() * sum(p.numel() * p.element_size() for p in trainable)
        self.curve: list[Evaluation] = []
        self._seconds, self._begin = 0.0, 0.0
        wanted = sys.stderr.isatty() if args.progress is None else args.progress
        self._bar = tqdm(
            total=total_steps, unit="step", dynamic_ncols=True, desc=args.method, disable=not wanted or hvd.rank() != 0
        )

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent for training: counted by hvd_slim, or the ring formula for plain Horovod."""
        if self.args.method == "dense":
            return self.step * self._ring_bytes
        return float(self.optimizer.stats()["total_bytes_sent"])

    def start_clock(self) -> None:
        """Training goes on; what happens outside start and stop does not count for the speed."""
        self._begin = time.perf_counter()

    def stop_clock(self) -> None:
        """Training pauses."""
        self._seconds += time.perf_counter() - self._begin

    def advance(self) -> None:
        """One optimizer step is done."""
        self.step += 1
        self._bar.update()

    def evaluated(self, epoch: float, test_loss: float, test_accuracy: float) -> None:
        """Add a point to the curve, and print it on rank 0."""
        point = Evaluation(self.step, epoch, test_loss, test_accuracy, self.bytes_sent)
        self.curve.append(point)
        self._bar.set_postfix_str(f"test accuracy {test_accuracy:.2f} %", refresh=False)
        self._say(
            f"{self.args.method}: epoch {epoch:.2f}  step {self.step:,}  test loss {test_loss:.4f}  "
            f"test accuracy {test_accuracy:.2f} %  sent by this rank {megabytes(point.bytes_sent)}"
        )

    def _say(self, line: str) -> None:
        """A line on rank 0, above the progress bar. One write, so that the launcher does not cut it."""
        if hvd.rank() == 0:
            with self._bar.external_write_mode():
                sys.stdout.write(line + "\n")
                sys.stdout.flush()

    @property
    def images_per_second(self) -> float:
        """Training images a second over all ranks, evaluation left out."""
        return self.step * self.images_per_step / self._seconds if self._seconds else 0.0

    def finish(self, example: str, config: hvd.SlimConfig | None) -> None:
        """Close the progress bar; on rank 0 print the result and add the JSON line to ``--json-out``."""
        self._bar.close()
        if hvd.rank() != 0:
            return
        last = self.curve[-1]
        self._say(
            f"{self.args.method}: test accuracy {last.test_accuracy:.2f} %, {megabytes(last.bytes_sent)} sent by this "
            f"rank, {self.images_per_second:,.0f} images a second on {hvd.size()} rank(s)"
        )
        if self.args.json_out:
            append_record(self.args.json_out, self._record(example, config))

    def _record(self, example: str, config: hvd.SlimConfig | None) -> Record:
        last = self.curve[-1]
        elsewhere = {
            "json_out",
            "progress",
            *(_destination(field.name) for field in dataclasses.fields(hvd.SlimConfig)),
        }
        options = {name: value for name, value in vars(self.args).items() if name not in elsewhere}
        record = {
            "example": example,
            "method": self.args.method,
            "command": recorded_command(sys.argv),
            "ranks": hvd.size(),
            "seed": self.args.seed,
            "options": options,
            "config": config.to_dict() if config else None,
            "parameters": self.parameters,
            "steps": self.step,
            "test_accuracy": last.test_accuracy,
            "test_loss": last.test_loss,
            "bytes_sent": last.bytes_sent,
            "bytes_are": "counted by stats()" if config else "2(K-1)/K * parameters * 4 a step (ring allreduce)",
            "ratio_to_dense": last.bytes_sent / (self.step * self._ring_bytes) if self._ring_bytes else None,
            "images_per_second": self.images_per_second,
            "training_seconds": self._seconds,
            "stats": self.optimizer.stats() if config else None,
            "curve": [dataclasses.asdict(point) for point in self.curve],
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
                "horovod": horovod.__version__,
                "hvd_slim": hvd.__version__,
            },
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
        return _finite(record)


def _finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON has not, as None: a run that diverged is recorded too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
