"""The compiled passes and torch's operators give the same bits, and each is used where it is said to be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim import chunks, native, sets, significance
from hvd_slim.arena import Arena
from hvd_slim.explorer import EXPLORERS, RandomExplorer
from hvd_slim.global_model import GlobalModel
from hvd_slim.sweep import sweep

built = pytest.mark.skipif(not native.available(), reason="the library was not built, or is switched off")
CPU = torch.device("cpu")
seeds = st.integers(0, 2**32 - 1)
#: around the ends of blocks, and where a sample decides
lengths = st.one_of(st.integers(0, 200), st.sampled_from([8191, 8192, 8193, 20_000, 300_000]))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The library works in one thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both_ways(action: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``action`` returns with the library, and without."""
    assert native.serves()
    compiled = action()
    library, native._library = native._library, None
    try:
        return compiled, action()
    finally:
        native._library = library


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """A NaN is a NaN, and -0 is not 0."""
    assert one.dtype == two.dtype
    return np.array_equal(one.contiguous().numpy().view(np.uint8), two.contiguous().numpy().view(np.uint8))


def numbers(generator: np.random.Generator, count: int, odd: bool = False) -> torch.Tensor:
    """Random float32 of widely different size; with ``odd`` some that are not finite, and both zeros."""
    values = generator.normal(size=count) * 10.0 ** generator.integers(-6, 6, size=count)
    if odd and count:
        few = generator.integers(0, count, size=1 + count // 10)
        values[few] = generator.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], size=few.size)
    return torch.from_numpy(values.astype(np.float32))


def subset(generator: np.random.Generator, n: int, share: float) -> torch.Tensor:
    """About so many of n coordinates, ascending."""
    return torch.from_numpy(np.flatnonzero(generator.random(n) < share).astype(np.int32))


@built
@given(seeds, lengths, st.sampled_from([0.0, 0.01, 0.15, 0.7, 1.0]), st.booleans(), st.booleans(), st.booleans())
def test_sweep(seed: int, n: int, share: float, since: bool, rounded: bool, left: bool) -> None:
    """A round as the allgather path takes it, on parameters of many sizes, empty ones among them."""

    def round_of_three() -> tuple[torch.Tensor, ...]:
        generator = np.random.default_rng(seed)
        model, live = _model(generator, n)
        core, mine, other = (model.arena.locate(subset(generator, n, share)) for _ in range(3))
        values = [numbers(generator, where.count) for where in (core, mine, other)]
        at_launch = numbers(generator, mine.count) if since else None
        unsent = numbers(generator, mine.count) if since and rounded else None
        kept = numbers(generator, core.count) if left else None
        with sweep(model) as steps:
            pending = steps.pending_update(mine, torch.empty(mine.count), at_launch, unsent)
            steps.merge(core, values[0], kept)
            steps.absorb(mine, values[1])
            steps.advance(other, values[2])
            steps.settle(mine, pending if left else None)
        with sweep(model) as steps:
            steps.replace(other, values[2])
            steps.settle(other, None)
        assert n == 0 or all(torch.equal(w.flatten()[at], m) for w, m, at in _landed(model, live, other.numbers))
        return (pending, *model.flat, *(parameter.data for parameter in live))

    compiled, by_torch = both_ways(round_of_three)
    assert all(same_bits(one, two) for one, two in zip(compiled, by_torch))


@built
@given(seeds, lengths, st.integers(1, 9), st.booleans())
def test_taking_over_everything(seed: int, n: int, divisor: int, odd: bool) -> None:
    """A dense round's merge."""

    def merged() -> tuple[torch.Tensor, ...]:
        generator = np.random.default_rng(seed)
        model, live = _model(generator, n)
        model.take_over_everywhere(numbers(generator, n, odd), divisor)
        return (*model.flat, *(parameter.data for parameter in live))

    compiled, by_torch = both_ways(merged)
    assert all(same_bits(one, two) for one, two in zip(compiled, by_torch))


def _landed(model: GlobalModel, live: list[Any], numbers: torch.Tensor) -> list[tuple[Any, Any, Any]]:
    """(parameter, w̄ there, where in it) for the coordinates of a set that were settled with nothing left."""
    found = []
    for segment, parameter in zip(model.arena.segments(), live):
        at = numbers[(numbers >= segment.start) & (numbers < segment.stop)].long()
        found.append((parameter.data, model.flat[0][at], at - segment.start))
    return found


@built
@given(seeds, lengths, st.floats(0, 1), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.3, 3.0]))
def test_choosing(seed: int, n: int, share: float, odd: bool, rounded: bool, gradient_weight: float) -> None:
    """The most significant coordinates, and the largest updates among some; ties and what is not finite as well."""
    generator = np.random.default_rng(seed)
    model, live = _model(generator, n, odd)
    for parameter in live:
        if rounded:
            parameter.data.round_()  # ties
        if generator.random() < 0.7:
            parameter.grad = numbers(generator, parameter.numel(), odd)
    outside, sent = subset(generator, n, 0.3), subset(generator, n, 0.1)
    sent = sent[~torch.isin(sent, outside)]
    count = int(share * n)

    def choose() -> tuple[torch.Tensor, ...]:
        arena, possible = model.arena, min(count, n - outside.numel())
        return (
            significance.most_significant(arena, gradient_weight, not odd, count),
            significance.largest_updates(model, possible, outside),
            significance.largest_updates(model, possible, outside, sent),
        )

    compiled, by_torch = both_ways(choose)
    assert all(same_bits(one, two) for one, two in zip(compiled, by_torch))


