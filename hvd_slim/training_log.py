"""A training run as JSON lines, and as TensorBoard scalars: what was learned, sent and waited for.

``hvd-slim report`` makes a page of such a file. The first line of a run is its ``start``; each later one a ``step``:
values that the user gives, seconds since the start, and the optimizer's counters so far.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from hvd_slim import horovod_module
from hvd_slim.records import finite

_COUNTERS = ("rounds", "reselections", "resyncs", "total_bytes_sent", "total_bytes_received", "dense_bytes", "ratio")


class TrainingLog:
    """Writes a run's lines from rank 0; on other ranks every call does nothing. Never collective.

        with hvd.TrainingLog("run.jsonl", optimizer, every=50) as log:
            for images, labels in batches:
                ...
                optimizer.step()
                log.step(loss=loss)
            log.write(test_loss=evaluate(model))

    Lines are added to the file, each as soon as it is written, so several runs may share one file, and a run that was
    stopped goes on in the same file.

    Args:
        path: the file; its folder is made. None for no file.
        optimizer: what ``DistributedOptimizer`` returned. Slim ones count their bytes; of Horovod's own, the log gives
            what a ring allreduce of every gradient sends: 2(K−1)/K · bytes of the gradients.
        every: steps between two lines, at least 1.
        name: of the run, in the report; "slim" or "dense" by default.
        first_step: steps done before this process began, for a run that is resumed.
        tensorboard: folder for TensorBoard's event files; None for none.
        facts: whatever else is to be kept with the run, as JSON has it.

    Raises:
        ValueError: ``every`` or ``first_step`` is too small, or neither file nor folder is given.
        ImportError: ``tensorboard`` is given and is not installed.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, optimizer: torch.optim.Optimizer, every: int = 1,
        name: str | None = None, first_step: int = 0, tensorboard: str | os.PathLike[str] | None = None, **facts: Any,
    ) -> None:  # fmt: skip
        if every < 1 or first_step < 0:
            raise ValueError(f"every={every!r}, first_step={first_step!r}: give at least 1 and at least 0")
        if path is None and tensorboard is None:
            raise ValueError("path=None, tensorboard=None: give a file, a folder, or both")
        hvd = horovod_module.require()
        self.steps = first_step
        self._optimizer: Any = optimizer
        self._every, self._slim = every, hasattr(optimizer, "stats")
        self._first_step, self._begin = first_step, time.perf_counter()
        size = hvd.size()
        trainable = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._ring_bytes = 2 * (size - 1) / size * sum(p.numel() * p.element_size() for p in trainable)
        self._file, self._writer = None, None
        if hvd.rank() != 0:
            return
        self._file = None if path is None else _open_to_append(Path(path))
        self._writer = None if tensorboard is None else _summary_writer(tensorboard)
        state = optimizer.state_dict() if self._slim else {}
        self._put({
            "event": "start", "name": name or ("slim" if self._slim else "dense"), "ranks": size,
            "first_step": first_step, "time": time.time(), "parameters": sum(p.numel() for p in trainable),
            "config": state.get("hvd_slim", {}).get("config"), "facts": facts,
            "bytes_are": "counted" if self._slim else "of a ring allreduce of every gradient",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        })  # fmt: skip

    def step(self, **values: Any) -> None:
        """One optimizer step is done. Every ``every`` steps a line is written, with ``values``.

        Args:
            values: numbers, or tensors of one element, which are read only when a line is written: that waits for
                the device.
        """
        self.steps += 1
        if self.steps % self._every == 0:
            self.write(**values)

    def write(self, **values: Any) -> None:
        """Write a line now, between steps: an evaluation for instance."""
        if self._file is None and self._writer is None:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        counters = self._counters()
        self._put({
            "event": "step", "step": self.steps, "seconds": time.perf_counter() - self._begin, "values": numbers,
            **counters,
        })  # fmt: skip
        if self._writer is not None:
            scalars = {**numbers, "hvd_slim/MB sent": counters["total_bytes_sent"] / 1e6}
            scalars |= {f"hvd_slim/seconds {what}": value for what, value in counters["activities"].items()}
            if counters["ratio"] is not None:
                scalars["hvd_slim/ratio to dense"] = counters["ratio"]
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, self.steps)

    def _counters(self) -> dict[str, Any]:
        if self._slim:
            stats = self._optimizer.stats()
            counters = {name: stats[name] for name in _COUNTERS}
            return {**counters, "bytes_sent": stats["bytes_sent"], "activities": stats["seconds"]}
        sent = (self.steps - self._first_step) * self._ring_bytes
        return {
            "rounds": self.steps - self._first_step, "reselections": 0, "resyncs": 0, "total_bytes_sent": sent,
            "total_bytes_received": sent, "dense_bytes": sent, "ratio": 1.0 if sent else None,
            "bytes_sent": {"dense": sent}, "activities": {},
        }  # fmt: skip

    def _put(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            # One write a line: a job that is killed leaves whole lines.
            self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close file and folder; what is written is there already."""
        for output in (self._file, self._writer):
            if output is not None:
                output.close()
        self._file = self._writer = None

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def _open_to_append(path: Path) -> Any:
    """The file, at the beginning of a line: the last writer may have been stopped half-way through one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    file.close()
    return path.open("a", encoding="utf-8")


def _summary_writer(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"tensorboard={str(folder)!r} needs TensorBoard ({error}); run `pip install tensorboard`"
        ) from None
    return SummaryWriter(os.fspath(folder))
