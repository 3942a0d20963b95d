"""The planner on real ranks: its bytes are those counted, and with "auto" all ranks choose alike, once."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import hvd_slim as hvd
from hvd_slim.config import EXPLORERS, SHARED_EXPLORERS
from hvd_slim.planner import Network, predict
from ranks.support import Named, Options, copies, gather, set_gradients, slim

alone = pytest.mark.skipif(hvd.size() == 1, reason="one rank exchanges nothing")
N = 30_011
PERIOD = 4

OPTIONS: list[Options] = [
    {"explorer": explorer, "exchange": path, "value_dtype": value_dtype}
    for explorer in EXPLORERS
    for path in (("allreduce",) if explorer in SHARED_EXPLORERS else ("allgather", "alltoall"))
    for value_dtype in ("float32", "bfloat16", "int8", "int4")
]
OPTIONS += [{"exchange": "dense"}, {"exchange": "dense", "value_dtype": "int8"}, {"resync_every": 2}]


def model() -> Named:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return {name: Parameter(torch.randn(count, generator=generator)) for name, count in (("a", N - 11), ("b", 11))}


def train(named: Named, optimizer: Any, first: int, last: int) -> None:
    """Steps ``first`` to ``last`` (excluded), each rank on gradients of its own."""
    for step in range(first, last):
        set_gradients(named.values(), np.random.default_rng([hvd.rank(), step]).normal(size=N))
        optimizer.step()


def path_of(optimizer: Any) -> str:
    return optimizer.state_dict()["hvd_slim"]["path"]


@alone
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_bytes_are_those_counted(options: Options) -> None:
    """Over two re-selection periods within 1 %, the mean over ranks."""
    options = {"exchange": "allgather", "reselect_every": PERIOD, **options}
    named = model()
    optimizer = slim(named, **options)
    train(named, optimizer, 0, PERIOD)
    before = optimizer.stats()
    train(named, optimizer, PERIOD, 3 * PERIOD)
    counted = (optimizer.stats()["total_bytes_sent"] - before["total_bytes_sent"]) / (2 * PERIOD)
    network = Network.uniform(1e9)
    (prediction,) = predict(N, hvd.size(), hvd.Compression.slim(**options), network)
    assert prediction.bytes_sent == pytest.approx(float(gather(np.array([counted])).mean()), rel=0.01)


@alone
@pytest.mark.parametrize("transport", ["horovod", "mpi"])
def test_a_small_model_on_one_machine_goes_dense_and_says_why(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    """CASES 42. One line, on rank 0 alone; the measurement is counted by itself."""
    if transport == "mpi" and not hvd.mpi_enabled():
        pytest.skip("Horovod does not run on MPI here")
    caplog.set_level(logging.INFO, "hvd_slim")
    named = model()
    optimizer = slim(named, exchange="auto", transport=transport)
    train(named, optimizer, 0, 3)
    lines = [record.getMessage() for record in caplog.records if "exchange=" in record.getMessage()]
    if hvd.rank() == 0:
        (line,) = lines
        assert line.startswith("exchange='dense', slim would not be faster here")
        assert all(path in line for path in ("allgather", "alltoall", "dense"))
    else:
        assert not lines
    stats = optimizer.stats()
    assert path_of(optimizer) == "dense"
    assert stats["bytes_sent"]["dense"] == pytest.approx(3 * 2 * (hvd.size() - 1) / hvd.size() * N * 4, rel=0.01)
    assert stats["bytes_sent"]["probe"] > 0
    assert {phase for phase, sent in stats["bytes_sent"].items() if sent} == {"dense", "probe"}


@alone
def test_all_ranks_choose_alike_and_a_resumed_run_goes_on_alike() -> None:
    """Whatever was chosen, a second optimizer that loads the first one's state goes on to the same bits, unmeasured."""
    named = model()
    optimizer = slim(named, exchange="auto", explorer="shared", comm_fraction=0.02, core_fraction=0.01)
    train(named, optimizer, 0, 5)
    paths = hvd.allgather_object(path_of(optimizer))
    assert len(set(paths)) == 1
    state, values = optimizer.state_dict(), copies(named.values())
    train(named, optimizer, 5, 8)

    other = model()
    for parameter, value in zip(other.values(), values):
        parameter.data.copy_(value)
    resumed = slim(other, exchange="auto", explorer="shared", comm_fraction=0.02, core_fraction=0.01)
    resumed.load_state_dict(state)
    train(other, resumed, 5, 8)
    assert path_of(resumed) == paths[0]
    assert resumed.stats()["collectives"]["probe"] == 0
    assert all(torch.equal(one, two) for one, two in zip(named.values(), other.values()))
