"""Sets of coordinates as bytes: round trips in every form, and the size that both sides reckon."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim import sets
from hvd_slim.chunks import index_dtype
from hvd_slim.sets import pack_indices, set_nbytes, unpack_indices


@st.composite
def some_sets(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    """A size and an ascending set of coordinates below it: from empty to all, from dense to one in 100,000."""
    n = draw(st.one_of(st.integers(1, 600), st.integers(1, 2**18)))
    density = draw(st.sampled_from([0.0, 1e-5, 1e-4, 0.001, 0.01, 1 / 32, 0.1, 0.5, 1.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return n, torch.from_numpy(np.flatnonzero(generator.random(n) < density)).to(index_dtype(n))


@given(some_sets())
def test_round_trip(made: tuple[int, torch.Tensor]) -> None:
    n, members = made
    count = members.numel()
    packed = pack_indices(members, n)
    assert (packed.dtype, packed.shape) == (torch.uint8, (set_nbytes(count, n),))
    unpacked = unpack_indices(packed, count, n)
    assert torch.equal(unpacked, members)
    assert unpacked.dtype == members.dtype


@pytest.mark.parametrize("n", [2**31 - 5, 2**31, 2**31 + 7, 2**40])
@pytest.mark.parametrize("count", [0, 1, 4, 1000])
def test_round_trip_of_few_among_billions(n: int, count: int) -> None:
    """Also both ends of the index space, in four bytes and in eight; nothing of length n is made."""
    inner = np.unique(np.random.default_rng(0).integers(1, n - 1, max(count - 2, 0)))
    ends = [0, n - 1][: min(count, 2)]
    members = torch.from_numpy(np.sort(np.concatenate([inner, np.array(ends, dtype=np.int64)]))).to(index_dtype(n))
    packed = pack_indices(members, n)
    assert packed.shape == (set_nbytes(members.numel(), n),)
    assert torch.equal(unpack_indices(packed, members.numel(), n), members)


@given(st.integers(1, 2**40), st.data())
def test_bytes(n: int, data: st.DataObject) -> None:
    """Never more than a bitmap or a list; within a byte of two and eight bits a member where that is the least."""
    count = data.draw(st.integers(0, n))
    nbytes = set_nbytes(count, n)
    assert nbytes <= min((n + 7) // 8, count * (4 if n <= 2**31 else 8))
    for low in (8, 16):
        assert nbytes <= math.ceil((count * (low + 1) + n / 2**low) / 8) + 1


@pytest.mark.parametrize(
    ("count", "n", "bits"), [(150_000, 850_000, 5.67), (10_000, 990_000, 9.4), (100, 990_000, 17.3)]
)
def test_bits_a_member(count: int, n: int, bits: float) -> None:
    """The reference setting's explorers, those of comm_fraction 0.02, and a very sparse set."""
    assert set_nbytes(count, n) * 8 / count == pytest.approx(bits, rel=0.02)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64])
def test_bits_are_packed_alike_on_any_device(count: int) -> None:
    """The arithmetic for devices that NumPy does not reach gives the same bytes."""
    marks = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    packed = sets._pack_bits(marks)
    assert torch.equal(sets._pack_bits_by_arithmetic(marks), packed)
    assert torch.equal(sets._unpack_bits_by_arithmetic(packed, count), marks)
