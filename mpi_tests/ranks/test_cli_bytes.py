"""``hvd-slim plan`` and ``bench`` on real ranks: predicted bytes are those that training sends."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import hvd_slim as hvd
from hvd_slim import cli
from hvd_slim.benchmark import BenchedSetting, stand_in, time_plain_horovod
from hvd_slim.config import SlimConfig
from ranks.support import gather, set_gradients

pytestmark = pytest.mark.skipif(hvd.size() == 1, reason="one rank exchanges nothing")

N, PERIOD = 40_000, 5


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """The rows that the command prints for as many ranks as there are."""
    command = ["plan", str(N), "--ranks", str(hvd.size()), "--bandwidth", "1gbit", "--reselect-every", str(PERIOD)]
    assert cli.main([*command, *arguments, "--json"]) == cli.OK
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["settings"]
    return sorted(rows, key=lambda row: json.dumps(row["config"], sort_keys=True))


def test_planned_bytes_are_those_that_training_sends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2 %, every path and setting, over two re-selection periods of a real optimizer."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")  # every rank may print: the test reads it
    rows = plan(capsys, "--value-dtype", "float32", "int8", "--fractions", "0.3:0.15", "0.02:0.01")
    assert len(rows) == 33
    for row in rows:
        generator = torch.Generator().manual_seed(0)
        parameter = Parameter(torch.randn(N, generator=generator))
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD([parameter], lr=0.01), compression=hvd.Compression.slim(**row["config"])
        )
        before = 0.0
        for step in range(3 * PERIOD):
            if step == PERIOD:
                before = optimizer.stats()["total_bytes_sent"]
            set_gradients([parameter], np.random.default_rng([hvd.rank(), step]).normal(size=N))
            optimizer.step()
        sent = (optimizer.stats()["total_bytes_sent"] - before) / (2 * PERIOD)
        assert row["bytes_sent"] == pytest.approx(float(gather(np.array([sent])).mean()), rel=0.02), row["config"]


@pytest.mark.parametrize("path", ["dense", "allgather", "alltoall"])
def test_a_bench_counts_what_is_predicted(path: str) -> None:
    from hvd_slim.planner import predict

    config = SlimConfig(exchange=path, reselect_every=PERIOD)
    setting = BenchedSetting(config, stand_in(N), f"bench.{path}")
    setting.period(1)
    (prediction,) = predict(N, hvd.size(), config, setting.network())
    assert setting.bytes_sent() == pytest.approx(prediction.bytes_sent, rel=0.02)
    assert 0 < setting.seconds() < 30
    setting.close()


def test_plain_horovod_is_timed() -> None:
    seconds = time_plain_horovod(stand_in(N), 3)
    assert 0 < seconds < 30
    assert len(set(hvd.allgather_object(seconds))) == 1
