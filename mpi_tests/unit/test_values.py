"""Values on the wire: sizes, error bounds, what happens to odd values, and agreement with the NumPy oracle."""

from __future__ import annotations

import math

import numpy as np
import oracle_values as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim.values import ROUNDINGS, VALUE_DTYPES, ValueCodec, make_codec

Kind = tuple[str, str]  # value_dtype, rounding

BLOCK_KINDS: list[Kind] = [(name, rounding) for name in ("int8", "int4") for rounding in ROUNDINGS]
KINDS: list[Kind] = [(name, "nearest") for name in ("float32", "float16", "bfloat16")] + BLOCK_KINDS
WIDE = {torch.float32: np.float32, torch.float64: np.float64}
LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120, "int8": 2.0**127, "int4": 2.0**127}
#: relative error of float64 → float32, which every narrow codec makes first
FIRST_ROUNDING = {torch.float32: 0.0, torch.float64: 2.0**-24}
# How many standard errors a mean may be off: a right generator fails one such comparison in 10^9.
SIGMAS = 6.2

counts = st.one_of(
    st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129]),
    st.integers(0, 400),
)
draws = st.tuples(st.integers(0, 2**40), st.integers(0, 4095), st.integers(0, 2**32 - 1))
seeds = st.integers(0, 2**64 - 1)


@st.composite
def vectors(draw: st.DrawFn, wide: torch.dtype, non_finite: bool = False) -> torch.Tensor:
    """Normal values, each block of a size of its own, from denormal to huge; some zeros, some chosen by hypothesis."""
    count = draw(counts)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    exponents = st.integers(-150, 126) if wide == torch.float32 else st.integers(-1060, 1020)
    spread = draw(st.sampled_from([(0, 0), (-20, 20), (-150, 126)]))
    centre = draw(exponents) if spread == (0, 0) else 0
    exponent = centre + rng.integers(spread[0], spread[1] + 1, size=count // 32 + 1).repeat(32)[:count]
    with np.errstate(over="ignore"):
        values = np.ldexp(rng.standard_normal(count), exponent).astype(WIDE[wide])
    values[~np.isfinite(values)] = 1.0
    values[rng.random(count) < draw(st.sampled_from([0.0, 0.1, 1.0]))] = draw(st.sampled_from([0.0, -0.0]))
    floats = st.floats(width=32 if wide == torch.float32 else 64, allow_nan=non_finite, allow_infinity=non_finite)
    for value in draw(st.lists(floats, max_size=8)):
        if count:
            values[draw(st.integers(0, count - 1))] = value
    return torch.from_numpy(values)


def encoded(codec: ValueCodec, values: torch.Tensor, draw: tuple[int, int, int] = (0, 0, 0)) -> torch.Tensor:
    message = torch.full((codec.nbytes(values.numel()),), 0xAB, dtype=torch.uint8)
    codec.encode(values, message, *draw)
    return message


def there_and_back(codec: ValueCodec, values: torch.Tensor, draw: tuple[int, int, int] = (0, 0, 0)) -> torch.Tensor:
    return codec.decode(encoded(codec, values, draw), values.numel())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def step_sizes(message: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """The scale of each value's block, float64, shape (count,)."""
    scales = torch.from_numpy(oracle.scales(message.numpy(), count, name))
    return scales.double().repeat_interleave(oracle.BLOCK_FORMATS[name][1])[:count]


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), seed=seeds, draw=draws)
def test_agrees_with_the_oracle(
    kind: Kind, wide: torch.dtype, data: st.DataObject, seed: int, draw: tuple[int, int, int]
) -> None:
    """Messages byte for byte, decoded values bit for bit; where floats are NaN, both are."""
    name, rounding = kind
    values = data.draw(vectors(wide, non_finite=True))
    message = encoded(make_codec(name, wide, rounding, seed), values, draw)
    expected = oracle.encode(values.numpy(), name, rounding, seed, *draw)
    if name in ("float16", "bfloat16"):
        narrow = getattr(torch, name)
        ours, theirs = message.view(narrow), torch.tensor(expected.tolist(), dtype=torch.uint8).view(narrow)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.view(torch.int16)[~ours.isnan()], theirs.view(torch.int16)[~ours.isnan()])
    else:
        np.testing.assert_array_equal(message.numpy(), expected)
    decoded = make_codec(name, wide, rounding, seed).decode(message, values.numel())
    by_oracle = torch.from_numpy(oracle.decode(message.numpy(), values.numel(), name, WIDE[wide]))
    assert decoded.dtype == wide
    finite = ~decoded.isnan()
    assert torch.equal(finite, ~by_oracle.isnan())
    assert same_bits(decoded[finite], by_oracle[finite])


