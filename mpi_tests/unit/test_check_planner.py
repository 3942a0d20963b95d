"""What scripts/check_planner.py makes of measurements: tables, and an exit status that can be relied on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_planner.py"


def record(**changes: Any) -> dict[str, Any]:
    """One setting on one network: allreduce at 20 ms a round, dense at 40; both predicted 10 % too long."""
    return {
        "network": "1gbit", "ranks": 2, "n": 1000, "setting": "shared 0.02",
        "measured": {"allreduce": [0.020, 0.020, 0.050], "dense": [0.040, 0.040, 0.041]},
        "predicted": {"allreduce": [0.022, 0.090, 0.022], "dense": [0.044, 0.044, 0.044]},
        "own_work": {"allreduce": [0.010] * 3, "dense": [0.001] * 3},
        "picked": "allreduce", "picked_by_each": ["allreduce", "dense", "allreduce"], "probe_seconds": [1.0] * 3,
        **changes,
    }  # fmt: skip


def table(*records: dict[str, Any]) -> tuple[int, str]:
    """(exit status, what is printed)."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "table"], input="\n".join(map(json.dumps, records)), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert not done.stderr
    return done.returncode, done.stdout


def test_good_predictions_and_picks_pass() -> None:
    """What disturbed some periods and probes does not count."""
    status, printed = table(record(), record(ranks=4))
    assert status == 0
    assert "4 of 4 predictions on shaped links within 25 % of measured; worst 1.10" in printed
    assert "2 of 2 picks are the fastest path or within 15 % of it; worst 1.00" in printed
    assert "Of single probes, 4 of 6." in printed


@pytest.mark.parametrize("predicted", [0.0149, 0.0251])
def test_a_time_that_is_off_fails_where_links_are_shaped(predicted: float) -> None:
    off = {"allreduce": [predicted] * 3, "dense": [0.044] * 3}
    status, printed = table(record(predicted=off))
    assert status == 1
    assert f"1 of 2 predictions on shaped links within 25 % of measured; worst {predicted / 0.02:.2f}" in printed
    assert table(record(), record(predicted=off, network="loopback"))[0] == 0


def test_a_slow_pick_fails_on_any_network() -> None:
    status, printed = table(record(network="loopback", picked="dense"))
    assert status == 1
    assert "0 of 1 picks are the fastest path or within 15 % of it; worst 2.00" in printed


def test_nothing_measured_fails() -> None:
    assert table()[0] == 1