def _model(generator: np.random.Generator, n: int, odd: bool = False) -> tuple[GlobalModel, list[Any]]:
    """n coordinates in a few parameters of any size, empty ones among them, that have moved away from w̄."""
    cuts = torch.from_numpy(np.sort(generator.integers(0, n + 1, size=5)))
    live = [torch.nn.Parameter(part.clone()) for part in numbers(generator, n).tensor_split(cuts)]
    model = GlobalModel(Arena([(f"{i}", parameter) for i, parameter in enumerate(live)]))
    for parameter in live:
        parameter.data.add_(numbers(generator, parameter.numel(), odd))
    return model, live


@built
@given(seeds, lengths, st.booleans())
def test_scores(seed: int, n: int, odd: bool) -> None:
    """As ``significance`` gives them, to the bit."""
    generator = np.random.default_rng(seed)
    weight, gradient = numbers(generator, n, odd), numbers(generator, n, odd)
    expected = significance.significance(weight, gradient, 0.3, normalize=False)
    table = Arena([("w", weight)]).memory_table()
    scores = native.Scores(table, n, gradients=[gradient], factor=0.3)
    every = scores.reaching(float("-inf"), n, n)
    assert every is not None
    assert every[0].tolist() == list(range(n))
    assert same_bits(every[1], expected)
    assert same_bits(scores.sample(7), expected[::7])


@built
@pytest.mark.parametrize("learned", [0, 5, 4000])
def test_few_coordinates_have_learned_anything(learned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a table of which a step touches few rows: found in one pass all the same, ties being the lower ones."""
    n, count = 300_000, 1000
    live = torch.nn.Parameter(torch.zeros(n))
    model = GlobalModel(Arena([("w", live)]))
    generator = np.random.default_rng(learned)
    touched = generator.permutation(n)[:learned]
    live.data[touched] = torch.from_numpy(generator.normal(size=learned).astype(np.float32))
    passes = []
    reaching = native.Scores.reaching

    def counted(*arguments: Any) -> Any:
        passes.append(arguments)
        return reaching(*arguments)

    monkeypatch.setattr(native.Scores, "reaching", counted)
    nothing = torch.empty(0, dtype=torch.int32)
    compiled, by_torch = both_ways(lambda: significance.largest_updates(model, count, nothing))
    assert same_bits(compiled, by_torch)
    assert len(passes) == 1


@built
@given(seeds, lengths, st.booleans())
def test_finiteness(seed: int, n: int, odd: bool) -> None:
    """A NaN or an infinity anywhere."""
    parameter = torch.nn.Parameter(numbers(np.random.default_rng(seed), n, odd))
    arena = Arena([("w", parameter)])
    assert both_ways(arena.is_finite) == (bool(parameter.isfinite().all()),) * 2


@built
@given(seeds, st.integers(1, 5000), st.floats(0, 1), st.sampled_from(["random", "shared"]))
def test_draws(seed: int, population: int, share: float, name: str) -> None:
    """What is drawn, and what receivers make of the second half of it."""
    explorer = EXPLORERS[name](population, int(share * population), seed % 1000, 3, CPU)

    def draws() -> list[torch.Tensor]:
        found = []
        for round_number in range(4):
            draw = explorer.draw(round_number, 1)
            assert draw.indices is not None
            half = explorer.count // 2
            packed = RandomExplorer.pack(explorer, draw, half, explorer.count)  # type: ignore[arg-type]
            first = (draw.first + half) % max(explorer.count, 1)
            told = explorer.positions(packed, first, explorer.count - half, round_number, 0 if name == "shared" else 1)
            assert name == "shared" or torch.equal(told, draw.positions[half:])
            found += [draw.positions, draw.indices, torch.tensor([draw.first]), told]
        return found

    compiled, by_torch = both_ways(draws)
    assert all(same_bits(one, two) for one, two in zip(compiled, by_torch))


@built
@given(seeds, st.integers(1, 70_000), st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
def test_sets(seed: int, n: int, share: float) -> None:
    """Packed, unpacked, what is not in them, and a part of them."""
    members = subset(np.random.default_rng(seed), n, share)

    def there_and_back() -> tuple[torch.Tensor, ...]:
        packed, rest = sets.pack_indices(members, n), chunks.others(members, n)
        taken = chunks.take(members, torch.arange(0, members.numel(), 3, dtype=torch.int32))
        return packed, sets.unpack_indices(packed, members.numel(), n), rest, taken

    compiled, by_torch = both_ways(there_and_back)
    assert all(same_bits(one, two) for one, two in zip(compiled, by_torch))
    assert torch.equal(compiled[1], members)


def test_what_it_does_not_serve() -> None:
    """Other dtypes, gaps, and ranks with several threads are torch's."""
    floats = torch.zeros(8)
    assert native.serves(floats) == native.available()
    assert not native.serves(floats, floats.double())
    assert not native.serves(floats[::2])
    for parameter in (floats.double(), floats.bfloat16(), torch.zeros(4, 4)[:, :2]):
        assert not Arena([("w", torch.nn.Parameter(parameter))]).plain
    assert not Arena([("a", floats), ("b", floats.bfloat16())]).plain
    torch.set_num_threads(2)
    assert not native.serves(floats)


@pytest.mark.parametrize("setting", ["0", "1"])
def test_switched_off(setting: str) -> None:
    """By the environment, before the first import."""
    code = "from hvd_slim import native; print(native.available())"
    environment = {**os.environ, "HVD_SLIM_NATIVE": setting}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    built_here = any(Path(native.__file__).parent.glob("_native*.so"))
    assert said.strip() == str(setting == "1" and built_here)
