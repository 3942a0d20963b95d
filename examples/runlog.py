"""The log of a training run: progress bar and lines on rank 0, the curve, the speed, one JSON line at the end."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
import time
from typing import Any

import horovod
import numpy as np
import torch
from common import destination
from records import Record, append_record, megabytes, recorded_command
from tqdm import tqdm

import hvd_slim as hvd
from hvd_slim.records import finite


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One point of the curve: seconds of training, mean test loss, test accuracy (percent), bytes sent by this rank."""

    step: int
    epoch: float
    seconds: float
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
        point = Evaluation(self.step, epoch, self._seconds, test_loss, test_accuracy, self.bytes_sent)
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
            *(destination(field.name) for field in dataclasses.fields(hvd.SlimConfig)),
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
        return finite(record)
