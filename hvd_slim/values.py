"""How values become bytes on the wire: one codec for each ``value_dtype``.

A message of ``count`` values takes exactly ``codec.nbytes(count)`` bytes. It has to start at a multiple of eight bytes;
it may end anywhere, so whoever puts something behind it pads. Byte order is the machine's.

What a codec rounds away is not lost: the sender takes ``decode(encode(u))`` off its pending update, so the error stays
there (error feedback) and travels later. Every rank decodes the same bytes to the same values.

Non-finite values do not spoil their neighbours. The exact codec carries them as they are; from every narrow one, NaN
and ±Inf come back as NaN. Finite values come back finite: what is too large for a codec becomes its largest value.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

import numpy as np
import torch

from hvd_slim.rng import raw_words

#: stream of the add-on's generator that stochastic rounding draws from
ROUNDING_STREAM = 2

VALUE_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
ROUNDINGS = ("nearest", "stochastic")

_NAN = float("nan")


def make_codec(value_dtype: str, wide: torch.dtype, rounding: str = "nearest", seed: int = 0) -> ValueCodec:
    """The codec for ``value_dtype``.

    Args:
        value_dtype: one of ``VALUE_DTYPES``. ``"float32"`` means values as they are: where ``wide`` is float64, eight
            bytes each.
        wide: the dtype in which sums are taken and values handed over, ``Arena.value_dtype``: float32 or float64.
        rounding: ``"nearest"`` (ties to even), or ``"stochastic"`` (up or down at random, right on average), which
            int8 and int4 offer.
        seed: of stochastic rounding, in [0, 2^64).

    Raises:
        ValueError: an argument is none of the above, or ``rounding`` is not offered by ``value_dtype``.
    """
    if value_dtype not in VALUE_DTYPES:
        raise ValueError(f"value_dtype={value_dtype!r} is unknown; choose one of {', '.join(map(repr, VALUE_DTYPES))}")
    if wide not in (torch.float32, torch.float64):
        raise ValueError(f"values cannot be summed in {wide}; give torch.float32 or torch.float64")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is unknown; choose one of {', '.join(map(repr, ROUNDINGS))}")
    if rounding == "stochastic" and not value_dtype.startswith("int"):
        raise ValueError(
            f"rounding='stochastic' is not offered for value_dtype={value_dtype!r}, only for 'int8' and 'int4'; "
            f"use rounding='nearest'"
        )
    if value_dtype == "float32":
        return ExactCodec(value_dtype, wide)
    if value_dtype in ("float16", "bfloat16"):
        return FloatCodec(value_dtype, wide, getattr(torch, value_dtype))
    stochastic_seed = seed if rounding == "stochastic" else None
    return (Int8Codec if value_dtype == "int8" else Int4Codec)(value_dtype, wide, stochastic_seed)


class ValueCodec(abc.ABC):
    """Values to bytes and back, on any device, without waiting for it.

    Attributes:
        name: its ``value_dtype``.
        wide: dtype of decoded values, float32 or float64.
        exact: whether ``decode`` gives back, bit for bit, what ``encode`` was given in ``wide``.
    """

    exact = False

    def __init__(self, name: str, wide: torch.dtype) -> None:
        self.name, self.wide = name, wide

    @abc.abstractmethod
    def nbytes(self, count: int) -> int:
        """Bytes of a message of ``count`` values."""

    def encode(
        self, values: torch.Tensor, out: torch.Tensor, round_number: int, rank: int, message_number: int = 0
    ) -> None:
        """Write ``values`` into a message. Raises for no value, whatever it is.

        Args:
            values: float32 or float64, shape (count,).
            out: uint8, contiguous, shape (nbytes(count),), on the same device; every byte is written.
            round_number, rank, message_number: choose the random bits of stochastic rounding. Two messages that a rank
                encodes in one round need different numbers, in [0, 2^32).
        """
        self._check("out", out, values.numel())
        if values.numel():
            self._encode(values, out, round_number, rank, message_number)

    def decode(self, message: torch.Tensor, count: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The ``count`` values of a message.

        Args:
            message: uint8, contiguous, shape (nbytes(count),).
            out: where to put them, ``wide``, contiguous, shape (count,); by default they get memory of their own,
                except that the exact codec returns a view of ``message``.

        Returns:
            ``wide``, shape (count,).
        """
        self._check("message", message, count)
        if not count:  # an empty tensor made by NumPy has stride 0 and cannot be viewed
            return self._empty(0, message, out)
        return self._decode(message, count, out)

    def _check(self, what: str, message: torch.Tensor, count: int) -> None:
        if message.numel() != self.nbytes(count):
            raise ValueError(
                f"{what} has {message.numel()} bytes; {count} values in {self.name} take {self.nbytes(count)}"
            )

    @abc.abstractmethod
    def _encode(
        self, values: torch.Tensor, out: torch.Tensor, round_number: int, rank: int, message_number: int
    ) -> None: ...

    @abc.abstractmethod
    def _decode(self, message: torch.Tensor, count: int, out: torch.Tensor | None) -> torch.Tensor: ...

    def _empty(self, count: int, message: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return torch.empty(count, dtype=self.wide, device=message.device) if out is None else out


class ExactCodec(ValueCodec):
    """Values as they are: four bytes each, eight if ``wide`` is float64.

    ``decode`` is a view, so a message may also be filled in place: ``decode(message, count).copy_(...)``.
    """

    exact = True

    def nbytes(self, count: int) -> int:
        """Bytes of a message: count · width."""
        return count * self.wide.itemsize

    def _encode(
        self, values: torch.Tensor, out: torch.Tensor, round_number: int, rank: int, message_number: int
    ) -> None:
        out.view(self.wide).copy_(values)

    def _decode(self, message: torch.Tensor, count: int, out: torch.Tensor | None) -> torch.Tensor:
        values = message.view(self.wide)
        return values if out is None else out.copy_(values)


class FloatCodec(ValueCodec):
    """Values as float16 or bfloat16, to the nearest, ties to even; two bytes each.

    |x − decoded| ≤ max(2^−11·|x|, 2^−25) for float16 and max(2^−8·|x|, 2^−134) for bfloat16 (the second where their
    subnormals step evenly), up to the largest value: 65504, or about 3.39e38. A float64 value is rounded to float32
    on its way.
    """

    def __init__(self, name: str, wide: torch.dtype, narrow: torch.dtype) -> None:
        super().__init__(name, wide)
        self._narrow = narrow
        self._largest = torch.finfo(narrow).max

    def nbytes(self, count: int) -> int:
        """Bytes of a message: 2 · count."""
        return count * self._narrow.itemsize

    def _encode(
        self, values: torch.Tensor, out: torch.Tensor, round_number: int, rank: int, message_number: int
    ) -> None:
        narrow = out.view(self._narrow)
        work = _work(values.numel(), values.device)
        for part in _chunks(values.numel(), values.device):
            narrow[part].copy_(_saturated(values[part], self._largest, work[: part.stop - part.start]))

    def _decode(self, message: torch.Tensor, count: int, out: torch.Tensor | None) -> torch.Tensor:
        return self._empty(count, message, out).copy_(message.view(self._narrow))


class BlockCodec(ValueCodec):
    """Values as small whole numbers times a scale per block of consecutive values; the last block may be shorter.

    A message holds all scales, as bfloat16, then all whole numbers. A block's scale is its largest magnitude over
    ``levels``, rounded up, so that whole numbers stay within ±levels and whole number · scale is exact in float32.
    It is at least 2^−126, the smallest normal float32: nothing is divided by zero, all-zero blocks stay zero, and
    smaller values wait in the pending update. Values beyond ±2^127 become ±2^127. −(levels + 1) stands for NaN.

    Nearest: |x − decoded| ≤ (1/2 + 2^−18)·scale. Stochastic: |x − decoded| < scale, and the mean over the random bits
    is within 2^−15·scale of x. A float64 value is rounded to float32 on its way.

    Block lengths by relative rms error (bytes a value), on updates of a small transformer under SGD: int8, blocks of
    32, 64, 128: 0.55 % (1.063), 0.60 % (1.031), 0.65 % (1.016); int4, blocks of 16, 32, 64: 8.6 % (0.625), 9.7 %
    (0.563), 10.7 % (0.531). An eighth of a bit is worth 8 % of error, so 64 breaks even here; values with heavier tails
    (Student's t) gain 20 % from each halving, and 4 bits need it most. For the same bytes, bfloat16 scales of 64 values
    beat float32 scales of 128 by 7 %; power-of-two scales save one more byte a block and add half the error again.

    Args:
        seed: of stochastic rounding; None rounds to the nearest, ties to even.
    """

    #: largest whole number
    levels: int
    #: values in a block
    block: int

    #: scale = largest magnitude · this: a hair above 1/levels, so that rounding cannot carry a ratio beyond ±levels
    _per_level: float

    def __init__(self, name: str, wide: torch.dtype, seed: int | None) -> None:
        super().__init__(name, wide)
        self._seed = seed

    def nbytes(self, count: int) -> int:
        """Bytes of a message: 2 · blocks + whole numbers."""
        return _SCALE_BYTES * self._blocks(count) + self._packed_nbytes(count)

    def _encode(
        self, values: torch.Tensor, out: torch.Tensor, round_number: int, rank: int, message_number: int
    ) -> None:
        count, device, block = values.numel(), values.device, self.block
        scales_out, packed_out = self._split(out, count)
        noise = None
        if self._seed is not None:
            noise = _noise(self._seed, round_number, rank, message_number, count, device)
        room = block * self._blocks(min(count, _chunk(device)))
        work, magnitudes = _work(room, device), _work(room, device)
        for part in _chunks(count, device):
            length = part.stop - part.start
            blocks = slice(part.start // block, self._blocks(part.stop))
            ratios = work[: block * (blocks.stop - blocks.start)]
            _saturated(values[part], 2.0**127, ratios[:length])
            ratios[length:].zero_()
            magnitude = torch.nan_to_num(ratios, 0.0, out=magnitudes[: ratios.numel()]).abs_()
            scales = self._scales(magnitude.view(-1, block).amax(1))
            scales_out[blocks].copy_(scales)
            ratios.view(-1, block).div_(scales.unsqueeze(1))
            if noise is not None:
                ratios[:length].add_(noise[part], alpha=2.0**-16)
            # NaN has to go before floats become integers: there it may become anything.
            whole = ratios.round_().nan_to_num_(-float(self.levels + 1))
            self._pack(whole, packed_out[self._packed_nbytes(part.start) : self._packed_nbytes(part.stop)])

    def _decode(self, message: torch.Tensor, count: int, out: torch.Tensor | None) -> torch.Tensor:
        out = self._empty(count, message, out)
        device, block = message.device, self.block
        all_scales, packed = self._split(message, count)
        direct = out.dtype == torch.float32
        work = out if direct else _work(count, device)
        for part in _chunks(count, device):
            length = part.stop - part.start
            values = out[part] if direct else work[:length]
            self._unpack(packed[self._packed_nbytes(part.start) : self._packed_nbytes(part.stop)], values)
            torch.threshold_(values, -(self.levels + 0.5), _NAN)
            scales = all_scales[part.start // block : self._blocks(part.stop)].float()
            whole_blocks = length // block
            whole = whole_blocks * block
            values[:whole].view(-1, block).mul_(scales[:whole_blocks].unsqueeze(1))
            values[whole:].mul_(scales[whole_blocks:])
            if not direct:
                out[part].copy_(values)
        return out

    def _scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Scales for blocks of these largest magnitudes (float32, overwritten), in float32 but fit for bfloat16."""
        scales = largest.mul_(self._per_level).clamp_(min=2.0**-126)
        scales.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
        return scales

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _split(self, message: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales_end = _SCALE_BYTES * self._blocks(count)
        return message[:scales_end].view(torch.bfloat16), message[scales_end:]

    @abc.abstractmethod
    def _packed_nbytes(self, count: int) -> int:
        """Bytes of ``count`` whole numbers."""

    @abc.abstractmethod
    def _pack(self, whole: torch.Tensor, packed: torch.Tensor) -> None:
        """Whole numbers (float32, overwritten, with zeros up to the end of the block) to bytes."""

    @abc.abstractmethod
    def _unpack(self, packed: torch.Tensor, whole: torch.Tensor) -> None:
        """Bytes to whole numbers (float32)."""


class Int8Codec(BlockCodec):
    """One byte a value, −127 to 127, and a scale for every 64: 1.03 bytes a value."""

    levels = 127
    block = 64
    _per_level = (1 + 2.0**-20) / levels

    def _packed_nbytes(self, count: int) -> int:
        return count

    def _pack(self, whole: torch.Tensor, packed: torch.Tensor) -> None:
        packed.view(torch.int8).copy_(whole[: packed.numel()])

    def _unpack(self, packed: torch.Tensor, whole: torch.Tensor) -> None:
        whole.copy_(packed.view(torch.int8))


class Int4Codec(BlockCodec):
    """Two values a byte, −7 to 7, and a scale for every 32: 0.56 bytes a value.

    Value 2i is in the low half of byte i, value 2i + 1 in the high half, each plus 8; an unused half is zero plus 8.
    """

    levels = 7
    block = 32
    _per_level = (1 + 2.0**-20) / levels

    def _packed_nbytes(self, count: int) -> int:
        return -(-count // 2)

    def _pack(self, whole: torch.Tensor, packed: torch.Tensor) -> None:
        # Two bytes 0000llll 0000hhhh read as one int16, 0000hhhh0000llll; its lower byte becomes hhhhllll.
        pairs = whole[: 2 * packed.numel()].add_(8).to(torch.int8).view(torch.int16)
        packed.copy_((pairs >> 4).bitwise_or_(pairs).bitwise_and_(0xFF))

    def _unpack(self, packed: torch.Tensor, whole: torch.Tensor) -> None:
        pairs = packed.to(torch.int16)
        pairs = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F)
        whole.copy_(pairs.view(torch.int8)[: whole.numel()].sub_(8))


_SCALE_BYTES = torch.bfloat16.itemsize


def _chunk(device: torch.device) -> int:
    """Values worked on at once: on a CPU, what its cache holds; elsewhere, enough to keep the device busy.

    int8, encoding 3.84 million float32 on one core: 6.6 ms in chunks of 2^16, 4.3 of 2^18, 4.0 of 2^19, 6 to 22 whole.
    """
    return 2**18 if device.type == "cpu" else 2**22


def _chunks(count: int, device: torch.device) -> Iterator[slice]:
    chunk = _chunk(device)
    return (slice(begin, min(begin + chunk, count)) for begin in range(0, count, chunk))


def _work(count: int, device: torch.device) -> torch.Tensor:
    """Scratch memory for one chunk of a message of ``count`` values, float32."""
    return torch.empty(min(count, _chunk(device)), dtype=torch.float32, device=device)


def _saturated(values: torch.Tensor, largest: float, out: torch.Tensor) -> torch.Tensor:
    """``values`` in ``out`` (float32): magnitudes beyond ``largest`` become ``largest``, non-finite values NaN."""
    # 0 · x is NaN for infinite x, which clamp has hidden, and changes nothing otherwise.
    if values.dtype == out.dtype:
        return torch.clamp(values, -largest, largest, out=out).add_(values, alpha=0)
    return out.copy_(torch.clamp(values, -largest, largest).add_(values, alpha=0))


def _noise(
    seed: int, round_number: int, rank: int, message_number: int, count: int, device: torch.device
) -> torch.Tensor:
    """Odd int16 numbers, shape (count,): in units of 2^−16, symmetric about zero and less than half a step."""
    words = raw_words(seed, ROUNDING_STREAM + (message_number << 32), round_number, rank, -(-count // 4))
    words |= np.uint64(0x0001_0001_0001_0001)
    noise = torch.from_numpy(words.view(np.int16)[:count])
    if device.type == "cuda":
        return noise.pin_memory().to(device, non_blocking=True)  # from pageable memory the copy would wait
    return noise.to(device)
