"""Explorers: the exact number of distinct positions, a function of (seed, round, rank), understood by receivers."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim.arena import Arena
from hvd_slim.explorer import EXPLORERS, CyclicExplorer, Draw, Explorer, GreedyExplorer, RandomExplorer, SharedExplorer
from hvd_slim.global_model import GlobalModel
from hvd_slim.rng import raw_words
from hvd_slim.significance import largest_updates, top_coordinates

CPU = torch.device("cpu")
every_explorer = pytest.mark.parametrize("name", sorted(EXPLORERS))
rounds = st.integers(min_value=0, max_value=2**40)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    """Population m and count: any, with a liking for one stratum, strata of one, and strata around 256."""
    population = draw(st.integers(0, 1200))
    count = st.integers(0, population)
    edges = [c for c in (1, population - 1, population, population // 256, population // 257) if 0 <= c <= population]
    return population, draw(st.one_of(count, st.sampled_from(edges))) if edges else draw(count)


def made(name: str, population: int, count: int, seed: int = 0, size: int = 3) -> Explorer:
    return EXPLORERS[name](population, count, seed, size, CPU)


def drawn(explorer: Explorer, round_number: int, rank: int) -> Draw:
    """A draw, with random magnitudes if the explorer asks for them."""
    generator = torch.Generator().manual_seed(1000 * rank + round_number % 1000)
    magnitude = torch.rand(explorer.population, generator=generator) if explorer.by_pending_update else None
    largest = None if magnitude is None else partial(top_coordinates, magnitude)
    return explorer.draw(round_number, rank, largest)


@every_explorer
@given(shape=sizes(), seed=st.integers(0, 2**64 - 1), number=rounds, rank=st.integers(0, 2))
def test_exact_count_distinct_ascending_in_range(
    name: str, shape: tuple[int, int], seed: int, number: int, rank: int
) -> None:
    population, count = shape
    explorer = made(name, population, count, seed)
    draw = drawn(explorer, number, rank)
    positions = draw.positions.long()
    assert positions.shape == (count,)
    assert (positions.diff() > 0).all()
    if count:
        assert int(positions[0]) >= 0
        assert int(positions[-1]) < population
    packed = explorer.pack(draw, 0, count)
    assert (packed.shape, packed.dtype) == ((explorer.index_nbytes(count),), torch.uint8)
    if name in ("shared", "cyclic"):
        assert packed.numel() == 0


@pytest.mark.parametrize("name", ["random", "cyclic", "greedy"])
@given(shape=sizes(), number=rounds, rank=st.integers(0, 2), data=st.data())
def test_receivers_recover_the_positions(
    name: str, shape: tuple[int, int], number: int, rank: int, data: st.DataObject
) -> None:
    """From the indices alone, of the whole set or of any run of it, by an explorer object of their own."""
    population, count = shape
    sender = made(name, population, count)
    draw = drawn(sender, number, rank)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    first = (draw.first + begin) % count if count and begin < count else draw.first
    for a, b, stratum in ((0, count, draw.first), (begin, end, first)):
        received = made(name, population, count).positions(sender.pack(draw, a, b), stratum, b - a, number, rank)
        assert torch.equal(received.long(), draw.positions[a:b].long())


@given(shape=sizes(), number=rounds, rank=st.integers(0, 2))
def test_one_position_in_every_stratum(shape: tuple[int, int], number: int, rank: int) -> None:
    """Around the circle of m positions, two neighbouring draws lie less than two strata apart."""
    population, count = shape
    positions = drawn(made("random", population, count), number, rank).positions.long()
    if count:
        longest = -(-population // count)
        gaps = torch.cat([positions.diff(), positions[:1] + population - positions[-1:]])
        assert int(gaps.max()) <= 2 * longest - 1 or count == 1
        assert int(gaps.sum()) == population


@every_explorer
def test_a_function_of_seed_round_and_rank(name: str) -> None:
    """The same three give the same set; each of them matters (to an explorer that draws); no global state does."""
    results: dict[tuple[int, int, int], list[int]] = {}
    state = torch.get_rng_state()
    for seed, number, rank in itertools.product((0, 1, 2**64 - 1), (0, 1, 7), (0, 1, 2)):
        sets = [drawn(made(name, 997, 101, seed), number, rank).positions.tolist() for _ in range(2)]
        assert sets[0] == sets[1]
        results[seed, number, rank] = sets[0]
    assert torch.equal(torch.get_rng_state(), state)
    if name == "random":
        assert len({tuple(positions) for positions in results.values()}) == len(results)
    if name == "shared":
        assert all(results[s, n, r] == results[s, n, 0] for s, n, r in results)
        assert len({tuple(results[s, n, 0]) for s, n, _ in results}) == 9
    if name == "cyclic":
        assert all(len({tuple(results[s, n, r]) for r in (0, 1, 2)}) == 3 for s, n, _ in results)


@pytest.mark.parametrize(
    ("population", "count", "width"),
    [(256, 1, 1), (257, 1, 4), (25_600, 100, 1), (25_601, 100, 4), (10, 10, 1), (0, 0, 1), (5, 0, 1), (10**6, 3, 4)],
)
def test_one_byte_while_strata_have_at_most_256_members(population: int, count: int, width: int) -> None:
    explorer = made("random", population, count)
    assert explorer.index_nbytes(count) == count * width
    reached: set[int] = set()
    for number in range(2000 if population == 256 else 20):
        draw = explorer.draw(number, 0)
        assert draw.indices is not None
        reached.update(draw.indices.tolist())
    if population == 256:
        assert reached == set(range(256))  # 256 members with 2000 draws: missed with probability below 256·e^−7.8


def test_huge_populations() -> None:
    """Positions and offsets beyond four bytes, with nothing of size m made."""
    population, count = 2**33 + 5, 7
    positions = made("random", population, count).draw(3, 1).positions
    assert positions.dtype == torch.int64
    assert (positions.diff() > 0).all()
    assert int(positions[0]) >= 0
    assert int(positions[-1]) < population
    for m in (2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**31 + 1):
        assert int(made("random", m, 5).draw(0, 0).positions.long().diff().min()) > 0
    with pytest.raises(ValueError, match="four-byte offset; raise comm_fraction or lower core_fraction"):
        made("random", population, 2)


@pytest.mark.parametrize(("population", "count"), [(3, 4), (3, -1), (0, 1)])
@every_explorer
def test_more_than_there_are(name: str, population: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"cannot draw {count} distinct coordinates out of {population}"):
        made(name, population, count)


# Explorers that do not draw ------------------------------------------------------------------------------------------


@given(shape=sizes(), size=st.integers(1, 6), start=st.integers(0, 2**30), data=st.data())
def test_cyclic_visits_every_position_in_bounded_time(
    shape: tuple[int, int], size: int, start: int, data: st.DataObject
) -> None:
    """Each rank, by itself, within ⌈m/count⌉ rounds from any start."""
    population, count = shape
    if not count or population // count > 40:
        return
    explorer = CyclicExplorer(population, count, 5, size, CPU)
    rank = data.draw(st.integers(0, size - 1))
    seen = {p for t in range(-(-population // count)) for p in explorer.draw(start + t, rank).positions.tolist()}
    assert seen == set(range(population))


@given(shape=sizes(), data=st.data())
def test_greedy_takes_the_largest(shape: tuple[int, int], data: st.DataObject) -> None:
    """Ties to the lower position."""
    population, count = shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    magnitude = torch.randint(0, data.draw(st.sampled_from([1, 2, 5, 10**6])), (population,), generator=generator)
    order = sorted(range(population), key=lambda i: (-int(magnitude[i]), i))
    draw = GreedyExplorer(population, count, 0, 2, CPU).draw(0, 0, partial(top_coordinates, magnitude.float()))
    assert draw.positions.tolist() == sorted(order[:count])


@pytest.mark.parametrize("name", ["greedy", "leader"])
def test_exact_count_when_the_pending_update_is_not_finite(name: str) -> None:
    """A NaN on one rank must not change the length of its message: the others would wait for bytes that never come."""
    parameter = torch.nn.Parameter(torch.zeros(7))
    model = GlobalModel(Arena([("w", parameter)]))
    parameter.data.copy_(torch.tensor([1.0, float("nan"), 0.5, 9.0, float("inf"), float("nan"), 2.0]))
    core = torch.tensor([3], dtype=torch.int32)
    positions = made(name, 6, 4).draw(0, 0, lambda count: largest_updates(model, count, core)).positions
    assert positions.shape == (4,)
    assert {1, 3, 4} <= set(positions.tolist())


# Every position is equally likely ------------------------------------------------------------------------------------
#
# Draws of different rounds, ranks and seeds are independent; the positions of one draw are not, since there is exactly
# one in each stratum. So Pearson's statistic over all positions of all draws has no chi-square distribution. Two that
# are right under dependence:
#
# * of each draw, one position is taken, chosen by a generator of the test's own. If every position has probability
#   count/m, this one is uniform on the m positions, and those of different draws are independent: Pearson's statistic
#   of them has a chi-square distribution with m − 1 degrees of freedom (expected counts here are 20 and more);
# * how often each single position is in a draw is a binomial number, whatever the others do. Chernoff's bound holds for
#   each, and the union bound for all m together.
#
# False alarms: a draw that is truly uniform fails with probability 1e-6 at the first, at most 1e-6 at the second.

FALSE_ALARM = 1e-6
DRAWS = 6_000


def count_draws(explorer: Explorer) -> tuple[torch.Tensor, torch.Tensor]:
    """Per position: in how many of ``DRAWS`` draws it is, and how often it was the one taken from its draw."""
    inside = torch.zeros(explorer.population, dtype=torch.int64)
    taken = torch.zeros(explorer.population, dtype=torch.int64)
    pick = torch.randint(0, explorer.count, (DRAWS,), generator=torch.Generator().manual_seed(1))
    for number in range(DRAWS):
        positions = explorer.draw(number // 4, number % 4).positions.long()
        inside[positions] += 1
        taken[positions[pick[number]]] += 1
    return inside, taken


def chi_square_probability(taken: torch.Tensor) -> float:
    """Probability of a statistic as large as this, or larger, if all positions are equally likely."""
    expected = DRAWS / taken.numel()
    statistic = float(((taken - expected).double() ** 2).sum() / expected)
    half = torch.tensor([(taken.numel() - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chernoff_probability(inside: torch.Tensor, count: int) -> float:
    """Upper bound of the probability that any of the m counts lies so far from its mean, if each has count/m."""
    p = torch.tensor(count / inside.numel(), dtype=torch.float64)
    q = inside.double() / DRAWS
    divergence = torch.special.xlogy(q, q / p) + torch.special.xlogy(1 - q, (1 - q) / (1 - p))
    return float(2 * inside.numel() * torch.exp(-DRAWS * divergence.max()))


SHAPES = [(7, 3), (50, 7), (97, 31), (100, 99), (256, 1), (300, 1), (290, 29)]


def check_uniform(explorer: Explorer) -> None:
    inside, taken = count_draws(explorer)
    assert int(inside.sum()) == DRAWS * explorer.count
    assert chi_square_probability(taken) > FALSE_ALARM
    assert chernoff_probability(inside, explorer.count) > FALSE_ALARM


@pytest.mark.parametrize(("population", "count"), SHAPES)
def test_every_position_is_equally_likely(population: int, count: int) -> None:
    check_uniform(RandomExplorer(population, count, 20, 4, CPU))


def test_every_position_is_equally_likely_to_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = SharedExplorer(97, 31, 20, 4, CPU)
    draw = explorer.draw  # one draw a round for all ranks: let every draw be a round
    monkeypatch.setattr(explorer, "draw", lambda number, rank: draw(4 * number + rank, 0))
    check_uniform(explorer)


def test_the_statistics_notice_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rotation, members of shorter strata are drawn more often: 1/2 against 1/3 for m = 7, count = 3."""
    explorer = RandomExplorer(7, 3, 20, 4, CPU)
    monkeypatch.setattr(explorer, "_shift_of", lambda word: 0)
    inside, taken = count_draws(explorer)
    assert chi_square_probability(taken) < FALSE_ALARM
    assert chernoff_probability(inside, 3) < FALSE_ALARM


def test_words_depend_on_every_part_of_the_key() -> None:
    """(seed, stream, round, rank): changing one changes the words; the first words do not depend on how many."""
    keys = [(0, 1, 0, 0), (1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (2**64 - 1, 1, 2**50, 1000)]
    words = [raw_words(*key, 8).tolist() for key in keys]
    assert len({tuple(w) for w in words}) == len(keys)
    assert all(raw_words(*key, 3).tolist() == w[:3] for key, w in zip(keys, words))
    # Recorded: a run resumed with a later NumPy must draw as it did.
    assert raw_words(1, 2, 3, 4, 2).tolist() == [8777870883260841927, 3889646134029102319]