@pytest.mark.parametrize("kind", KINDS)
def test_long_messages_agree_with_the_oracle(kind: Kind) -> None:
    """Longer than what is worked on at once, with a last block that is not full."""
    name, rounding = kind
    count = 2**18 + 2**18 + 77
    for wide in WIDE:
        values = torch.randn(count, dtype=wide)
        message = encoded(make_codec(name, wide, rounding, 5), values, (3, 1, 2))
        np.testing.assert_array_equal(message.numpy(), oracle.encode(values.numpy(), name, rounding, 5, 3, 1, 2))
        decoded = make_codec(name, wide).decode(message, count)
        np.testing.assert_array_equal(decoded.numpy(), oracle.decode(message.numpy(), count, name, WIDE[wide]))


@pytest.mark.parametrize("wide", WIDE)
@given(count=st.integers(0, 10**10))
def test_nbytes(wide: torch.dtype, count: int) -> None:
    """The byte formulas of the planner, and of the oracle."""
    expected = {
        "float32": wide.itemsize * count,
        "float16": 2 * count,
        "bfloat16": 2 * count,
        "int8": count + 2 * math.ceil(count / 64),
        "int4": math.ceil(count / 2) + 2 * math.ceil(count / 32),
    }
    for name in VALUE_DTYPES:
        assert make_codec(name, wide).nbytes(count) == expected[name] == oracle.nbytes(count, name, WIDE[wide])


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), eights=st.integers(0, 5))
def test_a_message_may_start_at_any_multiple_of_eight_bytes(
    kind: Kind, wide: torch.dtype, data: st.DataObject, eights: int
) -> None:
    """Every byte of it is written and none beside it; values may be strided; ``out`` receives the same bits."""
    codec = make_codec(kind[0], wide, kind[1], 1)
    values = data.draw(vectors(wide))
    count, begin = values.numel(), 8 * eights
    alone = encoded(codec, values)
    buffer = torch.full((begin + alone.numel() + 3,), 0x5C, dtype=torch.uint8)
    message = buffer[begin : begin + alone.numel()]
    codec.encode(torch.stack([values, values + 1], dim=1)[:, 0], message, 0, 0)
    assert torch.equal(message, alone)
    assert (buffer[:begin] == 0x5C).all()
    assert (buffer[begin + alone.numel() :] == 0x5C).all()
    out = torch.full((count + 2,), 7.0, dtype=wide)
    returned = codec.decode(message, count, out[1:-1])
    assert returned.data_ptr() == out[1:-1].data_ptr()
    assert same_bits(returned, codec.decode(alone, count))
    assert out[0] == out[-1] == 7.0


