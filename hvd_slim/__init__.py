"""Slim-DP for Horovod and PyTorch: ``import hvd_slim as hvd`` stands in for ``import horovod.torch as hvd``.

Everything that ``horovod.torch`` has is here too; what hvd_slim replaces or adds is listed in ``__all__``.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from hvd_slim.agreement import NonFiniteError, RankMismatchError
from hvd_slim.config import SlimConfig
from hvd_slim.optimizer import DistributedOptimizer
from hvd_slim.watchdog import StalledError

__version__ = "0.1.0"
__all__ = ["Compression", "DistributedOptimizer", "NonFiniteError", "RankMismatchError", "SlimConfig", "StalledError"]


def _load_horovod() -> tuple[Any, str | None]:
    """Horovod's torch module, or one line that says why there is none and what to do."""
    remedy = "run `bash scripts/setup.sh`, or build it with `HOROVOD_WITH_PYTORCH=1 pip install --no-cache-dir horovod`"
    try:
        module = importlib.import_module("horovod.torch")
    except ImportError as error:
        return (None, f"hvd_slim needs Horovod, which does not import ({error}); {remedy}")
    if not hasattr(module, "init"):
        return (None, f"hvd_slim needs Horovod built with PyTorch, and this Horovod is not; {remedy}")
    return module, None


_horovod, _problem = _load_horovod()
if _problem is not None:
    warnings.warn(_problem, UserWarning, stacklevel=2)


class Compression(_horovod.Compression if _horovod else object):  # type: ignore[misc]
    """``none`` and ``fp16`` are Horovod's own; ``slim(...)`` takes the options of ``SlimConfig``."""

    slim = SlimConfig


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _horovod is None:
        raise ImportError(_problem)
    try:
        return getattr(_horovod, name)
    except AttributeError:
        raise AttributeError(f"neither hvd_slim nor horovod.torch has an attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *(dir(_horovod) if _horovod else ())})
