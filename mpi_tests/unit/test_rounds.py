"""Whole rounds on K simulated ranks: every explorer on every path it can take, over random models and options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_slim.config import SlimConfig
from hvd_slim.synchronizer import Synchronizer
from unit.layouts import LAYOUTS, elements, make
from unit.simulated import SimulatedTransport, on_all_ranks

PATHS = [
    *((explorer, path) for explorer in ("random", "cyclic", "greedy") for path in ("allgather", "alltoall")),
    ("shared", "allreduce"),
    ("leader", "allreduce"),
    ("random", "dense"),
]
fractions = st.floats(min_value=0.01, max_value=1.0)
models = st.lists(st.sampled_from(sorted(LAYOUTS)), min_size=1, max_size=6)


@st.composite
def configs(draw: st.DrawFn) -> SlimConfig:
    """Any legal combination that a round depends on."""
    one, other = draw(fractions), draw(fractions)
    explorer, exchange = draw(st.sampled_from(PATHS))
    return SlimConfig(
        comm_fraction=max(one, other),
        core_fraction=min(one, other),
        reselect_every=draw(st.integers(1, 6)),
        resync_every=draw(st.sampled_from([0, 0, 2, 5])),
        local_steps=draw(st.integers(1, 3)),
        overlap=draw(st.booleans()),
        explorer=explorer,
        exchange=exchange,
        value_dtype=draw(st.sampled_from(["float32", "float32", "float16", "bfloat16", "int8", "int4"])),
        warmup_rounds=draw(st.sampled_from([0, 0, 3])),
        warmup=draw(st.sampled_from(["dense", "linear"])),
        max_message_bytes=draw(st.sampled_from([64, 1000, 2**31 - 1])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


class Run:
    """What one rank went through: parameters of the given layouts, changed at random each step, and exchanged."""

    def __init__(
        self, transport: SimulatedTransport, layouts: list[str], config: SlimConfig, steps: int, dtype: torch.dtype
    ) -> None:
        initial = [copy.deepcopy(INITIAL[layout, dtype]) for layout in layouts]
        self.model = [(f"tensor{number}", parameter) for number, parameter in enumerate(initial)]
        generator = torch.Generator().manual_seed(transport.rank)
        self.learned = [torch.zeros_like(parameter.detach()) for _, parameter in self.model]
        self.synchronizer = synchronizer = Synchronizer(config, transport, restore_norm=False)
        for _ in range(steps):
            synchronizer.before_step(self.model)
            for (_, parameter), learned in zip(self.model, self.learned):
                change = torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.01
                parameter.data.add_(change)
                learned.add_(change)
            synchronizer.after_step()
        with synchronizer.global_parameters():
            self.global_model = [elements(parameter) for _, parameter in self.model]
        synchronizer.resync()
        self.live = [elements(parameter) for _, parameter in self.model]


INITIAL = {(layout, dtype): make(layout, dtype) for layout in LAYOUTS for dtype in (torch.float32, torch.float64)}


def runs(
    size: int, layouts: list[str], config: SlimConfig, steps: int = 14, dtype: torch.dtype = torch.float64
) -> list[Run]:
    """One run on each of ``size`` ranks."""
    return on_all_ranks(size, lambda transport: Run(transport, layouts, config, steps, dtype), config.max_message_bytes)


@settings(max_examples=120)
@given(st.integers(2, 5), models, configs())
def test_nothing_is_lost_or_counted_twice(size: int, layouts: list[str], config: SlimConfig) -> None:
    """After a resync, all replicas are the start plus the mean over ranks of everything that they have learned."""
    results = runs(size, layouts, config)
    for number, layout in enumerate(layouts):
        learned = torch.stack([elements(run.learned[number]) for run in results])
        expected = elements(INITIAL[layout, torch.float64]) + learned.mean(0)
        for run in results:
            # Sums of some twenty numbers of size 1 in float64: errors stay far below 1e-12.
            torch.testing.assert_close(run.live[number], expected, rtol=0.0, atol=1e-12)
            assert torch.equal(run.live[number], results[0].live[number])


@settings(max_examples=60)
@given(st.integers(2, 5), models, configs())
def test_the_global_model_is_the_same_on_all_ranks(size: int, layouts: list[str], config: SlimConfig) -> None:
    """To the bit, in float32, between resyncs too; and ranks agree on what was counted."""
    results = runs(size, layouts, config, dtype=torch.float32)
    for run in results[1:]:
        for mine, first in zip(run.global_model, results[0].global_model):
            assert torch.equal(mine, first)
        assert run.synchronizer.stats.collectives == results[0].synchronizer.stats.collectives


@pytest.mark.parametrize(("explorer", "exchange"), PATHS)
def test_messages_in_pieces_change_nothing(explorer: str, exchange: str) -> None:
    """CASES 27."""
    layouts = sorted(LAYOUTS)
    made: dict[str, Any] = {"explorer": explorer, "exchange": exchange, "reselect_every": 3, "resync_every": 5}
    whole = runs(3, layouts, SlimConfig(**made), dtype=torch.float32)
    pieces = runs(3, layouts, SlimConfig(**made, max_message_bytes=128), dtype=torch.float32)
    for one, other in zip(whole, pieces):
        assert all(torch.equal(a, b) for a, b in zip(one.live, other.live))
        assert one.synchronizer.stats.bytes_sent == other.synchronizer.stats.bytes_sent


@pytest.mark.parametrize(("explorer", "exchange"), PATHS)
def test_collectives_do_not_grow_with_the_number_of_tensors(explorer: str, exchange: str) -> None:
    """CASES 43. A model of 4 and one of 400 tensors."""
    config = SlimConfig(explorer=explorer, exchange=exchange, reselect_every=3)
    few, many = (runs(2, ["vector"] * tensors, config, steps=7, dtype=torch.float32)[0] for tensors in (4, 400))
    assert few.synchronizer.stats.collectives == many.synchronizer.stats.collectives