@pytest.mark.parametrize("wide", WIDE)
@given(data=st.data())
def test_exact(wide: torch.dtype, data: st.DataObject) -> None:
    """What comes back is what went in, NaN and infinities included, as a view of the message."""
    values = data.draw(vectors(wide, non_finite=True))
    codec = make_codec("float32", wide)
    message = encoded(codec, values)
    decoded = codec.decode(message, values.numel())
    assert codec.exact
    assert same_bits(decoded, values)
    decoded.fill_(2.0)
    assert same_bits(message.view(wide), decoded)
    assert not any(make_codec(name, wide).exact for name in VALUE_DTYPES if name != "float32")


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@given(data=st.data())
def test_float_error(name: str, wide: torch.dtype, data: st.DataObject) -> None:
    """|x − decoded| ≤ half a unit in the last place, to which 2^−25 (2^−134) is equal among the subnormals."""
    values = data.draw(vectors(wide))
    decoded = there_and_back(make_codec(name, wide), values)
    x = values.double().clamp(-LARGEST[name], LARGEST[name])
    relative, absolute = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}[name]
    bound = (x.abs() * relative).clamp(min=absolute) + x.abs() * FIRST_ROUNDING[wide] + 2.0**-150
    assert ((x - decoded.double()).abs() <= bound).all()


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@given(data=st.data(), seed=seeds, draw=draws)
def test_block_error(kind: Kind, wide: torch.dtype, data: st.DataObject, seed: int, draw: tuple[int, int, int]) -> None:
    """Nearest: |x − decoded| ≤ (1/2 + 2^−18)·scale; stochastic: < scale; scale ≤ largest/levels and a bfloat16 ulp."""
    name, rounding = kind
    levels, block = oracle.BLOCK_FORMATS[name]
    values = data.draw(vectors(wide))
    count = values.numel()
    codec = make_codec(name, wide, rounding, seed)
    message = encoded(codec, values, draw)
    decoded = codec.decode(message, count)
    step = step_sizes(message, count, name)
    x = values.double().clamp(-LARGEST[name], LARGEST[name])
    error = (x - decoded.double()).abs() - x.abs() * FIRST_ROUNDING[wide]
    if rounding == "nearest":
        assert (error <= step * (0.5 + 2.0**-18)).all()
    else:
        assert (error < step).all()
    for begin in range(0, count, block):
        largest = x[begin : begin + block].abs().max().item()
        assert step[begin] <= max(largest / levels * (1 + 2.0**-7) * (1 + 2.0**-19), 2.0**-126)
    assert (decoded.double().abs() <= levels * step).all()
    assert decoded.isfinite().all()


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_was_rounded_away_brings_the_value_back(kind: Kind, wide: torch.dtype, data: st.DataObject) -> None:
    """Error feedback: decoded + (x − decoded) == x.

    Exact when rounding to the nearest, because decoded is then 0 or between x/2 and 2x (Sterbenz); stochastic rounding
    may take a small x to a whole step, and the sum rounds in the last place of the larger of the two.
    """
    name, rounding = kind
    codec = make_codec(name, wide, rounding, 11)
    largest = LARGEST.get(name, torch.finfo(wide).max)
    values = data.draw(vectors(wide)).clamp(-largest, largest)
    if wide == torch.float64 and not codec.exact:
        values = values.float().double()
    decoded = there_and_back(codec, values)
    restored = decoded + (values - decoded)
    if rounding == "nearest":
        assert torch.equal(restored, values)
    else:
        last_place = torch.finfo(wide).eps * torch.maximum(decoded.abs(), values.abs())
        assert ((restored - values).abs() <= last_place).all()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), seed=seeds, draw=draws)
def test_one_message_for_one_draw(kind: Kind, data: st.DataObject, seed: int, draw: tuple[int, int, int]) -> None:
    """The same arguments give the same bytes, values decode alike whoever decodes, global generators are left alone."""
    name, rounding = kind
    values = data.draw(vectors(torch.float32))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    message = encoded(make_codec(name, torch.float32, rounding, seed), values, draw)
    assert torch.equal(message, encoded(make_codec(name, torch.float32, rounding, seed), values, draw))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # type: ignore[index]
    decoded = make_codec(name, torch.float32, rounding, seed).decode(message, values.numel())
    other_seed = make_codec(name, torch.float32, "nearest", seed ^ 1)
    assert same_bits(decoded, other_seed.decode(message, values.numel()))


@pytest.mark.parametrize("kind", KINDS)
def test_flushing_denormals_changes_no_decoded_value(kind: Kind) -> None:
    """One rank may run with ``torch.set_flush_denormal(True)``; scales and decoded numbers stay clear of the matter."""
    name, rounding = kind
    values = torch.randn(1000) * torch.logspace(-45, -5, 1000)
    codec = make_codec(name, torch.float32, rounding)
    message = encoded(codec, values)
    expected = codec.decode(message, 1000).clone()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        decoded = codec.decode(message, 1000)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(decoded, expected)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.25, 0.5, 0.9, -0.37, 2.6])
