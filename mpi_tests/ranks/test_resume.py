"""CASES 30: stopped at any step and resumed in fresh objects, a run goes on to the same bits.

Random cases over explorers, paths, optimizers and widths. Gradients depend on the parameters, so that one wrong bit
does not stay alone.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_slim as hvd
from hvd_slim.config import VALUE_DTYPES
from ranks.support import Case, Named, Options, copies, flatten, global_model, set_gradients, slim

STEPS = 24
PATHS = [
    *((explorer, exchange) for exchange in ("allgather", "alltoall") for explorer in ("random", "cyclic", "greedy")),
    ("shared", "allreduce"),
    ("leader", "allreduce"),
    ("random", "dense"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9, weight_decay=0.01),
    "Nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.03, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, amsgrad=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
}


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """A case, and after how many steps it is stopped."""

    number: int
    optimizer: str
    options: Options
    dtype: torch.dtype
    stop: int

    @property
    def case(self) -> Case:
        """The model and the gradients."""
        return Case("resume", 900 + self.number, {}, most=300)

    def __str__(self) -> str:
        options = [self.options[name] for name in ("explorer", "exchange", "value_dtype", "transport")]
        told = [self.number, self.optimizer, str(self.dtype).removeprefix("torch."), *options, f"step{self.stop}"]
        return "-".join(map(str, told))


def draw(number: int) -> Interrupted:
    """Each path and each optimizer several times; the rest at random."""
    rng = np.random.default_rng([30, number])
    explorer, exchange = PATHS[number % len(PATHS)]
    comm = float(rng.choice([0.1, 0.3, 0.6]))
    value_dtype = str(rng.choice(VALUE_DTYPES))
    options = {
        "explorer": explorer,
        "exchange": exchange,
        "comm_fraction": comm,
        "core_fraction": comm * float(rng.choice([0.3, 0.5, 1.0])),
        "value_dtype": value_dtype,
        "rounding": str(rng.choice(["nearest", "stochastic"])) if value_dtype in ("int8", "int4") else "nearest",
        "reselect_every": int(rng.integers(1, 8)),
        "resync_every": int(rng.choice([0, 4, 9])),
        "local_steps": int(rng.choice([1, 1, 2, 3])),
        "warmup_rounds": int(rng.choice([0, 0, 6])),
        "warmup": str(rng.choice(["dense", "linear"])),
        "on_nonfinite": str(rng.choice(["raise", "skip"])),
        "transport": str(rng.choice(["horovod", "mpi"] if hvd.mpi_enabled() else ["horovod"])),
        "seed": int(rng.integers(2**63)),
        "overlap": bool(rng.integers(2)),
    }
    names = list(OPTIMIZERS)
    stop = int(rng.integers(1, STEPS - 1))
    dtype = DTYPES[number // 2 % len(DTYPES)]
    options["local_rate"] = 1.0 if dtype == torch.bfloat16 else float(rng.choice([1.0, 0.3]))
    return Interrupted(number, names[number % len(names)], options, dtype, stop)


def begin(interrupted: Interrupted) -> tuple[Named, Any, Any]:
    """A fresh model, optimizer and scheduler, as a script makes them."""
    named = interrupted.case.parameters(interrupted.dtype)
    optimizer = slim(named, OPTIMIZERS[interrupted.optimizer](named.values()), **interrupted.options)
    return named, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7)


def train(interrupted: Interrupted, named: Named, optimizer: Any, scheduler: Any, first: int, last: int) -> None:
    """Steps ``first`` to ``last`` (excluded)."""
    n = len(flatten(named.values()))
    for step in range(first, last):
        set_gradients(named.values(), interrupted.case.gradient(hvd.rank(), step, n))
        for parameter in named.values():
            assert parameter.grad is not None
            parameter.grad += 0.25 * parameter.detach()
        optimizer.step()
        scheduler.step()


def same(mine: Any, theirs: Any) -> bool:
    """Whether two states are equal to the bit."""
    if isinstance(mine, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


@pytest.mark.parametrize("number", range(20), ids=lambda number: str(draw(number)))
def test_resumed_is_uninterrupted(number: int) -> None:
    interrupted = draw(number)
    named, optimizer, scheduler = begin(interrupted)
    train(interrupted, named, optimizer, scheduler, 0, interrupted.stop)
    file = io.BytesIO()
    torch.save(
        {
            "model": {name: parameter.detach() for name, parameter in named.items()},
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        },
        file,
    )
    train(interrupted, named, optimizer, scheduler, interrupted.stop, STEPS)

    again, resumed, rescheduled = begin(interrupted)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    with torch.no_grad():
        for name, parameter in again.items():
            parameter.copy_(saved["model"][name])
    resumed.load_state_dict(saved["optimizer"])
    rescheduled.load_state_dict(saved["scheduler"])
    train(interrupted, again, resumed, rescheduled, interrupted.stop, STEPS)

    assert same(copies(named.values()), copies(again.values())), "w_k"
    w_bars = global_model(optimizer, named.values()), global_model(resumed, again.values())
    assert same(*w_bars), "w̄"
    assert same(optimizer.state_dict(), resumed.state_dict()), "moments, counters, core"
    assert not same(copies(named.values()), copies(interrupted.case.parameters(interrupted.dtype).values()))
    for each in (optimizer, resumed):
        each._slim.renew()
