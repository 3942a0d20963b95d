"""What crosses the network: round trips and the sizes that the byte formulas count on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim.values import VALUE_DTYPES, ValueCodec, make_codec
from hvd_slim.wire import PairFormat, aligned

WIDE = (torch.float32, torch.float64)
WIDTHS = (0, 1, 4, 8)  # bytes of an index
codecs = st.builds(make_codec, st.sampled_from(VALUE_DTYPES), st.sampled_from(WIDE))
HEADER = 16  # bytes: stratum of the first pair, number of pairs


def some_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,)).to(torch.uint8)


def of_width(width: int) -> Callable[[int], int]:
    return lambda count: count * width


@given(codecs, st.sampled_from(WIDTHS), st.integers(0, 100), st.integers(1, 4), st.integers(0, 2**40))
def test_pairs_round_trip(codec: ValueCodec, width: int, count: int, ranks: int, first: int) -> None:
    """What each rank writes into its message is found in the gathered messages: indices to the bit, values as the
    codec alone would give them, at any width of either."""
    pairs = PairFormat(codec, of_width(width))
    sent = []
    for rank in range(ranks):
        values, indices = torch.randn(count, dtype=codec.wide), some_bytes(count * width)
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
        assert torch.equal(received_indices, indices)


@given(codecs, st.sampled_from(WIDTHS), st.integers(0, 10_000))
def test_bytes_of_a_message(codec: ValueCodec, width: int, count: int) -> None:
    """A header, the values' bytes and the indices', and less than eight of padding behind each."""
    nbytes = PairFormat(codec, of_width(width)).nbytes(count)
    exact = HEADER + codec.nbytes(count) + count * width
    assert exact <= nbytes <= exact + 14
    assert nbytes % 8 == 0


def test_parts_of_a_message_do_not_overlap() -> None:
    pairs = PairFormat(make_codec("float32", torch.float32), of_width(1))
    message = torch.zeros(pairs.nbytes(5), dtype=torch.uint8)
    pairs.write(message, torch.full((5,), float("nan")), torch.full((5,), 255, dtype=torch.uint8), 3, 0, 0, 0)
    values, indices, first = pairs.read(message)
    assert values.isnan().all()
    assert indices.eq(255).all()
    assert first == 3


@pytest.mark.parametrize("nbytes", range(20))
def test_aligned(nbytes: int) -> None:
    assert aligned(nbytes) % 8 == 0
    assert nbytes <= aligned(nbytes) < nbytes + 8
