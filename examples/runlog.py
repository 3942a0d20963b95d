"""The log of a training run: progress bar and lines on rank 0, the curve, the speed, one JSON line at the end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any

import horovod
import numpy as np
import torch
from common import ABOUT_THE_LAUNCH, destination
from records import Record, append_record, megabytes, recorded_command
from tqdm import tqdm

import hvd_slim as hvd
from hvd_slim.records import finite


@dataclasses.dataclass(frozen=True)
class Metric:
    """What a run is judged by: its key in the JSON line, its name and unit, and what a sample is called."""

    key: str
    name: str
    unit: str
    samples: str

    def text(self, value: float) -> str:
        """The value with name and unit."""
        return f"{self.name} {value:.2f}{self.unit}" if self.unit == " %" else f"{self.name} {value:.4f}{self.unit}"


ACCURACY = Metric("test_accuracy", "test accuracy", " %", "images")
BITS_PER_CHARACTER = Metric("bits_per_character", "held-out text", " bits a character", "sequences")


class RunLog:
    """Follows one training run: progress bar and lines on rank 0, the curve, the speed, the JSON line at the end.

    Args:
        args: the parsed options; all are recorded.
        optimizer: what ``DistributedOptimizer`` returned.
        model: its trainable parameters are counted.
        samples_per_step: over all ranks.
        total_steps: of the run.
        metric: what the run is judged by.
    """

    def __init__(
        self, args: argparse.Namespace, optimizer: Any, model: torch.nn.Module, samples_per_step: int,
        total_steps: int, metric: Metric,
    ) -> None:  # fmt: skip
        self.args, self.optimizer, self.metric = args, optimizer, metric
        self.samples_per_step, self.step, self._total_steps = samples_per_step, 0, total_steps
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in trainable)
        # Plain Horovod does not count its bytes: this is what its ring allreduce of every gradient sends a step.
        self._ring_bytes = 2 * (hvd.size() - 1) / hvd.size() * sum(p.numel() * p.element_size() for p in trainable)
        self.curve: list[dict[str, Any]] = []
        self._seconds = self._cpu_seconds = 0.0
        self._begin: tuple[float, float] | None = None
        #: counters of the run before it was resumed, and what measuring added to them since
        self._before: dict[str, Any] = {}
        self._measuring: dict[str, Any] = {}
        wanted = sys.stderr.isatty() if args.progress is None else args.progress
        self._bar = tqdm(
            total=total_steps, unit="step", dynamic_ncols=True, desc=args.method, disable=not wanted or hvd.rank() != 0
        )
        self._board: hvd.TrainingLog | None = None

    # Counters --------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any] | None:
        """The slim optimizer's counters for training alone, since the beginning of the run; None for plain Horovod."""
        if self.args.method == "dense":
            return None
        counters = _combined(self._raw_stats(), self._before, 1)
        counters = _combined(counters, self._measuring, -1)
        counters["ratio"] = counters["total_bytes_sent"] / counters["dense_bytes"] if counters["dense_bytes"] else None
        return counters

    def _raw_stats(self) -> dict[str, Any]:
        return {name: value for name, value in self.optimizer.stats().items() if name != "ratio"}

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent in the block is not of the training: a global model that is spread over the ranks is gathered
        to be measured."""
        if self.args.method == "dense":
            yield
            return
        before = self._raw_stats()
        yield
        self._measuring = _combined(self._measuring, _combined(self._raw_stats(), before, -1), 1)

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent for training: counted by hvd_slim, or the ring formula for plain Horovod."""
        stats = self.stats()
        return self.step * self._ring_bytes if stats is None else float(stats["total_bytes_sent"])

    # Time ------------------------------------------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Training goes on; what happens outside start and stop does not count for the speed."""
        self._begin = time.perf_counter(), time.process_time()

    def stop_clock(self) -> None:
        """Training pauses."""
        if self._begin is not None:
            self._seconds += time.perf_counter() - self._begin[0]
            self._cpu_seconds += time.process_time() - self._begin[1]
            self._begin = None

    @property
    def samples_per_second(self) -> float:
        """Training samples a second over all ranks, evaluation left out."""
        return self.step * self.samples_per_step / self._seconds if self._seconds else 0.0

    # Lines -----------------------------------------------------------------------------------------------------------

    def advance(self, loss: torch.Tensor) -> None:
        """One optimizer step is done."""
        if self.args.tensorboard and self._board is None:
            self._board = hvd.TrainingLog(
                None, self.optimizer, every=20, first_step=self.step, tensorboard=self.args.tensorboard
            )
        self.step += 1
        self._bar.update()
        if self._board is not None:
            self._board.step(loss=loss)

    def evaluated(self, train_loss: float | None, test_loss: float, value: float) -> None:
        """Add a point to the curve, and print it on rank 0.

        Args:
            train_loss: mean over ranks and over the steps since the last point; None at the start.
            test_loss: mean, nats.
            value: of the metric.
        """
        point: dict[str, Any] = {
            "step": self.step, "seconds": self._seconds, "train_loss": train_loss, "test_loss": test_loss,
            self.metric.key: value, "bytes_sent": self.bytes_sent,
        }  # fmt: skip
        self.curve.append(point)
        self._bar.set_postfix_str(self.metric.text(value), refresh=False)
        if self._board is not None:
            self._board.write(**{"test_loss": test_loss, self.metric.key: value})
        self.say(
            f"{self.args.method}: step {self.step:,} of {self._total_steps:,}  test loss {test_loss:.4f}  "
            f"{self.metric.text(value)}  sent by this rank {megabytes(point['bytes_sent'])}"
        )

    def say(self, line: str) -> None:
        """A line on rank 0, above the progress bar. One write, so that the launcher does not cut it."""
        if hvd.rank() == 0:
            with self._bar.external_write_mode():
                sys.stdout.write(line + "\n")
                sys.stdout.flush()

    def finish(self, example: str, config: hvd.SlimConfig | None, checksum: int) -> None:
        """Close the progress bar; on rank 0 print the result and add the JSON line to ``--json-out``.

        Args:
            checksum: of the agreed model's bits.
        """
        self._bar.close()
        if self._board is not None:
            self._board.close()
        if hvd.rank() != 0:
            return
        last = self.curve[-1]
        self.say(
            f"{self.args.method}: {self.metric.text(last[self.metric.key])}, {megabytes(last['bytes_sent'])} sent by "
            f"this rank, {self.samples_per_second:,.0f} {self.metric.samples} a second on {hvd.size()} rank(s)"
        )
        if self.args.json_out:
            append_record(self.args.json_out, self._record(example, config, checksum))

    def _record(self, example: str, config: hvd.SlimConfig | None, checksum: int) -> Record:
        last = self.curve[-1]
        dense = self.step * self._ring_bytes
        record = {
            "example": example,
            "method": self.args.method,
            "command": recorded_command(sys.argv),
            "ranks": hvd.size(),
            "seed": self.args.seed,
            "options": options_of(self.args, with_slim=False),
            "config": config.to_dict() if config else None,
            "parameters": self.parameters,
            "steps": self.step,
            "metric": self.metric.key,
            self.metric.key: last[self.metric.key],
            "test_loss": last["test_loss"],
            "bytes_sent": last["bytes_sent"],
            "bytes_are": "counted by stats()" if config else "2(K-1)/K * parameters * 4 a step (ring allreduce)",
            "dense_bytes": dense,
            "ratio_to_dense": last["bytes_sent"] / dense if dense else None,
            "checksum": f"{checksum:08x}",
            f"{self.metric.samples}_per_second": self.samples_per_second,
            "training_seconds": self._seconds,
            "cpu_seconds": self._cpu_seconds,
            "stats": self.stats(),
            "curve": self.curve,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
                "horovod": horovod.__version__,
                "hvd_slim": hvd.__version__,
            },
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
        return finite(record)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to write the line of one that was never stopped."""
        return {
            "step": self.step, "seconds": self._seconds, "cpu_seconds": self._cpu_seconds,
            "curve": self.curve, "stats": self.stats() or {},
        }  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, with an optimizer whose counters begin anew."""
        self.step, self.curve = state["step"], list(state["curve"])
        self._seconds, self._cpu_seconds = state["seconds"], state["cpu_seconds"]
        self._before = {name: value for name, value in state["stats"].items() if name != "ratio"}
        self._bar.update(self.step)


def options_of(args: argparse.Namespace, with_slim: bool) -> dict[str, Any]:
    """The options that make a run what it is."""
    slim = {destination(field.name) for field in dataclasses.fields(hvd.SlimConfig)}
    elsewhere = ABOUT_THE_LAUNCH if with_slim else ABOUT_THE_LAUNCH | slim
    return {name: value for name, value in vars(args).items() if name not in elsewhere}


def _combined(one: dict[str, Any], other: dict[str, Any], sign: int) -> dict[str, Any]:
    """Counters plus, or minus, other counters; those within counters as well."""
    return {
        name: _combined(one.get(name, {}), other.get(name, {}), sign)
        if isinstance(one.get(name, other.get(name)), dict)
        else one.get(name, 0) + sign * other.get(name, 0)
        for name in {**one, **other}
    }
