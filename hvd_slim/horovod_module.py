"""Horovod's torch module, or the one line that says why there is none and what to do."""

from __future__ import annotations

import importlib
from typing import Any

_REMEDY = "run `bash scripts/setup.sh`, or build it with `HOROVOD_WITH_PYTORCH=1 pip install --no-cache-dir horovod`"


def _load() -> tuple[Any, str | None]:
    try:
        loaded = importlib.import_module("horovod.torch")
    except ImportError as error:
        return None, f"hvd_slim needs Horovod, which does not import ({error}); {_REMEDY}"
    if not hasattr(loaded, "init"):
        return None, f"hvd_slim needs Horovod built with PyTorch, and this Horovod is not; {_REMEDY}"
    return loaded, None


#: Horovod's torch module or None, and what is wrong or None
module, problem = _load()


def require() -> Any:
    """Horovod's torch module.

    Raises:
        ImportError: there is none; one line says what to do.
    """
    if module is None:
        raise ImportError(problem)
    return module
