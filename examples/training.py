"""What the examples' training loops share: schedule, evaluation of the agreed model, checkpoint and resume, the log."""

from __future__ import annotations

import argparse
import contextlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoints import Checkpoints
from common import on_every_rank, stop
from runlog import Metric, RunLog, options_of
from torch import nn

import hvd_slim as hvd

#: what an example measures, over all ranks: mean test loss in nats, and the value of its metric
Evaluate = Callable[[], tuple[float, float]]


def warmup_then_cosine(optimizer: Any, total: int, warmup: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that rises to the optimizer's over ``warmup`` steps, and falls to 0 along a cosine until
    ``total``. Collective if there are too few steps."""
    if warmup >= total:
        stop(f"error: --warmup-steps {warmup} leave none of the run's {total} steps; give fewer", 2)
    schedulers = torch.optim.lr_scheduler
    if warmup == 0:
        return schedulers.CosineAnnealingLR(optimizer, T_max=total)
    rise = schedulers.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    fall = schedulers.CosineAnnealingLR(optimizer, T_max=total - warmup)
    return schedulers.SequentialLR(optimizer, [rise, fall], milestones=[warmup])


@contextlib.contextmanager
def agreed_model(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """The model that all ranks agree on, for measuring it; collective.

    Between resyncs the replicas drift apart, and ``global_parameters`` puts the global model in their place. Running
    statistics of BatchNorm are averaged: training does not read them. Dense replicas differ in these statistics only.
    """
    if any(True for _ in model.buffers()):
        hvd.average_buffers(model)
    agreed = optimizer.global_parameters() if hasattr(optimizer, "global_parameters") else contextlib.nullcontext()
    model.eval()
    with agreed, torch.no_grad():
        yield
    model.train()


def checksum(model: nn.Module) -> int:
    """CRC-32 of the live parameters' bits."""
    value = 0
    for parameter in model.parameters():
        value = zlib.crc32(parameter.detach().contiguous().view(torch.uint8).numpy().data, value)
    return value


class Training:
    """A run in steps: goes on from a checkpoint, measures at its points, saves, keeps the log. All ranks alike.

        training = Training(...)
        while training.step < total:
            ...
            optimizer.step()
            scheduler.step()
            training.after_step(loss)
        training.finish("example", config)

    Args:
        args: the options of ``common.add_run_options`` among others.
        model, optimizer, scheduler: as they are at the start; those of a checkpoint are loaded into them.
        total: steps of the run.
        samples_per_step: over all ranks.
        metric: what ``evaluate`` returns beside the loss.
        evaluate: collective.

    Attributes:
        step: how many steps are done.
    """

    def __init__(
        self, args: argparse.Namespace, model: nn.Module, optimizer: Any, scheduler: Any, total: int,
        samples_per_step: int, metric: Metric, evaluate: Evaluate,
    ) -> None:  # fmt: skip
        self.args, self.model, self.optimizer, self.scheduler = args, model, optimizer, scheduler
        self._evaluate, self.step = evaluate, 0
        self._total, self._loss = total, torch.zeros((), dtype=torch.float64)
        self._evaluate_at = {total * (i + 1) // args.evals for i in range(args.evals)}
        self._checkpoints = Checkpoints(Path(args.checkpoint)) if args.checkpoint else None
        self._log = RunLog(args, optimizer, model, samples_per_step, total, metric)
        self._since = 0  # steps whose loss is in _loss
        if not self._resume():
            self._measure()
        self._log.start_clock()

    def after_step(self, loss: torch.Tensor) -> None:
        """One optimizer step is done, on a batch with this mean loss. Collective at points of evaluation."""
        self.step += 1
        self._since += 1
        self._loss += loss.detach()
        self._log.advance(loss)
        at_stop = self.step == self.args.stop_at
        save = self._checkpoints is not None and (self.step % self.args.checkpoint_every == 0 or at_stop)
        if not (save or at_stop or self.step in self._evaluate_at):
            return
        self._log.stop_clock()
        if self.step in self._evaluate_at:
            self._measure()
        if save:
            self._save()
        if at_stop and self.step < self._total:
            stop(f"stopped after step {self.step}", 0)
        self._log.start_clock()

    def finish(self, example: str, config: hvd.SlimConfig | None) -> None:
        """The result, and its JSON line. Collective."""
        self._log.stop_clock()
        with self._log.uncounted(), agreed_model(self.model, self.optimizer):
            bits = checksum(self.model)
        self._log.finish(example, config, bits)

    def _measure(self) -> None:
        with self._log.uncounted():
            test_loss, value = self._evaluate()
        train_loss = hvd.allreduce(self._loss / max(self._since, 1), name="train_loss").item()
        self._log.evaluated(train_loss if self._since else None, test_loss, value)
        self._loss.zero_()
        self._since = 0

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        assert self._checkpoints is not None
        state = {
            "options": repr(self._identity()), "step": self.step, "loss": self._loss, "since": self._since,
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(), "generator": torch.get_rng_state(), "log": self._log.state(),
        }  # fmt: skip
        self._checkpoints.save(self.step, state)

    def _resume(self) -> bool:
        """Go on from this rank's checkpoint, if there is one. Collective."""
        if self._checkpoints is None:
            return False
        saved = on_every_rank(self._checkpoints.load, OSError)
        if saved is None:
            return False
        if saved["options"] != repr(self._identity()):
            stop(
                f"error: {self.args.checkpoint} holds a run with other options ({saved['options']}); name another "
                f"folder with --checkpoint, or remove that one", 2,
            )  # fmt: skip
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["generator"])
        self.step, self._since = saved["step"], saved["since"]
        self._loss.copy_(saved["loss"])
        self._log.load_state(saved["log"])
        self._log.say(f"resumed after step {self.step}")
        return True

    def _identity(self) -> dict[str, Any]:
        """What has to be the same for a run to go on."""
        return {"ranks": hvd.size(), **options_of(self.args, with_slim=self.args.method == "slim")}
