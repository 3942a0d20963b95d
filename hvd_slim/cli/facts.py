"""What one rank finds on its machine: plain values, so that rank 0 can look at all ranks' together. Judges nothing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import socket
import sys
from typing import Any

import torch

import hvd_slim
from hvd_slim import horovod_module, launchers, native
from hvd_slim.transport.mpi_environment import MpiTransportError, load_mpi

Facts = dict[str, Any]

_VARIABLES = re.compile(
    r"(SLURM_(JOB_ID|JOB_NUM_NODES|NTASKS|STEP_ID|STEP_NUM_TASKS|CPUS_PER_TASK|CPU_BIND|MPI_TYPE|GPUS_ON_NODE)"
    r"|(OMP|MKL|OPENBLAS)_NUM_THREADS|HOROVOD_\w+|NCCL_\w+|OMPI_MCA_(mpi_yield_when_idle|btl\w*|pml)|CUDA_VISIBLE_DEVICES)"
)
_THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")


def before_horovod() -> Facts:
    """What can be known without starting Horovod."""
    launch = launchers.detect()
    return {
        "host": socket.gethostname(),
        "launcher": {"name": launch.name, "rank": launch.rank, "size": launch.size},
        "lonely": None,
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "hvd_slim": hvd_slim.__version__,
            "horovod": _version("horovod"), "mpi4py": _version("mpi4py"),
        },
        "executable": sys.executable,
        "torch": {
            "cuda": torch.version.cuda,
            "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "nccl": _nccl(),
        },
        "native": {"problem": native.problem, "serves": native.serves()},
        "threads": _threads(),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(_cores())),
        "cores_of_host": _cores(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
        "horovod": {"problem": horovod_module.problem},
        "mpi": None,
        "mpi4py": None,
    }  # fmt: skip


def with_horovod(facts: Facts, hvd: Any) -> Facts:
    """``facts`` and what Horovod, once it is initialised, says."""
    built = {"MPI": bool(hvd.mpi_built()), "Gloo": bool(hvd.gloo_built()), "NCCL": bool(hvd.nccl_built())}
    runs_on = "MPI" if built["MPI"] and hvd.mpi_enabled() else "Gloo"
    horovod = {
        "problem": None, "built": built, "runs_on": runs_on,
        "rank": hvd.rank(), "size": hvd.size(), "local_size": hvd.local_size(),
    }  # fmt: skip
    mpi = _mpi() if runs_on == "MPI" else None
    return {
        **facts, "horovod": horovod, "mpi": mpi, "mpi4py": _mpi4py(hvd, built["MPI"]),
        "lonely": launchers.lonely_task(hvd.size()),
    }  # fmt: skip


def _mpi4py(hvd: Any, built: bool) -> dict[str, Any] | None:
    """What keeps mpi4py from working beside Horovod; None where it would not be used, or is not there."""
    if not built or not hvd.mpi_enabled():
        return None
    try:
        load_mpi(hvd)
    except MpiTransportError as error:
        return {"problem": str(error)}
    return {"problem": None}


def _mpi() -> dict[str, Any]:
    """Name and thread level of the MPI that Horovod has loaded; asked of the library itself, mpi4py may be missing."""
    answer: dict[str, Any] = {"library": None, "threads": None}
    try:
        with open("/proc/self/maps") as lines:
            paths = {path for line in lines for path in re.findall(r"/\S*/libmpi(?:ch)?\.so\S*", line)}
    except OSError:
        return answer
    if len(paths) != 1:
        return answer
    library = ctypes.CDLL(paths.pop())
    text, length, level = ctypes.create_string_buffer(8192), ctypes.c_int(), ctypes.c_int(-1)
    if library.MPI_Initialized(ctypes.byref(level)) != 0 or level.value != 1:
        return answer  # any other question would end the process
    if library.MPI_Get_library_version(text, ctypes.byref(length)) == 0:
        answer["library"] = re.split(r"[,\n]", text.value.decode(errors="replace"))[0].strip()
    if library.MPI_Query_thread(ctypes.byref(level)) == 0 and 0 <= level.value < len(_THREAD_LEVELS):
        answer["threads"] = _THREAD_LEVELS[level.value]
    return answer


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _threads() -> int:
    """Threads that compute. torch takes no more than there are cores; what else is asked for, other libraries take."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(torch.get_num_threads(), int(asked) if asked.isdigit() else 1)


def _cores() -> int:
    return os.cpu_count() or 1
