"""The cost model: its bytes are what is counted, its times follow the network, its choice follows its times."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hvd_slim import planner, probe
from hvd_slim.arena import Arena
from hvd_slim.config import EXPLORERS, SHARED_EXPLORERS, SlimConfig
from hvd_slim.exchange import PATHS
from hvd_slim.exchange.base import Exchange
from hvd_slim.exchange.flight import Flight
from hvd_slim.explorer import EXPLORERS as EXPLORER_CLASSES
from hvd_slim.own_work import Rehearsed
from hvd_slim.planner import Link, Network, Prediction, choose, predict
from hvd_slim.rehearsal import rehearse
from hvd_slim.synchronizer import Synchronizer
from hvd_slim.values import VALUE_DTYPES
from unit.simulated import SimulatedTransport, on_all_ranks

FAST, SLOW, MODEM = Network.uniform(1e12, latency=1e-5), Network.uniform(6.25e6), Network.uniform(7e3)
OPTIONS: list[dict[str, Any]] = [
    {"explorer": explorer, "exchange": path, "value_dtype": value_dtype}
    for explorer, value_dtype in itertools.product(EXPLORERS, VALUE_DTYPES)
    for path in (("allreduce",) if explorer in SHARED_EXPLORERS else ("allgather", "alltoall"))
]
OPTIONS += [{"exchange": "dense", "value_dtype": value_dtype} for value_dtype in VALUE_DTYPES]

networks = st.builds(
    Network.uniform, st.floats(1e5, 1e12), st.floats(1e-6, 1e-2), stream=st.floats(1e-12, 1e-7), scan=st.floats(0, 1e-7)
)
private_or_shared = st.sampled_from(EXPLORERS)
configs = st.builds(
    lambda comm, part, explorer, value_dtype, q, r: SlimConfig(
        comm_fraction=comm, core_fraction=comm * part, explorer=explorer, value_dtype=value_dtype, reselect_every=q,
        resync_every=r,
    ),
    st.floats(0.001, 1.0), st.floats(0.01, 1.0), private_or_shared, st.sampled_from(VALUE_DTYPES), st.integers(1, 50),
    st.integers(0, 50),
)  # fmt: skip
sizes = st.integers(1, 10**10)
ranks = st.integers(2, 4096)


def model(n: int, rank: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.nn.Parameter]]:
    """Three tensors, equal on all ranks, with gradients of each rank's own."""
    generator = torch.Generator().manual_seed(0)
    bounds = [0, n // 3, n // 3 + 1, n]
    named = [(f"{end}", torch.nn.Parameter(torch.randn(end - begin, generator=generator).to(dtype)))
             for begin, end in zip(bounds, bounds[1:])]  # fmt: skip
    generator.manual_seed(1 + rank)
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return named


def train(synchronizer: Synchronizer, named: list[tuple[str, torch.nn.Parameter]], steps: int) -> None:
    """Steps of plain gradient descent."""
    for _ in range(steps):
        synchronizer.before_step(named)
        for _, parameter in named:
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=1e-3)
        synchronizer.after_step()


# Bytes ---------------------------------------------------------------------------------------------------------------


def bytes_counted(config: SlimConfig, n: int, size: int, rounds: int, dtype: torch.dtype = torch.float32) -> float:
    """Sent a round, the mean over ranks, once the first re-selection period and whatever comes with it is over."""
    period = config.reselect_every * config.local_steps

    def run(transport: SimulatedTransport) -> float:
        named = model(n, transport.rank, dtype)
        synchronizer = Synchronizer(config, transport, restore_norm=False)
        train(synchronizer, named, period)
        before = transport.stats.to_dict()["total_bytes_sent"]
        train(synchronizer, named, rounds * config.local_steps)
        return (transport.stats.to_dict()["total_bytes_sent"] - before) / rounds

    return sum(on_all_ranks(size, run)) / size


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_bytes_are_those_counted(options: dict[str, Any]) -> None:
    """At 8 ranks, within 1 %, for every explorer, path and width."""
    config = SlimConfig(reselect_every=3, **options)
    (prediction,) = predict(20_011, 8, config, FAST)
    assert prediction.bytes_sent == pytest.approx(bytes_counted(config, 20_011, 8, 3), rel=0.01)


