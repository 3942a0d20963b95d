"""The ``hvd-slim`` command under launchers: one answer for all ranks, one exit status, no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import launch

COMMAND = [sys.executable, "-m", "hvd_slim"]
MPIRUN = ["mpirun", "--oversubscribe", "-np", "2"]
LIMIT = 120.0


def answer(output: str) -> Any:
    """What rank 0 printed as JSON."""
    lines = [
        line.split("<stdout>:")[-1]
        for line in output.splitlines()
        if line.split("<stdout>:")[-1].startswith(("{", "["))
    ]
    (line,) = lines
    return json.loads(line)


@pytest.mark.parametrize(
    "launcher",
    [MPIRUN, ["horovodrun", "--disable-cache", "--gloo", "-np", "2"]],
    ids=["mpirun", "horovodrun with Gloo"],
)
def test_doctor_prints_once_and_the_ranks_agree(launcher: list[str]) -> None:
    done = launch([*launcher, *COMMAND, "doctor", "--json"], LIMIT)
    assert done.status == 0, done.output
    found = {finding["subject"]: finding for finding in answer(done.output)["findings"]}
    assert "2 ranks on 1 host, started by" in found["ranks"]["text"]
    assert launcher[0] in found["ranks"]["text"]
    assert found["agreement"]["level"] == "ok"


def test_doctor_finds_what_is_wrong_on_one_rank() -> None:
    """More threads than cores, on rank 1 alone."""
    ranks = [*MPIRUN, *COMMAND, "doctor", "--json"]
    ranks[3] = "1"
    other = ["-np", "1", "-x", "OMP_NUM_THREADS=999", *COMMAND, "doctor", "--json"]
    done = launch([*ranks, ":", *other], LIMIT)
    assert done.status == 0, done.output
    found = {finding["subject"]: finding for finding in answer(done.output)["findings"]}
    assert "1000 threads of 2 ranks" in found["threads"]["text"]
    assert "differ in OMP_NUM_THREADS: 1 and 999" in found["agreement"]["text"]


def test_doctor_does_not_wait_for_ever() -> None:
    """Another rank that never comes: an error, in time."""
    ranks = [*MPIRUN, *COMMAND, "doctor", "--timeout", "5"]
    ranks[3] = "1"
    sleeper = "import time; from mpi4py import MPI; time.sleep(60)"
    done = launch([*ranks, ":", "-np", "1", sys.executable, "-c", sleeper], LIMIT)
    assert done.status == 1, done.output
    assert "rank 0 of 2" in done.output
    assert "waited 5 s for the others" in done.output


def test_a_mistake_is_said_once() -> None:
    done = launch([*MPIRUN, *COMMAND, "bench", "nothing"], LIMIT)
    assert done.status == 2, done.output
    assert done.output.count("hvd-slim bench: error: 'nothing' is neither a number") == 1
    assert "Traceback" not in done.output
    done = launch([*MPIRUN, *COMMAND, "bench"], LIMIT)
    assert done.status == 2, done.output
    assert done.output.count("the following arguments are required") == 1


def test_bench_prints_measured_beside_predicted(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("import torch\ndef build(): return torch.nn.Linear(300, 300)\n")
    command = (
        f"cd '{tmp_path}' && exec {' '.join(MPIRUN)} {' '.join(COMMAND)} bench nets:build --explorer shared --repeats 1"
    )
    done = launch(["bash", "-c", f"{command} --json"], LIMIT)
    assert done.status == 0, done.output
    rows = answer(done.output)
    assert {row["config"] and row["config"]["exchange"] for row in rows} == {None, "dense", "allreduce"}
    for row in rows:
        assert row["seconds"] > 0
        assert row["predicted"]["seconds"] > 0
        if row["config"]:
            assert row["bytes_sent"] == pytest.approx(row["predicted"]["bytes_sent"], rel=0.02)
    done = launch(["bash", "-c", command], LIMIT)
    assert done.status == 0, done.output
    assert "90,300 parameters, 2 ranks" in done.output
    assert "fastest here:" in done.output
