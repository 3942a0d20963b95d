"""Whether MPI can be used beside Horovod, through mpi4py, and what has to happen before it ends."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from hvd_slim.transport.base import Transport

log = logging.getLogger("hvd_slim")

_INSTEAD = 'or choose transport="horovod"'


class MpiTransportError(RuntimeError):
    """MPI cannot be used beside this Horovod, or a collective failed. One line: the rank, the cause, the remedy."""


def agree_on_mpi(hvd: Any, horovod: Transport) -> tuple[Any, list[int]]:
    """mpi4py's MPI module and the members' ranks in COMM_WORLD, once it is known to work on all of them. Collective.

    Args:
        hvd: ``horovod.torch``.
        horovod: between the members; it works whatever is wrong with MPI.

    Raises:
        MpiTransportError: on every member, if it does not work on one.
    """
    mpi: Any = None
    mine: dict[str, Any] = {"problem": None, "world_rank": None}
    try:
        mpi = load_mpi(hvd)
        mine["world_rank"] = mpi.COMM_WORLD.Get_rank()
    except MpiTransportError as error:
        mine["problem"] = str(error)
    texts = [json.dumps(mine)] if horovod.size == 1 else horovod.gather_texts(json.dumps(mine))
    of_rank = [json.loads(text) for text in texts]
    for rank, facts in enumerate(of_rank):
        if facts["problem"]:
            raise MpiTransportError(f'transport="mpi" cannot work on rank {rank}: {facts["problem"]}')
    world_ranks = [facts["world_rank"] for facts in of_rank]
    if len(set(world_ranks)) < horovod.size:
        raise MpiTransportError(
            f"Horovod counts {horovod.size} ranks, but MPI gives them ranks {world_ranks}; start the job with mpirun, "
            f"srun --mpi or horovodrun --mpi, {_INSTEAD}"
        )
    return mpi, world_ranks


def load_mpi(hvd: Any) -> Any:
    """mpi4py's MPI module, on the MPI that Horovod runs on.

    Raises:
        MpiTransportError: one line that says what to do.
    """
    if not hvd.mpi_built():
        raise MpiTransportError(f"Horovod is built without MPI; rebuild it with HOROVOD_WITH_MPI=1, {_INSTEAD}")
    if not hvd.mpi_enabled():
        # Importing mpi4py would initialise an MPI of one rank.
        raise MpiTransportError(f"Horovod runs on Gloo; start the job with mpirun or horovodrun --mpi, {_INSTEAD}")
    try:
        import mpi4py

        libraries = _libraries(importlib.util.find_spec("mpi4py.MPI"))
        # Importing mpi4py beside another MPI than its own would crash.
        if len(libraries) <= 1:
            mpi4py.rc.initialize = False  # Horovod has done it; a second MPI would start alone
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MpiTransportError(
            f"mpi4py does not import ({' '.join(str(error).split())}); run `pip install mpi4py`, {_INSTEAD}"
        ) from error
    if len(libraries) > 1 or not MPI.Is_initialized():
        raise MpiTransportError(
            f"mpi4py is built for another MPI than Horovod ({', '.join(sorted(libraries)) or 'unknown libraries'}); "
            "with Horovod's mpicc on PATH, run `pip install --force-reinstall --no-cache-dir --no-binary mpi4py "
            f"mpi4py`, {_INSTEAD}"
        )
    if MPI.Is_finalized():
        raise MpiTransportError(f"MPI is finalized; build optimizers before hvd.shutdown(), {_INSTEAD}")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise MpiTransportError(
            "MPI runs without THREAD_MULTIPLE; unset HOROVOD_MPI_THREADS_DISABLE, do not initialise MPI with less "
            f"before hvd.init(), or use an MPI built with it, {_INSTEAD}"
        )
    return MPI


def _libraries(mpi4py: ModuleSpec | None) -> set[str]:
    """The MPI libraries in this process and those that mpi4py would add; empty where the system does not tell."""
    try:
        with open("/proc/self/maps") as lines:
            loaded = {path for line in lines for path in re.findall(r"/\S*/libmpi(?:ch)?\.so\S*", line)}
        with open(str(mpi4py and mpi4py.origin), "rb") as module:
            needed = {name.decode() for name in re.findall(rb"\0(libmpi(?:ch)?\.so[.\d]*)\0", module.read())}
    except OSError:
        return set()
    there = {name for name in needed for path in loaded if os.path.basename(path).startswith(name)}
    return loaded | (needed - there)


def watch_horovod(hvd: Any) -> Callable[[], bool]:
    """Whether Horovod has not been shut down, here or by a rank that ended; never blocks."""
    # hvd.size() and hvd.is_initialized() go on answering after another rank has ended.
    ask = hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_process_set_ranks
    ranks = (ctypes.c_int * hvd.size())()
    return lambda: ask(0, ranks) == 0


# Before MPI ends ------------------------------------------------------------------------------------------------------

_last_acts: list[Callable[[], None]] = []
_attribute: int | None = None


def before_mpi_ends(mpi: Any, act: Callable[[], None]) -> None:
    """Have ``act`` called once, in the order registered, before MPI is finalized: at exit by mpi4py, or by Horovod.

    Horovod does it in a thread of its own, at any time: as soon as it is shut down, here or on another rank. Whoever
    uses MPI must not be inside it then, nor after.
    """
    global _attribute
    _last_acts.append(act)
    if _attribute is None:
        # MPI_Finalize begins by deleting the attributes of COMM_SELF (MPI standard, section "Finalization hooks").
        _attribute = mpi.Comm.Create_keyval(delete_fn=lambda *_: _act_for_the_last_time())
        mpi.COMM_SELF.Set_attr(_attribute, None)


def _act_for_the_last_time() -> None:
    while _last_acts:
        act = _last_acts.pop(0)
        try:
            act()
        except Exception:  # noqa: BLE001  (nobody is there to catch it, and the other acts have to follow)
            log.exception("at the end of MPI")
