"""The ``hvd-slim`` command without a launcher: what it prints, its exit statuses, and what it says of mistakes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hvd_slim import cli
from hvd_slim.cli import options
from hvd_slim.config import EXPLORERS, SlimConfig
from hvd_slim.planner import Network, predict

PLAN = ["plan", "2M", "--ranks", "4", "--bandwidth", "1gbit"]


class Net(torch.nn.Sequential):
    """Ten frozen and 1,010,000 trainable parameters."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(100, 10_000), torch.nn.Linear(9, 1, bias=False), torch.nn.Linear(1, 1))
        for layer in list(self)[1:]:
            layer.requires_grad_(False)


def not_a_model() -> int:
    return 3


def broken() -> torch.nn.Module:
    raise RuntimeError("no data")


# Quantities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bytes_a_second"),
    [("10gbit", 1.25e9), ("10 Gbit/s", 1.25e9), ("10Gbps", 1.25e9), ("800mbit", 1e8), ("1.25GB", 1.25e9),
     ("100MB/s", 1e8), ("8kbit", 1e3), ("1e3Mb", 1.25e8)],
)  # fmt: skip
def test_bandwidth(text: str, bytes_a_second: float) -> None:
    assert options.bandwidth(text) == pytest.approx(bytes_a_second)


@pytest.mark.parametrize("text", ["10", "gbit", "-1gbit", "0gbit", "1gib", "1gbit/h", ""])
def test_no_bandwidth(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.bandwidth(text)


@pytest.mark.parametrize(("text", "seconds"), [("0.2", 0.2), ("200ms", 0.2), ("50us", 5e-5), ("50 µs", 5e-5)])
def test_seconds(text: str, seconds: float) -> None:
    assert options.seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "count"), [("25.6M", 25_600_000), ("1,000", 1000), ("1e6", 10**6), ("7B", 7 * 10**9)])
def test_numbers_of_parameters(text: str, count: int) -> None:
    assert options.parameters_of(text) == count


