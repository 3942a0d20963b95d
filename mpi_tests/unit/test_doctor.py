"""``hvd-slim doctor`` finds what is wrong, one fault planted a test, and says what to do; and where all is well, so."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from hvd_slim import launchers, native
from hvd_slim.cli import checks

ROOT = Path(__file__).resolve().parents[2]

#: what stands in for Horovod: as much of it as the doctor asks
FAKE_HOROVOD = """
def init(): pass
def shutdown(): pass
def rank(): return 0
def size(): return 1
def local_size(): return 1
def mpi_built(): return {mpi}
def gloo_built(): return True
def nccl_built(): return False
def mpi_enabled(): return {mpi}
class Compression:
    none = fp16 = None
"""


def doctor(folder: Path | None = None, **environment: str) -> dict[str, Any]:
    """What the command finds in a process of its own, with the modules in ``folder`` before all others."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI_C", "HOROVOD"))}
    paths = [str(path) for path in (folder, ROOT) if path]
    done = subprocess.run(
        [sys.executable, "-m", "hvd_slim", "doctor", "--json"], capture_output=True, text=True, timeout=120, cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **environment},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (1 if answer["status"] == "error" else 0)
    assert all(finding["remedy"] for finding in answer["findings"] if finding["level"] != "ok")
    return answer


def finding(answer: dict[str, Any], subject: str) -> dict[str, str]:
    (found,) = [found for found in answer["findings"] if found["subject"] == subject]
    return found


def fake_horovod(folder: Path, torch_module: str) -> Path:
    package = folder / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(torch_module)
    return folder


def test_all_is_well() -> None:
    """CASES 46."""
    answer = doctor()
    levels = {found["subject"]: found["level"] for found in answer["findings"]}
    compiled = levels.pop("native")
    assert levels == dict.fromkeys(("horovod", "ranks", "mpi", "mpi4py", "torch", "threads"), "ok"), answer
    assert compiled == ("ok" if native.available() else "warning"), answer  # there may be no compiler
    assert answer["ranks"][0]["versions"]["horovod"]


def test_horovod_absent(tmp_path: Path) -> None:
    fake_horovod(tmp_path, "")
    (tmp_path / "horovod" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'horovod'\")")
    found = finding(doctor(tmp_path), "horovod")
    assert found["level"] == "error"
    assert "No module named 'horovod'" in found["text"]
    assert "pip install --no-cache-dir horovod" in found["remedy"]


def test_horovod_built_without_pytorch(tmp_path: Path) -> None:
    found = finding(doctor(fake_horovod(tmp_path, "print('Extension horovod.torch has not been built')")), "horovod")
    assert found["level"] == "error"
    assert "built with PyTorch" in found["text"]


def test_horovod_built_without_mpi(tmp_path: Path) -> None:
    answer = doctor(fake_horovod(tmp_path, FAKE_HOROVOD.format(mpi=False)))
    found = finding(answer, "horovod")
    assert found["level"] == "warning"
    assert "built with Gloo" in found["text"]
    assert "HOROVOD_WITH_MPI=1" in found["remedy"]


def test_horovod_built_without_mpi_under_mpirun(tmp_path: Path) -> None:
    answer = doctor(
        fake_horovod(tmp_path, FAKE_HOROVOD.format(mpi=False)), OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="4"
    )
    found = finding(answer, "ranks")
    assert found["level"] == "error"
    assert "started 4 ranks, Horovod sees one" in found["text"]
    assert "horovodrun --gloo" in found["remedy"]


