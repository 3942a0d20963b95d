"""How values become bytes, in plain NumPy, slow and obvious: what ``hvd_slim.values`` must agree with, byte for byte.

Only the bits inside a NaN are left open in the two float formats; everywhere else they are one fixed code.
"""

from __future__ import annotations

import numpy as np

Vector = np.ndarray

#: largest whole number and length of a block, by value_dtype
BLOCK_FORMATS = {"int8": (127, 64), "int4": (7, 32)}


def nbytes(count: int, value_dtype: str, wide: type = np.float32) -> int:
    """Bytes of a message of ``count`` values."""
    if value_dtype == "float32":
        return count * np.dtype(wide).itemsize
    if value_dtype in ("float16", "bfloat16"):
        return 2 * count
    blocks = _ceil_div(count, BLOCK_FORMATS[value_dtype][1])
    return 2 * blocks + (count if value_dtype == "int8" else _ceil_div(count, 2))


def encode(
    values: Vector,
    value_dtype: str,
    rounding: str = "nearest",
    seed: int = 0,
    round_number: int = 0,
    rank: int = 0,
    message_number: int = 0,
) -> Vector:
    """The message (uint8) for float32 or float64 ``values``, which are also the wide dtype."""
    if value_dtype == "float32":
        return values.view(np.uint8)
    if value_dtype == "float16":
        return _saturated(values, 65504.0).astype(np.float16).view(np.uint8)
    if value_dtype == "bfloat16":
        largest = 2.0**128 - 2.0**120
        return _nearest_bfloat16(_saturated(values, largest)).view(np.uint8)

    levels, block = BLOCK_FORMATS[value_dtype]
    blocks = np.zeros((_ceil_div(len(values), block), block), np.float32)
    blocks.reshape(-1)[: len(values)] = _saturated(values, 2.0**127)

    # A scale: largest finite magnitude / levels, a hair more so that no ratio exceeds levels; never below 2^−126.
    largest = np.abs(np.nan_to_num(blocks, nan=0.0)).max(axis=1, initial=0)
    scale = np.maximum(largest * np.float32((1 + 2.0**-20) / levels), np.float32(2.0**-126))
    scale = _next_bfloat16(scale)

    ratio = blocks / _from_bfloat16(scale)[:, np.newaxis]
    if rounding == "stochastic":
        ratio.reshape(-1)[: len(values)] += noise(len(values), seed, round_number, rank, message_number)
    whole = np.rint(ratio)  # ties to even
    whole = np.where(np.isnan(whole), -(levels + 1), whole).astype(np.int8).reshape(-1)

    if value_dtype == "int8":
        packed = whole[: len(values)].view(np.uint8)
    else:
        whole = whole[: 2 * _ceil_div(len(values), 2)] + 8
        packed = (whole[0::2] + 16 * whole[1::2].astype(np.uint8)).astype(np.uint8)
    return np.concatenate([scale.view(np.uint8), packed])


def decode(message: Vector, count: int, value_dtype: str, wide: type = np.float32) -> Vector:
    """The ``count`` values (``wide``) of a message."""
    if value_dtype == "float32":
        return message.view(wide)
    if value_dtype == "float16":
        return message.view(np.float16).astype(wide)
    if value_dtype == "bfloat16":
        return _from_bfloat16(message.view(np.uint16)).astype(wide)

    levels, block = BLOCK_FORMATS[value_dtype]
    packed = message[2 * _ceil_div(count, block) :]
    if value_dtype == "int8":
        whole = packed.view(np.int8)
    else:
        whole = np.stack([packed % 16, packed // 16], axis=1).reshape(-1)[:count].astype(np.int8) - 8
    step = np.repeat(scales(message, count, value_dtype), block)[:count]
    return np.where(whole == -(levels + 1), np.float32("nan"), whole * step).astype(wide)


def scales(message: Vector, count: int, value_dtype: str) -> Vector:
    """The scale (float32) of each block of an int8 or int4 message."""
    blocks = _ceil_div(count, BLOCK_FORMATS[value_dtype][1])
    return _from_bfloat16(message[: 2 * blocks].view(np.uint16))


def noise(count: int, seed: int, round_number: int, rank: int, message_number: int) -> Vector:
    """What stochastic rounding adds before it rounds to the nearest: odd multiples of 2^−16 between −1/2 and 1/2.

    They are the 16-bit parts of raw Philox words, lowest first, with the lowest bit of each set.
    """
    key = np.array([seed, 2 + message_number * 2**32], dtype=np.uint64)
    counter = np.array([0, 0, round_number, rank], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(_ceil_div(count, 4))
    odd = words.view(np.int16)[:count] | 1
    return (odd * 2.0**-16).astype(np.float32)


def _saturated(values: Vector, largest: float) -> Vector:
    """In float32: no finite magnitude beyond ``largest``, and NaN for what is not finite."""
    return np.where(np.isfinite(values), np.clip(values, -largest, largest), np.nan).astype(np.float32)


def _nearest_bfloat16(x: Vector) -> Vector:
    """float32 to bfloat16 (as uint16): the upper half of the bits, rounded to the nearest, ties to even."""
    bits = x.view(np.uint32)
    odd = (bits >> 16) & 1
    rounded = ((bits + 0x7FFF + odd) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def _next_bfloat16(x: Vector) -> Vector:
    """Positive float32 to bfloat16 (as uint16): the upper half of the bits, rounded up."""
    return ((x.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)


def _from_bfloat16(upper: Vector) -> Vector:
    """bfloat16 (as uint16) to float32."""
    return (upper.astype(np.uint32) << 16).view(np.float32)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