def test_a_model_is_built_and_counted() -> None:
    named = options.parameters_of(f"{__name__}:Net")
    assert options.size_and_dtype(named) == (1_010_000, torch.float32)


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "2M", "--ranks", "1", "--bandwidth", "1gbit"], "at least 2"),
        (["plan", "2M", "--ranks", "4", "--bandwidth", "1"], "10gbit (bits) or 1.25GB (bytes)"),
        ([*PLAN, "--latency", "x"], "not a time"),
        ([*PLAN, "--fractions", "0.1:0.2"], "core_fraction=0.2 is above comm_fraction=0.1"),
        ([*PLAN, "--fractions", "0.1"], "not COMM:CORE"),
        ([*PLAN, "--explorer", "nobody"], "invalid choice"),
        ([*PLAN, "--chart", "plan.gif"], "does not end in .png"),
        ([*PLAN, "--chart", "/proc/no/plan.png"], "cannot be written"),
        (["plan", "nothing", *PLAN[2:]], "neither a number of parameters"),
        (["plan", "no_such_module:build", *PLAN[2:]], "cannot be imported"),
        (["plan", f"{__name__}:absent", *PLAN[2:]], "cannot be imported"),
        (["plan", f"{__name__}:not_a_model", *PLAN[2:]], "must return a torch.nn.Module"),
        (["plan", f"{__name__}:broken", *PLAN[2:]], "RuntimeError: no data"),
        (["plan", "1", *PLAN[2:]], "too few"),
        (["report", "no-such-file.jsonl"], "there is no file no-such-file.jsonl"),
        (["fly"], "invalid choice"),
        ([], "required"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(arguments)
    except SystemExit as error:  # argparse's own
        status = int(error.code or 0)
    printed = capsys.readouterr()
    assert status == cli.MISUSED
    assert said in printed.err.splitlines()[-1]
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("verb", ["doctor", "plan", "bench", "kernels", "report"])
def test_help_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "examples:" in printed
    assert printed.count(f"hvd-slim {verb}") >= 3


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hvd_slim", *PLAN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2,000,000 parameters, 4 ranks" in done.stdout


def test_bench_needs_several_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvd_slim", "bench", "1k"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == cli.MISUSED
    assert "start several" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_whoever_stops_reading_is_no_error() -> None:
    command = f"'{sys.executable}' -m hvd_slim {' '.join(PLAN)} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


# plan ----------------------------------------------------------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert cli.main([*PLAN, *arguments, "--json"]) == cli.OK
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def test_plan_has_every_path_and_setting_as_the_planner_predicts_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--fractions", "0.3:0.15", "0.02:0.01", "--value-dtype", "float32", "int8")
    rows = plan["settings"]
    assert isinstance(rows, list)
    paths = {(row["config"]["explorer"], row["path"]) for row in rows if row["path"] != "dense"}
    assert {explorer for explorer, _ in paths} == set(EXPLORERS)
    assert len(paths) == 8
    assert len(rows) == 8 * 2 * 2 + 1
    for row in rows:
        (expected,) = predict(2_000_000, 4, SlimConfig(**row["config"]), Network.uniform(1.25e8, 50e-6))
        assert row["bytes_sent"] == expected.bytes_sent
        assert row["seconds"] == expected.seconds
    assert [row["step_seconds"] for row in rows] == sorted(row["step_seconds"] for row in rows)


def test_plans_speedup_is_that_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Against plain Horovod: with nothing hidden, and with all that can be."""
    plan = planned(capsys, "--step-time", "30ms", "--local-steps", "2")
    rows, plain = plan["settings"], plan["horovod_seconds"]
    assert isinstance(rows, list)
    assert isinstance(plain, float)
    for row in rows:
        step = 0.03 + row["seconds"] / 2
        assert row["step_seconds"] == pytest.approx(step)
        assert row["speedup"] == pytest.approx((0.03 + plain) / step)
        assert row["speedup_hidden"] == pytest.approx(max(0.03, plain) / step)


def test_plans_steps_with_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    """The longer of computation and collectives, and own work that hides behind nothing."""
    for milliseconds in (5, 500):
        rare = ["--explorer", "shared", "--reselect-every", "1000000"]
        plan = planned(capsys, "--step-time", f"{milliseconds}ms", *rare)
        compute = milliseconds / 1e3
        rows, plain = plan["settings"], plan["horovod_seconds"]
        assert isinstance(rows, list)
        assert isinstance(plain, float)
        for row in rows:
            travelling = row["seconds"] - row["work_seconds"]
            step = max(compute, travelling) + row["work_seconds"]
            assert row["overlap_seconds"] == pytest.approx(step, rel=1e-3)
            assert row["speedup_overlap"] == pytest.approx(max(compute, plain) / row["overlap_seconds"])


def test_plan_shows_overlap_where_it_knows_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, shown in (([], False), (["--step-time", "100ms"], True)):
        chart = tmp_path / "plan.svg"
        assert cli.main([*PLAN, *more, "--explorer", "shared", "--chart", str(chart)]) == cli.OK
        assert ("overlap, ms" in capsys.readouterr().out) == shown
        assert ("hidden by overlap=True" in chart.read_text()) == shown


@pytest.mark.parametrize(
    ("bandwidth", "more", "verdict"),
    [
        ("100mbit", ["--step-time", "10ms"], "worth it"),
        ("1gbit", ["--step-time", "10s", "--explorer", "shared"], "not worth it"),
        ("1gbit", [], "perhaps"),
        ("1gbit", ["--step-time", "100ms", "--explorer", "shared"], "perhaps"),
        ("1gbit", ["--step-time", "80ms", "--explorer", "shared"], "worth it with overlap=True"),
        ("100gbit", [], "not worth it"),
    ],
)
def test_plan_says_whether_it_is_worth_it(
    bandwidth: str, more: list[str], verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "2M", "--ranks", "8", "--bandwidth", bandwidth, *more]) == cli.OK
    assert capsys.readouterr().out.splitlines()[-1].startswith(verdict)


@pytest.mark.parametrize("form", ["png", "svg"])
def test_plan_draws_a_chart(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / f"plan.{form}"
    assert cli.main([*PLAN, "--chart", str(chart)]) == cli.OK
    assert chart.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert f"chart: {chart}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [chart]
