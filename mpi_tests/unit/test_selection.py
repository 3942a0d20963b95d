"""Choosing the core: exactly as many as asked, the most significant, ties to the lower index."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvd_slim import significance as module
from hvd_slim.config import ceil_fraction
from hvd_slim.significance import significance, top_coordinates

fractions = st.floats(min_value=0.0, max_value=1.0, exclude_min=True)
sizes = st.integers(min_value=1, max_value=300)
# Few different values, so that ties are everywhere: zero, denormals, ordinary, huge, infinite.
extremes = st.sampled_from([0.0, 1e-45, 3e-45, 1e-38, 0.5, 1.0, 1.5, 1e38, 3.4e38, float("inf")])
any_score = st.floats(min_value=0.0, width=32, allow_nan=False)
SAMPLED = 4 * (1 << 16)  # scores longer than this are bracketed by a sample first


def brute_force(score: np.ndarray, count: int) -> np.ndarray:
    """The law: a stable sort by falling score, its first ``count``, in ascending order."""
    return np.sort(np.argsort(-score.astype(np.float64), kind="stable")[:count])


def check(score: np.ndarray, count: int) -> None:
    """``top_coordinates`` obeys the law and leaves the score alone."""
    given_score = torch.from_numpy(score.copy())
    chosen = top_coordinates(given_score, count)
    assert chosen.dtype in (torch.int32, torch.int64)
    assert chosen.shape == (count,)
    np.testing.assert_array_equal(chosen.numpy(), brute_force(score, count))
    np.testing.assert_array_equal(given_score.numpy(), score)


@given(hnp.arrays(np.float32, sizes, elements=any_score), fractions)
def test_any_scores(score: np.ndarray, fraction: float) -> None:
    check(score, ceil_fraction(fraction, score.size))


@given(hnp.arrays(np.float32, sizes, elements=extremes), fractions)
def test_ties_zeros_denormals_and_infinities(score: np.ndarray, fraction: float) -> None:
    check(score, ceil_fraction(fraction, score.size))


@given(hnp.arrays(np.float64, sizes, elements=st.floats(min_value=0.0, allow_nan=False)), st.data())
def test_double_precision_and_any_count(score: np.ndarray, data: st.DataObject) -> None:
    check(score, data.draw(st.integers(min_value=0, max_value=score.size)))


def neighbours(n: int, generator: np.random.Generator) -> np.ndarray:
    """Scores that differ in their last bit only."""
    return np.nextafter(np.float32(1), np.float32(2), dtype=np.float32) * (generator.random(n) < 0.5) + 1


def large_scores(kind: str, n: int) -> np.ndarray:
    """Scores that are easy, or that mislead a sample of every (n // 65536)-th coordinate."""
    generator = np.random.default_rng(n)
    stride = n // (1 << 16)
    index = np.arange(n)
    made = {
        "normal": lambda: np.abs(generator.standard_normal(n)),
        "heavy ties": lambda: generator.integers(0, 3, n),
        "two values": lambda: generator.random(n) < 1e-4,
        "constant": lambda: np.ones(n),
        "zeros": lambda: np.zeros(n),
        "ascending": lambda: index,
        "descending": lambda: n - index,
        "sampled are large": lambda: np.where(index % stride == 0, 10.0, 1.0) * generator.random(n),
        "sampled are small": lambda: np.where(index % stride == 0, 1e-6, 1.0) * generator.random(n),
        "sampled are equal": lambda: np.where(index % stride == 0, 0.5, generator.random(n)),
        "sampled are infinite": lambda: np.where(index % stride == 0, np.inf, generator.random(n)),
        "one peak": lambda: (index == n // 3) * 1e38,
        "spread over the whole range": lambda: 10.0 ** generator.uniform(-45, 38, n),
        "last bit": lambda: neighbours(n, generator),
    }
    return np.asarray(made[kind](), dtype=np.float32)


KINDS = (
    "normal", "heavy ties", "two values", "constant", "zeros", "ascending", "descending", "sampled are large",
    "sampled are small", "sampled are equal", "sampled are infinite", "one peak", "spread over the whole range",
    "last bit",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [SAMPLED, SAMPLED + 1, 3 * SAMPLED + 17])
def test_large_models(kind: str, n: int) -> None:
    score = large_scores(kind, n)
    order = np.argsort(-score.astype(np.float64), kind="stable")
    for count in (1, 2, 5, n // 1000, ceil_fraction(0.15, n), n // 4, n // 2, n - 2, n - 1, n):
        chosen = top_coordinates(torch.from_numpy(score), count).numpy()
        np.testing.assert_array_equal(chosen, np.sort(order[:count]), err_msg=f"count {count}")


def test_the_sample_narrows_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would not have tested it."""
    searched: list[int] = []
    kth_largest = module.kth_largest

    def watched(score: torch.Tensor, k: int) -> float:
        searched.append(score.numel())
        return kth_largest(score, k)

    monkeypatch.setattr(module, "kth_largest", watched)
    n = 1_000_000
    top_coordinates(torch.from_numpy(large_scores("normal", n)), 150_000)
    assert searched
    assert max(searched) < n / 20


def test_no_order_is_slow() -> None:
    """Sorted scores cost about what a sort costs; a pivot at one end of them would take a hundred times as long.

    In processor time of this one thread, of which others take none.
    """
    n = SAMPLED
    for score in (torch.arange(n, 0, -1).float(), torch.arange(n).float(), torch.ones(n)):
        sorting, choosing = [], []
        for count in (1, n // 7, n // 2, n - 1):
            begin = time.thread_time()
            score.sort()
            middle = time.thread_time()
            top_coordinates(score, count)
            sorting.append(middle - begin)
            choosing.append(time.thread_time() - middle)
        assert min(choosing) < 20 * min(sorting) + 0.05
        assert max(choosing) < 20 * max(sorting) + 0.05


# The significance itself ---------------------------------------------------------------------------------------------

# Wide enough to mix magnitudes, not so wide that a product leaves the normal range of float32.
size = st.floats(min_value=2.0**-40, max_value=2.0**40, width=32)
finite = st.one_of(st.just(0.0), size, size.map(lambda value: -value))
weights = st.one_of(st.just(0.0), st.floats(min_value=2.0**-20, max_value=2.0**20))
vectors = st.integers(min_value=1, max_value=30).flatmap(
    lambda n: st.tuples(hnp.arrays(np.float32, n, elements=finite), hnp.arrays(np.float32, n, elements=finite))
)


def rms(values: np.ndarray) -> float:
    """Root mean square in float64; 1 for zeros, which it leaves as they are."""
    return float(np.sqrt(np.mean(np.square(values.astype(np.float64))))) or 1.0


@given(vectors, weights)
def test_normalised_significance(pair: tuple[np.ndarray, np.ndarray], c: float) -> None:
    """S = |w| / RMS(w) + c·|g| / RMS(g)."""
    weight, gradient = pair
    score = significance(torch.from_numpy(weight), torch.from_numpy(gradient), c, True)
    expected = np.abs(weight.astype(np.float64)) / rms(weight) + c * np.abs(gradient.astype(np.float64)) / rms(gradient)
    # Each term: its scale and its quotient or product are rounded to float32, by 2^-24 at most; then the sum is.
    np.testing.assert_allclose(score.numpy(), expected, rtol=4 * 2.0**-24)


@given(vectors, weights)
def test_raw_significance(pair: tuple[np.ndarray, np.ndarray], c: float) -> None:
    """S = |w| + c·|g|."""
    weight, gradient = pair
    score = significance(torch.from_numpy(weight), torch.from_numpy(gradient), c, False)
    expected = np.abs(weight.astype(np.float64)) + c * np.abs(gradient.astype(np.float64))
    np.testing.assert_allclose(score.numpy(), expected, rtol=4 * 2.0**-24)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("c", [0.0, 1.0, 1e6])
def test_arguments_are_left_alone(normalize: bool, c: float) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        weight, gradient = torch.randn(50).to(dtype), torch.randn(50).to(dtype)
        before = weight.clone(), gradient.clone()
        score = significance(weight, gradient, c, normalize)
        assert score.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(weight, before[0])
        assert torch.equal(gradient, before[1])


def test_what_cannot_be_told_counts_as_most_significant() -> None:
    nan, inf = float("nan"), float("inf")
    weight = torch.tensor([1.0, nan, inf, -inf, 0.0, 1.0, 1.0])
    gradient = torch.tensor([1.0, 1.0, 1.0, 1.0, nan, inf, 0.0])
    for normalize in (True, False):
        score = significance(weight, gradient, 1.0, normalize)
        assert not score.isnan().any()
        assert top_coordinates(score, 5).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-38, 1e-20, 1e20, 1e38])
@pytest.mark.parametrize("c", [1e-30, 1.0, 1e30])
def test_a_coordinate_without_weight_and_gradient_is_least_significant(normalize: bool, scale: float, c: float) -> None:
    """At any scale of the numbers: nothing overflows on the way and turns a zero into the top."""
    for weight_scale, gradient_scale in ((1.0, scale), (scale, 1.0), (scale, scale)):
        weight = torch.tensor([weight_scale, 0.0, weight_scale, weight_scale])
        gradient = torch.tensor([gradient_scale, 0.0, gradient_scale, gradient_scale])
        score = significance(weight, gradient, c, normalize)
        assert not score.isnan().any()
        assert top_coordinates(score, 3).tolist() == [0, 2, 3]


def test_empty_model() -> None:
    empty = torch.empty(0)
    assert significance(empty, empty, 1.0, True).shape == (0,)
    assert top_coordinates(empty, 0).shape == (0,)