def test_stochastic_rounding_is_right_on_average(name: str, fraction: float) -> None:
    """Over one long message, and over the rounds at one coordinate; also the variance is that of a coin flip.

    A mean over N draws has standard error scale·√(p(1−p)/N), p the fractional part in steps.
    """
    levels, block = oracle.BLOCK_FORMATS[name]
    codec = make_codec(name, torch.float32, "stochastic", 17)

    def off(values: torch.Tensor, decoded: torch.Tensor, step: float) -> None:
        p = (fraction / step) % 1
        error = decoded.double().mean().item() - values.double().mean().item()
        standard_error = step * math.sqrt(p * (1 - p) / values.numel())
        assert abs(error) <= SIGMAS * standard_error + 2.0**-15 * step
        assert decoded.unique().numel() == (1 if p == 0 else 2)

    values = torch.full((2**18,), fraction)
    values[::block] = levels
    message = encoded(codec, values)
    decoded = codec.decode(message, values.numel())
    step = step_sizes(message, values.numel(), name)[0].item()
    inner = torch.arange(values.numel()) % block != 0
    off(values[inner], decoded[inner], step)

    few = values[:2]
    by_round = torch.stack([there_and_back(codec, few, (number, 2, 1)) for number in range(1000)])[:, 1]
    off(few[1].expand(1000), by_round, step)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_random_bits_differ_by_seed_round_rank_and_message(name: str) -> None:
    """Rounding errors of messages that differ in one of the four are uncorrelated (|r| ≤ 6.2/√N)."""
    values = torch.randn(2**16)
    draw = [5, 4, 3, 2]
    variants = [draw] + [[number + (at == i) for i, number in enumerate(draw)] for at in range(4)]
    errors = [
        there_and_back(make_codec(name, torch.float32, "stochastic", seed), values, (r, k, m)) - values
        for seed, r, k, m in variants
    ]
    correlation = torch.corrcoef(torch.stack(errors)) - torch.eye(5)
    assert correlation.abs().max() <= SIGMAS / math.sqrt(2**16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 64, 100])
def test_zeros_stay_zero(kind: Kind, count: int) -> None:
    """In a message of zeros, and in a block of zeros among others."""
    codec = make_codec(kind[0], torch.float32, kind[1], 3)
    zeros = torch.from_numpy(np.zeros(count, np.float32))
    assert torch.equal(there_and_back(codec, zeros), zeros)
    by_oracle = torch.from_numpy(oracle.encode(zeros.numpy(), *kind, 3))
    assert torch.equal(codec.decode(by_oracle, count), zeros)
    mixed = torch.cat([torch.randn(128), torch.zeros(128), torch.randn(9)])
    assert torch.equal(there_and_back(codec, mixed)[128:256], torch.zeros(128))


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(st.floats(2.0**-120, 2.0**127, width=32), st.sampled_from([-1, 1]))
def test_one_value(name: str, magnitude: float, sign: int) -> None:
    """Alone in its block, a value comes back to half a step, at most one part in 2·levels."""
    levels = oracle.BLOCK_FORMATS[name][0]
    decoded = there_and_back(make_codec(name, torch.float32), torch.tensor([sign * magnitude])).item()
    assert abs(decoded - sign * magnitude) <= 0.51 / levels * magnitude


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_values_too_small_for_any_scale_wait(kind: Kind) -> None:
    """A block below 2^−127 decodes to zeros (nearest) or to at most one step of 2^−126 (stochastic)."""
    values = torch.full((64,), 1e-45)
    decoded = there_and_back(make_codec(kind[0], torch.float32, kind[1], 1), values)
    assert decoded.isfinite().all()
    assert (decoded.abs() <= (0.0 if kind[1] == "nearest" else 2.0**-126)).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("wide", WIDE)