def test_mpi4py_against_another_mpi(tmp_path: Path) -> None:
    """The module's file names the library that it needs; importing it would crash."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: initialize = True")
    (package / f"MPI{EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF\0libmpich.so.12\0libc.so.6\0")
    found = finding(doctor(tmp_path), "mpi4py")
    assert found["level"] == "error"
    assert "another MPI than Horovod" in found["text"]
    assert "libmpich.so.12" in found["text"]
    assert "pip install --force-reinstall" in found["remedy"]


def test_mpi4py_absent(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    found = finding(doctor(tmp_path), "mpi4py")
    assert found["level"] == "warning"
    assert "pip install mpi4py" in found["remedy"]


def test_thread_level_below_multiple() -> None:
    """Asked of the real MPI library, which Horovod was told to start that way."""
    found = finding(doctor(HOROVOD_MPI_THREADS_DISABLE="1"), "mpi")
    assert found["level"] == "warning"
    assert "thread level single" in found["text"]
    assert "HOROVOD_MPI_THREADS_DISABLE" in found["remedy"]


def test_more_threads_than_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    found = finding(doctor(OMP_NUM_THREADS=str(cores + 3)), "threads")
    assert found["level"] == "warning"
    assert f"{cores + 3} threads of 1 rank" in found["text"]
    assert f"OMP_NUM_THREADS={cores}" in found["remedy"]


def test_compiled_passes_switched_off() -> None:
    found = finding(doctor(HVD_SLIM_NATIVE="0"), "native")
    assert found["level"] == "warning"
    assert "switched off by HVD_SLIM_NATIVE=0" in found["text"]
    assert found["remedy"] == "unset HVD_SLIM_NATIVE"


@pytest.mark.parametrize(("content", "text"), [(None, "not built"), (b"of another machine", "does not load")], ids=str)
def test_compiled_passes_that_are_not_there(content: bytes | None, text: str, tmp_path: Path) -> None:
    """hvd_slim imports without them; the doctor says why they are not used."""
    copied = tmp_path / "hvd_slim"
    shutil.copytree(ROOT / "hvd_slim", copied, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if content:
        (copied / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(content)
    found = finding(doctor(tmp_path, HVD_SLIM_NATIVE="1"), "native")
    assert found["level"] == "warning"
    assert text in found["text"]
    assert "C compiler" in found["remedy"]


STEP_OF_4 = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"
}  # fmt: skip


GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


@pytest.mark.parametrize("more", [{}, {"PMI_RANK": "0"}, GLOO], ids=str)
def test_srun_without_pmix(more: dict[str, str]) -> None:
    """Seen before MPI starts, which may end the process, and after."""
    found = finding(doctor(None, **STEP_OF_4, **more), "ranks")
    assert found["level"] == "error"
    assert "SLURM started 4 tasks" in found["text"]
    assert "srun --mpi=pmix" in found["remedy"]


def test_other_tasks_of_it_do_not_print() -> None:
    environment = {**os.environ, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "hvd_slim", "doctor"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode, done.stdout) == (1, "")


# What several ranks tell ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone_facts() -> Any:
    return doctor()["ranks"][0]


def several(facts: Any, count: int, cores: int = 64) -> list[Any]:
    """Facts of ``count`` ranks on one host, where all is well."""
    ranks = [copy.deepcopy(facts) for _ in range(count)]
    for rank, one in enumerate(ranks):
        one["launcher"] = {"name": "mpirun (Open MPI)", "rank": rank, "size": count}
        one["horovod"] |= {"rank": rank, "size": count, "local_size": count}
        one["native"] = {"problem": None, "serves": True}
        one["cores"], one["cores_of_host"], one["threads"] = list(range(cores)), cores, 1
        one["environment"].pop("OMPI_MCA_mpi_yield_when_idle", None)  # the tests themselves may run with it
    return ranks


def worst(ranks: list[Any], subject: str) -> checks.Finding:
    (found,) = [found for found in checks.findings(ranks) if found.subject == subject]
    return found


def test_several_ranks_where_all_is_well(alone_facts: Any) -> None:
    found = checks.findings(several(alone_facts, 4))
    assert {finding.level for finding in found} == {"ok"}
    assert {"agreement", "busy waiting"} <= {finding.subject for finding in found}


def test_ranks_that_share_cores(alone_facts: Any) -> None:
    """CASES 48."""
    ranks = several(alone_facts, 4, cores=8)
    for facts in ranks:
        facts["threads"] = 4
    assert "16 threads of 4 ranks" in worst(ranks, "threads").text
    assert "OMP_NUM_THREADS=2" in worst(ranks, "threads").remedy
    # The same threads on two hosts are fine.
    for facts in ranks[2:]:
        facts["host"] = "other"
    assert worst(ranks, "threads").level == "ok"


def test_a_rank_that_is_bound_to_fewer_cores_than_it_has_threads(alone_facts: Any) -> None:
    ranks = several(alone_facts, 2)
    ranks[1]["cores"], ranks[1]["threads"] = [5], 4
    assert "rank 1 has 4 threads but is bound to 1 core" in worst(ranks, "threads").text


def test_compiled_passes_on_some_ranks(alone_facts: Any) -> None:
    ranks = several(alone_facts, 2)
    assert "in use" in worst(ranks, "native").text
    ranks[1]["native"]["serves"] = False
    assert "for ranks with one thread" in worst(ranks, "native").text
    ranks[1]["native"]["problem"] = "not built"
    assert worst(ranks, "native").level == "warning"
    assert "not built (on rank 1" in worst(ranks, "native").text


def test_busy_waiting(alone_facts: Any) -> None:
    ranks = several(alone_facts, 2, cores=2)
    assert worst(ranks, "busy waiting").level == "warning"
    assert "--mca mpi_yield_when_idle 1" in worst(ranks, "busy waiting").remedy
    for facts in ranks:
        facts["environment"]["OMPI_MCA_mpi_yield_when_idle"] = "1"
    assert worst(ranks, "busy waiting").level == "ok"


@pytest.mark.parametrize("what", ["torch", "horovod", "python", "hvd_slim"])
def test_ranks_with_different_versions(what: str, alone_facts: Any) -> None:
    ranks = several(alone_facts, 3)
    ranks[2]["versions"][what] = "0.0"
    found = worst(ranks, "agreement")
    assert found.level == "error"
    assert f"ranks 0 and 2 (host {ranks[2]['host']}) differ in {what}" in found.text


def test_ranks_with_different_variables(alone_facts: Any) -> None:
    ranks = several(alone_facts, 2)
    ranks[1]["environment"]["HOROVOD_CYCLE_TIME"] = "5"
    assert "HOROVOD_CYCLE_TIME" in worst(ranks, "agreement").text
    assert worst(ranks, "agreement").level == "warning"


def test_gpus_without_nccl(alone_facts: Any) -> None:
    ranks = several(alone_facts, 2)
    for facts in ranks:
        facts["torch"] = {"cuda": "12.8", "devices": 2, "nccl": "2.27"}
    assert "without NCCL" in worst(ranks, "torch").text
    for facts in ranks:
        facts["horovod"]["built"]["NCCL"] = True
    assert worst(ranks, "torch").level == "ok"
    ranks = several(ranks[0], 4)
    assert "4 ranks and rank 0 sees 2 devices" in worst(ranks, "torch").text


def test_tasks_that_do_not_train(alone_facts: Any) -> None:
    ranks = several(alone_facts, 2)
    for facts in ranks:
        facts["environment"] |= {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}
    assert "8 tasks on 2 nodes, but 2 ranks train" in worst(ranks, "slurm").text


# Who started this ----------------------------------------------------------------------------------------------------

STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "name", "rank", "size"),
    [
        ({}, "no launcher", 0, 1),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "no launcher", 0, 1),  # a batch script runs python
        (STEP, "srun", 1, 4),
        ({**STEP, "PMI_RANK": "1", "PMI_SIZE": "4"}, "srun", 1, 4),
        ({**STEP, **MPIRUN}, "mpirun (Open MPI)", 1, 2),  # whose helper srun started on this node
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3"}, "horovodrun with Gloo", 1, 3),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "mpiexec (MPICH, Intel MPI)", 1, 4),
    ],
)
def test_launchers_are_told_apart(environ: dict[str, str], name: str, rank: int, size: int) -> None:
    """CASES 47."""
    launch = launchers.detect(environ)
    assert (launch.name, launch.rank, launch.size) == (name, rank, size)


@pytest.mark.parametrize(
    ("size", "environ", "lonely"),
    [
        (1, STEP, True),
        (4, STEP, False),
        (1, {}, False),
        (1, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "3"}, False),
        (1, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, False),
        (1, {**STEP, "SLURM_PTY_PORT": "4"}, False),
        (1, {**STEP, **MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}, False),
        (1, {**STEP, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, False),
    ],
)
def test_a_task_that_is_alone_by_mistake(size: int, environ: dict[str, str], lonely: bool) -> None:
    assert (launchers.lonely_task(size, environ) is not None) == lonely


def test_training_refuses_to_be_alone_by_mistake(tmp_path: Path) -> None:
    """In one line that says which flag is missing; and trains once told that it is on purpose."""
    code = """
import torch, hvd_slim as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.Compression.slim())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("stepped")
"""
    environment = {**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    assert "SLURM started 2 tasks, but Horovod sees one rank" in done.stderr.splitlines()[-1]
    assert "--mpi=pmix" in done.stderr.splitlines()[-1]
    del environment["SLURM_STEP_NUM_TASKS"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "stepped\n", done.stderr
