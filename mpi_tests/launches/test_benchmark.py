"""scripts/benchmark.py in small: every kind of system is measured, and its lines become tables and a chart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launcher import launch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = [sys.executable, str(ROOT / "scripts" / "benchmark.py")]
LIMIT = 150.0  # seconds for a launch, on a busy machine
SYSTEMS = ("no communication", "Horovod float16", "DDP PowerSGD rank 2", "leader 0.02, overlap, int8")


def test_systems_are_measured_and_shown(tmp_path: Path) -> None:
    lines = tmp_path / "benchmark.jsonl"
    for system in SYSTEMS:
        run = [*BENCHMARK, "run", "--system", system, "--model", "cnn", "--steps", "4", "--warmup", "2"]
        done = launch(["mpirun", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-np", "2", *run], LIMIT)
        assert done.status == 0, done.output
        (line,) = [line for line in done.output.splitlines() if line.startswith("{")]
        record = json.loads(line)
        assert (record["system"], record["ranks"], record["parameters"]) == (system, 2, 206_922)
        assert 0 < record["seconds"] < LIMIT
        slim = system.startswith("leader")
        assert (record["stats"] is not None) == slim
        assert (record["path"] == "allreduce") == slim
        with lines.open("a") as file:
            file.write(line + "\n")

    done = launch([*BENCHMARK, "show", str(lines), str(lines), "--out", str(tmp_path)], LIMIT)
    assert done.status == 0, done.output
    rows = [line for line in done.output.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(SYSTEMS)
    assert rows[0].split(" | ")[3] == "1.00"
    assert (tmp_path / "benchmark.png").stat().st_size > 10_000


@pytest.mark.parametrize("arguments", [["run", "--system", "of nobody"], ["show"], ["table", "--models", "none"]])
def test_refusals(arguments: list[str]) -> None:
    done = launch([*BENCHMARK, *arguments], LIMIT)
    assert done.status == 2
    assert "usage: benchmark.py" in done.output
