"""``hvd-slim kernels``: what is measured is what a round does, and what is printed is what was measured."""

from __future__ import annotations

import json

import pytest

from hvd_slim import cli
from hvd_slim.config import SlimConfig
from hvd_slim.kernels import kernels

N = 50_000


@pytest.mark.parametrize("explorer", ["shared", "leader"])
def test_a_round_in_three_parts(explorer: str) -> None:
    config = SlimConfig(explorer=explorer, exchange="allreduce")
    parts = {kernel.name: kernel for kernel in kernels(N, config, "allreduce", ranks=4, repeats=3)}
    choice = "leader's choice" if explorer == "leader" else "explorers' draw"
    assert list(parts) == ["re-selection", choice, "pack and merge"]
    for kernel in parts.values():
        assert kernel.n == N
        assert len(kernel.copies) == 3
        assert kernel.seconds > 0


@pytest.mark.parametrize("path", ["allgather", "alltoall"])
def test_private_explorers(path: str) -> None:
    (_, draw, merge) = kernels(N, SlimConfig(exchange=path), path, ranks=3, repeats=3)
    assert 0 < draw.least < merge.least


def test_the_least_grows_with_what_is_sent_up_to_all_lines() -> None:
    def least(comm: float) -> float:
        config = SlimConfig(comm_fraction=comm, core_fraction=comm / 2, explorer="shared", exchange="allreduce")
        (_, _, merge) = kernels(N, config, "allreduce", ranks=4, repeats=1)
        return merge.least

    sparse, reference, dense = least(0.001), least(0.3), least(1.0)
    # Of sparse coordinates each costs six passes over a cache line, and 16 bytes of its own.
    assert sparse == pytest.approx(0.001 * (6 * 64 + 16) / 12, rel=0.02)
    assert reference > 30 * sparse
    assert dense == pytest.approx((6 * 4 + 16) / 12, rel=0.01)


def test_the_table_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["kernels", "50k", "20k", "--fractions", "0.1:0.05", "--explorer", "shared", "--repeats", "2"]
    assert cli.main(arguments) == cli.OK
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| allreduce")]
    assert cli.main([*arguments, "--json"]) == cli.OK
    rows = json.loads(capsys.readouterr().out)
    assert len(lines) == len(rows) == 6
    assert [row["name"] for row in rows] == ["re-selection", "explorers' draw", "pack and merge"] * 2
    assert [row["n"] for row in rows] == [50_000] * 3 + [20_000] * 3
    for line, row in zip(lines, rows):
        assert row["name"] in line
        assert f"{row['n']:,}" in line
        assert len(row["copies"]) == 2
