"""Slim-DP for Horovod and PyTorch: ``import hvd_slim as hvd`` stands in for ``import horovod.torch as hvd``.

Everything that ``horovod.torch`` has is here too; what hvd_slim replaces or adds is listed in ``__all__``.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from hvd_slim import horovod_module
from hvd_slim.agreement import NonFiniteError, RankMismatchError
from hvd_slim.config import SlimConfig
from hvd_slim.functions import (
    allgather_object,
    average_buffers,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    shutdown,
)
from hvd_slim.optimizer import DistributedOptimizer
from hvd_slim.training_log import TrainingLog
from hvd_slim.uneven import join, uneven_inputs
from hvd_slim.watchdog import StalledError

__version__ = "0.1.0"
__all__ = [
    "Compression",
    "DistributedOptimizer",
    "NonFiniteError",
    "RankMismatchError",
    "SlimConfig",
    "StalledError",
    "TrainingLog",
    "allgather_object",
    "average_buffers",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "join",
    "shutdown",
    "uneven_inputs",
]


if horovod_module.problem is not None:
    warnings.warn(horovod_module.problem, UserWarning, stacklevel=2)


class _WithoutHorovod(type):
    """Names what is missing when an attribute of Horovod's is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name in ("none", "fp16"):
            raise ImportError(horovod_module.problem)
        raise AttributeError(name)


_HorovodCompression: type = (
    horovod_module.module.Compression if horovod_module.module else _WithoutHorovod("Compression", (), {})
)


class Compression(_HorovodCompression):
    """``none`` and ``fp16`` are Horovod's own; ``slim(...)`` takes the options of ``SlimConfig``."""

    slim = SlimConfig


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "elastic":
        horovod_module.require()
        return importlib.import_module("hvd_slim.elastic")
    try:
        return getattr(horovod_module.require(), name)
    except AttributeError:
        raise AttributeError(f"neither hvd_slim nor horovod.torch has an attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *(dir(horovod_module.module) if horovod_module.module else ())})