def test_huge_values_become_the_largest(name: str, wide: torch.dtype) -> None:
    """Finite stays finite: to half a step of the codec's largest value."""
    huge = torch.finfo(wide).max
    decoded = there_and_back(make_codec(name, wide), torch.tensor([huge, -huge, 0.0], dtype=wide))
    largest = LARGEST[name]
    relative = 0.51 / oracle.BLOCK_FORMATS[name][0] if name.startswith("int") else 0.0
    assert decoded.isfinite().all()
    assert abs(decoded[0].item() - largest) <= relative * largest
    assert decoded[1] == -decoded[0]
    assert decoded[2] == 0


def test_float16_keeps_subnormals() -> None:
    """Down to 2^−24."""
    values = 2.0 ** -torch.arange(10.0, 25.0)
    assert torch.equal(there_and_back(make_codec("float16", torch.float32), values), values)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kind", KINDS[1:])
@given(data=st.data())
def test_non_finite_values_keep_to_themselves(kind: Kind, wide: torch.dtype, data: st.DataObject) -> None:
    """NaN and ±Inf come back as NaN; every other value as if zeros had stood in their places."""
    values = data.draw(vectors(wide, non_finite=True))
    if values.numel():
        values[data.draw(st.integers(0, values.numel() - 1))] = data.draw(
            st.sampled_from([math.nan, math.inf, -math.inf])
        )
    codec = make_codec(kind[0], wide, kind[1], 9)
    decoded = there_and_back(codec, values)
    finite = values.isfinite()
    assert torch.equal(decoded.isnan(), ~finite)
    without = there_and_back(codec, values.where(finite, torch.zeros((), dtype=wide)))
    assert same_bits(decoded[finite], without[finite])


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_device(kind: Kind, wide: torch.dtype) -> None:
    """On tensors without data, reading any value would raise."""
    codec = make_codec(kind[0], wide, kind[1])
    count = 1000
    values = torch.empty(count, dtype=wide, device="meta")
    message = torch.empty(codec.nbytes(count), dtype=torch.uint8, device="meta")
    codec.encode(values, message, 0, 0)
    assert codec.decode(message, count).shape == (count,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_same_bytes(kind: Kind) -> None:
    """Encoded and decoded there as here, without a synchronisation."""
    codec = make_codec(kind[0], torch.float32, kind[1], 4)
    values = torch.randn(100_003) * torch.logspace(-40, 30, 100_003)
    here = encoded(codec, values, (1, 2, 3))
    on_device, message = values.cuda(), torch.empty(here.numel(), dtype=torch.uint8, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.encode(on_device, message, 1, 2, 3)
        decoded = codec.decode(message, values.numel())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(message.cpu(), here)
    assert same_bits(decoded.cpu(), codec.decode(here, values.numel()))


def test_refusals() -> None:
    """Wrong settings name the setting and the choice; a message of the wrong length names both lengths."""
    with pytest.raises(ValueError, match="value_dtype='int2' is unknown; choose one of 'float32'"):
        make_codec("int2", torch.float32)
    with pytest.raises(ValueError, match="rounding='up' is unknown; choose one of 'nearest'"):
        make_codec("int8", torch.float32, "up")
    with pytest.raises(ValueError, match="torch.float16; give torch.float32 or torch.float64"):
        make_codec("int8", torch.float16)
    for name in ("float32", "float16", "bfloat16"):
        with pytest.raises(ValueError, match=f"not offered for value_dtype='{name}'.*use rounding='nearest'"):
            make_codec(name, torch.float32, "stochastic")
    codec = make_codec("int8", torch.float32)
    with pytest.raises(ValueError, match="out has 100 bytes; 100 values in int8 take 104"):
        codec.encode(torch.zeros(100), torch.empty(100, dtype=torch.uint8), 0, 0)
    with pytest.raises(ValueError, match="message has 105 bytes; 100 values in int8 take 104"):
        codec.decode(torch.zeros(105, dtype=torch.uint8), 100)
