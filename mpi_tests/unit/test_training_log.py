"""``hvd.TrainingLog`` on one process: what a line holds, what a stopped run leaves, TensorBoard."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_slim as hvd
from hvd_slim.cli.runs import read_runs

pytestmark = pytest.mark.usefixtures("alone")


def an_optimizer(compression: Any = None) -> Any:
    parameter = torch.nn.Parameter(torch.ones(5))
    parameter.grad = torch.ones(5)
    return hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], compression=compression or hvd.Compression.slim()
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_written_as_often_as_asked_and_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "run.jsonl"
    optimizer = an_optimizer()
    with hvd.TrainingLog(path, optimizer, every=3, note="a fact") as log:
        for step in range(7):
            optimizer.step()
            log.step(loss=torch.tensor(float(step), requires_grad=True), rate=0.5)
            assert len(lines(path)) == 1 + (step + 1) // 3
        log.write(test_loss=float("nan"))
    start, first, second, last = lines(path)
    assert (start["event"], start["name"], start["ranks"], start["parameters"]) == ("start", "slim", 1, 5)
    assert start["facts"] == {"note": "a fact"}
    assert start["config"]["comm_fraction"] == 0.3
    assert [first["step"], second["step"], last["step"]] == [3, 6, 7]
    assert second["values"] == {"loss": 5.0, "rate": 0.5}
    assert last["values"] == {"test_loss": None}
    assert 0 < first["seconds"] < second["seconds"] < last["seconds"]
    (run,) = read_runs([str(path)])
    assert run.last.step == 7


def test_horovods_own_optimizer_is_logged_too(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    optimizer = an_optimizer(hvd.Compression.none)
    with hvd.TrainingLog(path, optimizer, name="baseline") as log:
        log.step(loss=1.0)
    start, line = lines(path)
    assert (start["name"], start["bytes_are"]) == ("baseline", "of a ring allreduce of every gradient")
    assert line["total_bytes_sent"] == 0  # one rank


def test_a_stopped_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Also after a writer that was stopped half-way through a line: what comes next is whole."""
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "st')
    hvd.TrainingLog(path, an_optimizer(), first_step=40).step()
    broken, start, step = path.read_text().splitlines()
    assert broken == '{"event": "st'
    assert json.loads(start)["first_step"] == 40
    assert json.loads(step)["step"] == 41


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every=0"):
        hvd.TrainingLog(tmp_path / "a", an_optimizer(), every=0)
    with pytest.raises(ValueError, match="give a file, a folder, or both"):
        hvd.TrainingLog(None, an_optimizer())
    assert not list(tmp_path.iterdir())


def test_without_tensorboard_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        hvd.TrainingLog(None, an_optimizer(), tensorboard=tmp_path)


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    optimizer = an_optimizer()
    with hvd.TrainingLog(None, optimizer, every=2, tensorboard=tmp_path) as log:
        for step in range(6):
            optimizer.step()
            log.step(loss=float(step))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(2, 1.0), (4, 3.0), (6, 5.0)]
    assert {"hvd_slim/MB sent", "hvd_slim/seconds wait"} <= set(events.Tags()["scalars"])