@pytest.mark.parametrize("path", ["allgather", "alltoall", "dense"])
@pytest.mark.parametrize(("reselect_every", "resync_every"), [(4, 6), (3, 4), (4, 1), (1, 0), (1, 3), (5, 5)])
def test_bytes_with_resyncs_are_those_counted(path: str, reselect_every: int, resync_every: int) -> None:
    """Over a whole number of both periods, which may meet in a round or never."""
    config = SlimConfig(exchange=path, reselect_every=reselect_every, resync_every=resync_every, local_steps=2)
    (prediction,) = predict(9_001, 3, config, FAST)
    rounds = reselect_every * max(resync_every, 1)
    assert prediction.bytes_sent == pytest.approx(bytes_counted(config, 9_001, 3, rounds), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("path", ["allgather", "alltoall", "dense"])
def test_bytes_of_other_parameters_are_those_counted(path: str, dtype: torch.dtype) -> None:
    """Sums travel in float32 or float64, merged values of the spread model in the parameters' own dtype."""
    config = SlimConfig(exchange=path, reselect_every=4, comm_fraction=0.101, core_fraction=0.1)
    (prediction,) = predict(9_001, 4, config, FAST, dtype)
    assert prediction.bytes_sent == pytest.approx(bytes_counted(config, 9_001, 4, 4, dtype), rel=0.01)


def test_ratios_of_the_reference_setting() -> None:
    """allreduce at most 0.31 at any number of ranks; alltoall at most 0.40 up to 8, flat within 3 % from 2 to 4,096."""
    everywhere = [2, 3, 4, 8, 64, 512, 4096]
    allreduce = [predict(25_600_000, k, SlimConfig(explorer="shared", exchange="allreduce"), FAST)[0].ratio
                 for k in everywhere]  # fmt: skip
    alltoall = [predict(25_600_000, k, SlimConfig(exchange="alltoall"), FAST)[0].ratio for k in everywhere]
    allgather = [predict(25_600_000, k, SlimConfig(exchange="allgather"), FAST)[0].ratio for k in everywhere]
    assert max(allreduce) <= 0.31
    assert max(alltoall[:4]) <= 0.40
    for flat in (allreduce, alltoall):
        assert max(flat) <= 1.03 * min(flat)
    assert allgather == sorted(allgather)
    assert allgather[0] < 1 < allgather[4]


def predicted(n: int, size: int, config: SlimConfig, network: Network) -> list[Prediction]:
    """What is predicted for settings that an explorer can follow."""
    outside, explored = n - config.core_count(n), config.explorer_count(n)
    assume(config.explorer in ("greedy", "leader") or outside <= explored * (2**31 - 1))
    return predict(n, size, config, network)


# Time ----------------------------------------------------------------------------------------------------------------


@given(sizes, ranks, configs, networks, st.floats(1.0, 100.0))
def test_a_faster_network_is_faster(n: int, size: int, config: SlimConfig, network: Network, factor: float) -> None:
    """Every path gains from it, none by more than the factor; bytes stay."""
    faster = dataclasses.replace(network, allreduce=network.allreduce.scaled(1 / factor),
                                 allgather=network.allgather.scaled(1 / factor),
                                 alltoall=network.alltoall.scaled(1 / factor),
                                 broadcast=network.broadcast.scaled(1 / factor), hop=network.hop / factor)  # fmt: skip
    before = {prediction.path: prediction for prediction in predicted(n, size, config, network)}
    after = {prediction.path: prediction for prediction in predict(n, size, config, faster)}
    for path, prediction in before.items():
        assert after[path].bytes_sent == prediction.bytes_sent
        assert after[path].seconds <= prediction.seconds * (1 + 1e-12)
        assert prediction.seconds <= after[path].seconds * factor * (1 + 1e-12)
        assert 0 <= prediction.work_seconds <= prediction.seconds


@given(sizes, ranks, configs, networks, st.floats(0, 100), st.integers(1, 10))
def test_overlap_hides_collectives_as_long_as_a_step(
    n: int, size: int, config: SlimConfig, network: Network, compute: float, local_steps: int
) -> None:
    """Never own work, and never more than is computed meanwhile."""
    for prediction in predicted(n, size, config, network):
        waited = prediction.seconds - prediction.work_seconds
        assert 0 <= prediction.hideable_seconds <= waited * (1 + 1e-9) + 1e-12
        step = prediction.step_seconds(compute, local_steps)
        assert step == pytest.approx(compute + prediction.seconds / local_steps)
        saved = (step - prediction.step_seconds(compute, local_steps, overlap=True)) * local_steps
        assert saved == pytest.approx(min(prediction.hideable_seconds, compute), abs=1e-9 * step * local_steps)


def test_what_overlap_cannot_hide() -> None:
    """Collectives that answer others wait for them; choosing a core and a resync are waited for at once."""
    network = Network.uniform(1e6, latency=0.0, hop=0.0, stream=0, touch=0, trip=0, draw=0, scan=0, code=0)
    hidden = {}
    settings: list[dict[str, Any]] = [
        {"explorer": "shared", "exchange": "allreduce"}, {"exchange": "allgather"}, {"exchange": "alltoall"},
        {"exchange": "dense"}, {"exchange": "dense", "value_dtype": "float16"},
    ]  # fmt: skip
    for options in settings:
        (prediction,) = predict(1_000_000, 4, SlimConfig(reselect_every=10**9, **options), network)
        hidden[tuple(options.values())] = prediction.hideable_seconds / prediction.seconds
    for whole in (("shared", "allreduce"), ("allgather",), ("dense",)):
        assert hidden[whole] == pytest.approx(1.0)
    core, pushed, answered = 2 * 0.15 * 4, 0.15 * 5, 0.15 * 4
    assert hidden["alltoall",] == pytest.approx((core + pushed) / (core + pushed + answered), rel=1e-3)
    assert hidden["dense", "float16"] == pytest.approx(0.5, rel=1e-3)
    often = SlimConfig(exchange="allgather", reselect_every=2, resync_every=2)
    (prediction,) = predict(1_000_000, 4, often, network)
    (usual,) = predict(1_000_000, 4, SlimConfig(exchange="allgather", reselect_every=10**9), network)
    assert prediction.hideable_seconds == pytest.approx(usual.seconds / 2, rel=1e-3)


@pytest.mark.parametrize("explorer", EXPLORERS)
def test_strata_too_long_are_refused_as_in_a_run(explorer: str) -> None:
    """With the explorer's own words. Those that choose by pending update have none."""
    n = 10**10
    config = SlimConfig(explorer=explorer, comm_fraction=0.5 + 2e-10, core_fraction=0.5)
    explored = config.explorer_count(n)
    assert explored == 2
    if explorer in ("greedy", "leader"):
        predict(n, 4, config, SLOW)
        return
    with pytest.raises(ValueError, match="does not fit a four-byte offset") as run:
        EXPLORER_CLASSES[explorer](n - config.core_count(n), explored, 0, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="does not fit a four-byte offset") as plan:
        predict(n, 4, config, SLOW)
    assert str(plan.value) == str(run.value)
    predict(n, 4, SlimConfig(explorer=explorer, exchange="dense"), SLOW)


@given(sizes, ranks, configs, networks)
def test_predictions_are_in_order_and_the_choice_is_the_first(
    n: int, size: int, config: SlimConfig, network: Network
) -> None:
    """Fastest first; a slim path that saves less than 5 % of dense's time is not worth it."""
    predictions = predicted(n, size, config, network)
    assert {prediction.path for prediction in predictions} == set(planner.allowed_paths(config, n))
    assert [prediction.seconds for prediction in predictions] == sorted(
        prediction.seconds for prediction in predictions
    )
    dense = next(prediction for prediction in predictions if prediction.path == "dense")
    path, why = choose(predictions)
    assert path == (predictions[0].path if predictions[0].seconds <= 0.95 * dense.seconds else "dense")
    assert f"exchange={path!r}" in why
    assert "\n" not in why
    assert all(prediction.path in why for prediction in predictions)


@pytest.mark.parametrize("explorer", EXPLORERS)
def test_slow_networks_get_slim_and_fast_ones_dense(explorer: str) -> None:
    config = SlimConfig(explorer=explorer, comm_fraction=0.6, core_fraction=0.3)
    for size in (2, 4, 8):
        assert choose(predict(1_000_000, size, config, SLOW))[0] != "dense"
        path, why = choose(predict(1_000_000, size, config, FAST))
        assert path == "dense"
        assert "slim would not be faster here" in why


def test_many_ranks_get_alltoall() -> None:
    """What each rank gathers grows with the ranks; what it exchanges with owners does not."""
    assert choose(predict(25_600_000, 2, SlimConfig(), SLOW))[0] in ("allgather", "alltoall")
    for size in (8, 64):
        assert choose(predict(25_600_000, size, SlimConfig(), SLOW))[0] == "alltoall"


def test_a_named_path_is_the_only_one() -> None:
    for path in ("allgather", "alltoall", "dense"):
        (prediction,) = predict(1000, 4, SlimConfig(exchange=path), SLOW)
        assert prediction.path == path
        assert choose([prediction])[0] == path
    assert [
        prediction.path for prediction in predict(10, 2, SlimConfig(core_fraction=1.0, comm_fraction=1.0), SLOW)
    ] == ["dense"]


def test_what_cannot_be_predicted_is_refused() -> None:
    for n, size in ((0, 2), (1000, 1)):
        with pytest.raises(ValueError, match="needs at least one parameter and two ranks"):
            predict(n, size, SlimConfig(), SLOW)


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=6), st.floats(0, 1e10))
def test_a_link_passes_through_its_points_and_grows(points: list[tuple[float, float]], nbytes: float) -> None:
    growing = tuple(zip(sorted(b for b, _ in points), sorted(s for _, s in points)))
    link = Link(growing)
    for (b, seconds), next_point in zip(growing, (*growing[1:], (float("inf"), 0.0))):
        assert link.seconds(b) <= seconds * (1 + 1e-9) or b == next_point[0]
    assert link.seconds(nbytes) >= growing[0][1]
    assert link.seconds(2 * nbytes) >= link.seconds(nbytes) * (1 - 1e-9)


