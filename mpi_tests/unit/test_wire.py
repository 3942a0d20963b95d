"""What crosses the network: round trips and the sizes that the byte formulas count on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim.values import VALUE_DTYPES, ValueCodec, make_codec
from hvd_slim.wire import PairFormat, aligned, pack_set, set_nbytes, unpack_set

WIDE = (torch.float32, torch.float64)
INDICES = (None, torch.uint8, torch.int32, torch.int64)
codecs = st.builds(make_codec, st.sampled_from(VALUE_DTYPES), st.sampled_from(WIDE))
HEADER = 16  # bytes: stratum of the first pair, number of pairs


def width(index: torch.dtype | None) -> int:
    return 0 if index is None else index.itemsize


def some_indices(count: int, index: torch.dtype | None) -> torch.Tensor | None:
    if index is None:
        return None
    return torch.randint(0, min(torch.iinfo(index).max, 2**40), (count,)).to(index)


@given(codecs, st.sampled_from(INDICES), st.integers(0, 100), st.integers(1, 4), st.integers(0, 2**40))
def test_pairs_round_trip(codec: ValueCodec, index: torch.dtype | None, count: int, ranks: int, first: int) -> None:
    """What each rank writes into its message is found in the gathered messages: indices to the bit, values as the
    codec alone would give them, at any width of either."""
    pairs = PairFormat(codec, index)
    sent = []
    for rank in range(ranks):
        values, indices = torch.randn(count, dtype=codec.wide), some_indices(count, index)
        message = torch.full((pairs.nbytes(count),), 255, dtype=torch.uint8)
        pairs.write(message, values, indices, first + rank, 7, rank, 0)
        encoded = torch.empty(codec.nbytes(count), dtype=torch.uint8)
        codec.encode(values, encoded, 7, rank, 0)
        sent.append((message, codec.decode(encoded, count), indices))
    gathered = torch.stack([message for message, _, _ in sent])
    for rank, (_, values, indices) in enumerate(sent):
        received, received_indices, received_first = pairs.read(gathered[rank])
        assert torch.equal(received, values)
        assert received.dtype == codec.wide
        assert received_first == first + rank
        if indices is None:
            assert received_indices is None
        else:
            assert received_indices is not None
            assert torch.equal(received_indices, indices)
            assert received_indices.dtype == index


@given(codecs, st.sampled_from(INDICES), st.integers(0, 10_000))
def test_bytes_of_a_message(codec: ValueCodec, index: torch.dtype | None, count: int) -> None:
    """A header, the values' bytes and the indices', and less than eight of padding behind each."""
    nbytes = PairFormat(codec, index).nbytes(count)
    exact = HEADER + codec.nbytes(count) + count * width(index)
    assert exact <= nbytes <= exact + 14
    assert nbytes % 8 == 0


def test_parts_of_a_message_do_not_overlap() -> None:
    pairs = PairFormat(make_codec("float32", torch.float32), torch.uint8)
    message = torch.zeros(pairs.nbytes(5), dtype=torch.uint8)
    pairs.write(message, torch.full((5,), float("nan")), torch.full((5,), 255, dtype=torch.uint8), 3, 0, 0, 0)
    values, indices, first = pairs.read(message)
    assert values.isnan().all()
    assert indices is not None
    assert indices.eq(255).all()
    assert first == 3


@pytest.mark.parametrize("nbytes", range(20))
def test_aligned(nbytes: int) -> None:
    assert aligned(nbytes) % 8 == 0
    assert nbytes <= aligned(nbytes) < nbytes + 8


# Sets ----------------------------------------------------------------------------------------------------------------


@st.composite
def sets(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A size and an ascending set of coordinates below it: from empty to all."""
    n = draw(st.integers(1, 500))
    density = draw(st.sampled_from([0.0, 0.005, 0.03, 1 / 32, 0.1, 0.5, 1.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return n, np.flatnonzero(generator.random(n) < density).tolist()


@given(sets())
def test_sets_round_trip(made: tuple[int, list[int]]) -> None:
    n, members = made
    mask = torch.zeros(n, dtype=torch.bool)
    mask[members] = True
    packed = pack_set(mask)
    assert packed.dtype == torch.uint8
    assert packed.shape == (set_nbytes(len(members), n),)
    unpacked = unpack_set(packed, len(members), n)
    assert unpacked.dtype == torch.bool
    assert torch.equal(unpacked, mask)


@given(st.integers(1, 2**40), st.data())
def test_bytes_of_a_set(n: int, data: st.DataObject) -> None:
    """The smaller of a bitmap, ⌈n/8⌉ bytes, and a list of indices."""
    count = data.draw(st.integers(0, n))
    assert set_nbytes(count, n) == min((n + 7) // 8, count * (4 if n <= 2**31 else 8))
