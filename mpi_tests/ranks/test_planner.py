"""The planner on real ranks: its bytes are those counted, and with "auto" all ranks choose alike, once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import hvd_slim as hvd
from hvd_slim import probe
from hvd_slim.config import EXPLORERS, SHARED_EXPLORERS
from hvd_slim.planner import Network, choose, predict
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


@pytest.fixture
def measured_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Network], list[Network]]:
    """Lets the probe measure, then has the choice made by a network on paper; the list is of what was measured."""

    def install(network: Network) -> list[Network]:
        measure, measured = probe.measure, list[Network]()

        def measured_and_put_aside(*arguments: Any) -> Network:
            measured.append(measure(*arguments))
            return network

        monkeypatch.setattr(probe, "measure", measured_and_put_aside)
        return measured

    return install


FAST, SLOW = Network.uniform(10e9), Network.uniform(1e6)  # bytes a second


@alone
@pytest.mark.parametrize("transport", ["horovod", "mpi"])
@pytest.mark.parametrize(
    ("network", "reason"),
    [(FAST, "slim would not be faster here"), (SLOW, r"0\.\d+ of dense's bytes, 0\.\d+ of its time")],
    ids=["fast", "slow"],
)
def test_auto_goes_by_the_network_and_says_why(
    network: Network,
    reason: str,
    transport: str,
    measured_as: Callable[[Network], list[Network]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CASES 42. One line, on rank 0 alone; the measurement is counted by itself, and is the same on all ranks."""
    if transport == "mpi" and not hvd.mpi_enabled():
        pytest.skip("Horovod does not run on MPI here")
    measured = measured_as(network)
    caplog.set_level(logging.INFO, "hvd_slim")
    named = model()
    optimizer = slim(named, exchange="auto", transport=transport)
    train(named, optimizer, 0, 3)

    path = path_of(optimizer)
    expected, why = choose(predict(N, hvd.size(), hvd.Compression.slim(exchange="auto"), network))
    assert path == expected
    assert (path == "dense") == (network is FAST)
    of_rank = hvd.allgather_object((path, measured))
    assert of_rank == [(path, measured)] * hvd.size()
    assert len(measured) == 1
    lines = [record.getMessage() for record in caplog.records if "exchange=" in record.getMessage()]
    if hvd.rank() == 0:
        assert lines == [why]
        assert re.match(f"exchange='{path}', {reason}", why), why
        assert all(other in why for other in ("allgather", "alltoall", "dense")), why
    else:
        assert not lines

    sent = {phase: nbytes for phase, nbytes in optimizer.stats()["bytes_sent"].items() if nbytes}
    assert sent.pop("probe") > 0
    if path == "dense":
        assert set(sent) == {"dense"}
        assert sent["dense"] == pytest.approx(3 * 2 * (hvd.size() - 1) / hvd.size() * N * 4, rel=0.01)
    else:
        assert set(sent) >= {"core", "explorer", "select"}


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
