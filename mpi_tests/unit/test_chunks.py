"""Vectors in pieces: the same answers as in one, at every length around the edges of a piece."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim import chunks as module
from hvd_slim.chunks import at_least, between, chunks, count_true, equal_to, index_dtype, indices_of

CPU = torch.device("cpu")
# Few different values, infinities and a denormal among them, so that thresholds are often met exactly.
values = st.sampled_from([0.0, 1e-45, 0.1, 1.0, 2.0**24 + 2, 3e38, float("inf")])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few elements make many pieces."""
    monkeypatch.setattr(module, "_CHUNK", 7)


@pytest.mark.parametrize("n", [0, 1, 6, 7, 8, 13, 14, 15, 70])
def test_pieces_cover_everything_in_order(n: int) -> None:
    pieces = list(chunks(n, CPU))
    assert [i for piece in pieces for i in range(n)[piece]] == list(range(n))
    assert all(0 < piece.stop - piece.start <= 7 for piece in pieces)
    assert [(piece.start, piece.stop) for piece in chunks(n, torch.device("cuda"))] == ([(0, n)] if n else [])


@given(st.lists(st.booleans(), max_size=40))
def test_marks_to_indices(marks: list[bool]) -> None:
    mask = torch.tensor(marks, dtype=torch.bool)
    found = indices_of(mask)
    assert found.tolist() == [i for i, mark in enumerate(marks) if mark]
    assert found.dtype == index_dtype(len(marks)) == torch.int32
    assert count_true(mask) == sum(marks)


@given(st.lists(values, min_size=1, max_size=40), values, values, st.sampled_from([torch.float32, torch.float64]))
def test_comparisons(listed: list[float], one: float, other: float, dtype: torch.dtype) -> None:
    """With thresholds that are values of the same dtype, as those of a selection are."""
    vector = torch.tensor(listed, dtype=dtype)
    low, high = sorted(torch.tensor([one, other], dtype=dtype).tolist())
    exact = vector.tolist()
    assert at_least(vector, low).tolist() == [value >= low for value in exact]
    assert equal_to(vector, low).tolist() == [value == low for value in exact]
    inside, above = between(vector, low, high)
    assert inside.tolist() == [value for value in exact if low <= value <= high]
    assert above == sum(value > high for value in exact)


@pytest.mark.parametrize(
    ("n", "dtype"), [(1, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int32), (2**31 + 1, torch.int64)]
)
def test_index_dtype_holds_the_last_coordinate(n: int, dtype: torch.dtype) -> None:
    assert index_dtype(n) == dtype
    assert torch.tensor([n - 1]).to(dtype).item() == n - 1
