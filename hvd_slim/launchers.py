"""Who started this process, by the variables that launchers set. Rank and size for training come from Horovod alone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

#: (launcher, its variables for rank, size and ranks on this host), the most particular first: mpirun and horovodrun
#: start their helpers on other nodes through srun, and srun sets the variables of MPICH's mpiexec
_VARIABLES = (
    ("horovodrun with Gloo", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
    ("mpiexec (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)
#: set for what does not stand beside other tasks of its step: the shell of ``srun --pty``, and what mpiexec starts
_ALONE = ("SLURM_PTY_PORT", "HYDI_CONTROL_FD")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher says of this process.

    Attributes:
        name: "srun", "mpirun (Open MPI)", ...; "no launcher".
        rank, size: as it numbers them; 0 and 1 without a launcher.
        local_size: its ranks on this host; None if it does not say.
    """

    name: str
    rank: int = 0
    size: int = 1
    local_size: int | None = None


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launcher of this process."""
    for name, rank, size, local_size in _VARIABLES:
        numbers = _number(environ, rank), _number(environ, size)
        if numbers[0] is not None and numbers[1]:
            return Launch(name, numbers[0], numbers[1], _number(environ, local_size))
    return Launch("no launcher")


def lonely_task(size: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """What is wrong, in one line, if SLURM started several tasks that do not know of each other; else None.

    Said only of a task that srun itself started beside others: not of the batch script or what it runs, of a shell on
    a pseudo terminal, nor of what mpirun or horovodrun started.

    Args:
        size: the number of ranks that Horovod sees.
    """
    launch = detect(environ)
    if size != 1 or launch.name != "srun" or launch.size == 1 or any(name in environ for name in _ALONE):
        return None
    return (
        f"SLURM started {launch.size} tasks, but Horovod sees one rank: each task would train alone. Start them with "
        f"`srun --mpi=pmix` (`srun --mpi=list` shows what this SLURM has, and Horovod must be built with an MPI that "
        f"has PMIx), or use mpirun or horovodrun. To train alone in each task, unset SLURM_STEP_NUM_TASKS"
    )


def without_pmi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started several tasks and gave them nothing to find each other by: Open MPI aborts then."""
    given = any(name.startswith(("PMIX_", "PMI_", "PMI2_", "PALS_")) for name in environ)
    return not given and lonely_task(1, environ) is not None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else None