def test_a_link_of_latency_and_bandwidth() -> None:
    assert Link.of(0.5, 100.0).seconds(0) == 0.5
    assert Link.of(0.5, 100.0).seconds(1000) == pytest.approx(10.5)


# The probe and "auto" ------------------------------------------------------------------------------------------------


def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that share a processor are slow; small messages will do."""
    monkeypatch.setattr(probe, "_MOST", 2**12)


@pytest.mark.parametrize(
    "options", [{}, {"explorer": "leader"}, {"explorer": "shared", "value_dtype": "int8"}], ids=str
)
def test_all_ranks_measure_the_same_network(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit. Nothing of the model is touched, and all bytes are counted as the probe's."""
    quick_probe(monkeypatch)

    def run(transport: SimulatedTransport) -> tuple[Network, dict[str, float]]:
        named = model(3000, transport.rank)
        before = [parameter.detach().clone() for _, parameter in named]
        network = probe.measure(transport, Arena(named), SlimConfig(**options))
        assert all(torch.equal(old, parameter) for old, (_, parameter) in zip(before, named))
        return network, transport.stats.bytes_sent

    (first, bytes_sent), *others = on_all_ranks(3, run)
    assert all(network == first for network, _ in others)
    assert {phase for phase, sent in bytes_sent.items() if sent} == {"probe"}
    for link in (first.allreduce, first.allgather, first.alltoall, first.broadcast):
        assert list(link.points) == sorted(link.points)
        assert all(seconds > 0 for _, seconds in link.points)
    assert isinstance(first.work, Rehearsed)
    assert set(first.work.paths) == set(planner.allowed_paths(SlimConfig(**options), 3000))
    for path, work in first.work.paths.items():
        assert work.usual > 0
        assert (work.everything > 0) == (path in ("alltoall", "dense"))
        assert (work.selection > 0) == (path != "dense")


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_own_work_is_whatever_a_round_does(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that becomes slower is found to be slower, by as much, on every path; at any number of ranks."""
    path, arena, calls = options["exchange"], Arena(model(3001, 0)), 0
    merge = PATHS[path].merge

    def slower(exchange: Exchange, flight: Flight) -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.05)
        merge(exchange, flight)

    monkeypatch.setattr(PATHS[path], "merge", slower)
    for size in (2, 3, 13):
        calls = 0
        work = rehearse(arena, SlimConfig(**options), size, lambda action, alone: action()).paths[path]
        assert calls == (2 if path == "allgather" and size == 13 else 1)  # with four ranks and with eight
        assert work.usual >= 0.05


def run_with(network: Network, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Probes find ``network``; the list grows by each rank that measures."""
    measured: list[int] = []

    def measure(transport: SimulatedTransport, arena: Arena, config: SlimConfig) -> Network:
        measured.append(transport.rank)
        return network

    monkeypatch.setattr(probe, "measure", measure)
    return measured


def test_auto_takes_what_is_predicted_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CASES 42."""
    caplog.set_level(logging.INFO, "hvd_slim")
    for network, expected in ((FAST, "dense"), (MODEM, "alltoall")):
        measured = run_with(network, monkeypatch)
        caplog.clear()

        def run(transport: SimulatedTransport) -> str:
            named = model(3000, transport.rank)
            synchronizer = Synchronizer(SlimConfig(), transport, restore_norm=False)
            train(synchronizer, named, 3)
            train(synchronizer, named[1:], 2)  # a layer is frozen: the run goes on as it was
            return synchronizer.state_dict()["path"]

        assert on_all_ranks(8, run) == [expected] * 8
        assert sorted(measured) == list(range(8))
        lines = [record.getMessage() for record in caplog.records if "exchange=" in record.getMessage()]
        assert len(lines) == 1
        assert lines[0] == choose(predict(3000, 8, SlimConfig(), network))[1]


def test_a_resumed_run_keeps_its_path_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a new measurement would choose another one. With other ranks it is measured anew."""

    def begin(transport: SimulatedTransport) -> dict[str, Any]:
        named = model(3000, transport.rank)
        synchronizer = Synchronizer(SlimConfig(reselect_every=3), transport, restore_norm=False)
        train(synchronizer, named, 5)
        saved = {"model": [parameter.detach().clone() for _, parameter in named], "slim": synchronizer.state_dict()}
        train(synchronizer, named, 4)
        return {**saved, "end": [parameter.detach().clone() for _, parameter in named]}

    def resume(transport: SimulatedTransport) -> tuple[str, list[torch.Tensor]]:
        named, state = model(3000, transport.rank), saved[transport.rank]
        for (_, parameter), value in zip(named, state["model"]):
            parameter.data.copy_(value)
        synchronizer = Synchronizer(SlimConfig(reselect_every=3), transport, restore_norm=False)
        synchronizer.load_state_dict(state["slim"])
        train(synchronizer, named, 4)
        return synchronizer.state_dict()["path"], [parameter.detach().clone() for _, parameter in named]

    run_with(MODEM, monkeypatch)
    saved = on_all_ranks(8, begin)
    measured = run_with(FAST, monkeypatch)
    for (path, values), state in zip(on_all_ranks(8, resume), saved):
        assert path == state["slim"]["path"] == "alltoall"
        assert all(torch.equal(value, end) for value, end in zip(values, state["end"]))
    assert measured == []
    assert [path for path, _ in on_all_ranks(4, resume)] == ["dense"] * 4
    assert sorted(measured) == [0, 1, 2, 3]


def test_predictions_are_plain_values() -> None:
    """For logs and JSON."""
    (prediction,) = predict(1000, 2, SlimConfig(exchange="dense"), SLOW)
    assert isinstance(prediction, Prediction)
    assert isinstance(prediction.extra_memory, int)
    assert all(isinstance(value, (str, int, float)) for value in dataclasses.asdict(prediction).values())
