"""The mean over ranks of one packed buffer: what the core, a shared explorer set and the dense exchange need.

Full-width values go by allreduce. Narrow ones cannot be summed on the way (Horovod refuses some, and each hop of a ring
would round again), so rank j receives everybody's slice j, sums it in rank order in full width, and sends the mean on:
alltoall, then allgather, as many bytes as an allreduce of the same width.

What rounding kept back is returned, so that it stays in the pending update: at every rank its own rounding, and at the
rank that rounded a mean, K times the mean's.
"""

from __future__ import annotations

import math

import torch

from hvd_slim.transport.base import Pending, Received, Transport
from hvd_slim.values import ValueCodec
from hvd_slim.wire import aligned

#: numbers that ride along and are summed over ranks: ‖u_k‖² (for γ), whether u_k is non-finite, and then the rank
_RIDERS = 3
_RIDER_BYTES = 8 * _RIDERS


class MeanReduction:
    """Mean over ranks of a buffer of ``count`` values, the buffer allocated once.

    Args:
        transport: carries the bytes.
        codec: width of the values on the wire.
        count: number of values.
        dtype, device: of the buffer (the arena's).
        phase: under which bytes are counted.
        norm_count: scale the mean by γ (``restore_norm``), taken over the first ``norm_count`` values; 0 for no scale.
        stretch: multiply the mean by it, too (1/λ, ``local_rate``).

    Attributes:
        update: shape (count,): to be filled before ``start``. Its contents are used up.
        unsent: after ``finish``: shape (count,), what this rank still has to tell; None if everything was sent.
        factor: after ``finish``: what the mean was multiplied by, γ·stretch; γ is 1 without ``norm_count``.
        nonfinite: after ``finish``: how many ranks said that they hold non-finite values, and the sum of their numbers.
    """

    def __init__(
        self, transport: Transport, codec: ValueCodec, count: int, dtype: torch.dtype, device: torch.device, phase: str,
        norm_count: int = 0, stretch: float = 1.0,
    ) -> None:  # fmt: skip
        self._transport, self._codec, self._phase, self._norm_count = (transport, codec, phase, norm_count)
        self._buffer = torch.zeros(count + _RIDERS, dtype=dtype, device=device)
        self.update = self._buffer[:count]
        self.unsent: torch.Tensor | None = None
        self.factor = self._stretch = stretch
        self.nonfinite = (0, 0)
        size = transport.size
        self._bounds = [count * rank // size for rank in range(size + 1)]
        self._lengths = [end - begin for begin, end in zip(self._bounds, self._bounds[1:])]
        self._summed: Pending[torch.Tensor] | None = None
        self._slices: Pending[Received] | None = None
        self._round_number = 0

    def start(self, round_number: int, nonfinite: bool = False) -> None:
        """Launch the reduction of ``update``. Collective, non-blocking.

        Args:
            round_number: for stochastic rounding.
            nonfinite: whether this rank holds non-finite values, for all to know.
        """
        self._round_number = round_number
        square = sum_of_squares(self.update[: self._norm_count])
        riders = [square, float(nonfinite), float(nonfinite) * self._transport.rank]
        if self._codec.exact:
            self._buffer[-_RIDERS:] = torch.tensor(riders)
            self._summed = self._transport.allreduce(self._buffer, self._phase)
            return
        messages = [self._encode(part, riders, rank) for rank, part in enumerate(self.update.split(self._lengths))]
        sent = [self._decode(message, length) for message, length in zip(messages, self._lengths)]
        self.unsent = self.update - torch.cat(sent)
        counts = [message.numel() for message in messages]
        most = self._transport.size * max(counts)
        self._slices = self._transport.alltoall(torch.cat(messages), counts, most, self._phase)

    def in_flight(self) -> dict[str, torch.Tensor]:
        """What ``finish`` will need, once it has arrived; ``resume`` takes it. Not collective."""
        if self._summed is not None:
            return {"summed": self._summed.arrive().clone()}
        assert self._slices is not None
        assert self.unsent is not None
        data, counts = self._slices.arrive()
        return {"slices": data.clone(), "counts": torch.tensor(counts), "unsent": self.unsent.clone()}

    def resume(self, round_number: int, state: dict[str, torch.Tensor]) -> None:
        """Stand where ``in_flight`` was called. Not collective."""
        self._round_number = round_number
        if "summed" in state:
            self._buffer.copy_(state["summed"])
            self._summed = Pending(lambda: self._buffer)
        else:
            received = state["slices"].to(self._buffer.device), state["counts"].tolist()
            self._slices, self.unsent = Pending(lambda: received), state["unsent"].to(self._buffer.device).clone()

    def finish(self) -> torch.Tensor:
        """Wait for the mean: shape (count,), bit-identical on all ranks, times ``factor``. Collective."""
        total, divisor = self.finish_sum()
        return total if divisor == 1.0 else total.div_(divisor)

    def finish_sum(self) -> tuple[torch.Tensor, float]:
        """The same before a last division: (shape (count,), by what it is to be divided)."""
        size = self._transport.size
        if self._summed is not None:
            summed = self._summed.wait()
            self._summed = None
            square_sum = self._read_riders(summed[-_RIDERS:].tolist())
            total = summed[: self.update.numel()]
            if not self._norm_count:
                return total, size / self._stretch
            return self._scaled(total.div_(size), square_sum / size), 1.0
        assert self._slices is not None
        data, counts = self._slices.wait()
        self._slices = None
        length = self._lengths[self._transport.rank]
        # Summed in rank order, in full width, by one rank alone: the same bits for all.
        own_mean = torch.zeros(length, dtype=self.update.dtype, device=self.update.device)
        riders = torch.zeros(_RIDERS, dtype=torch.float64, device=self.update.device)
        for message in data.split(counts):
            own_mean += self._decode(message, length)
            riders += message[-_RIDER_BYTES:].view(torch.float64)
        square_sum = self._read_riders(riders.tolist())
        return self._scaled(self._share(own_mean.div_(size)), square_sum / size), 1.0

    def _read_riders(self, sums: list[float]) -> float:
        square_sum, bad_ranks, rank_sum = sums
        self.nonfinite = (int(bad_ranks), int(rank_sum))
        return square_sum

    def _share(self, own_mean: torch.Tensor) -> torch.Tensor:
        """Every slice's mean, as all ranks read it; what this rank's rounding took from its own is left to it."""
        mine, size = self._transport.rank, self._transport.size
        longest = aligned(self._codec.nbytes(max(self._lengths)))
        message = torch.zeros(longest, dtype=torch.uint8, device=own_mean.device)
        nbytes = self._codec.nbytes(own_mean.numel())
        self._codec.encode(own_mean, message[:nbytes], self._round_number, mine, size)
        gathered = self._transport.allgather(message, self._phase).wait()
        parts = [
            self._codec.decode(row[: self._codec.nbytes(length)], length)
            for row, length in zip(gathered, self._lengths)
        ]
        assert self.unsent is not None
        self.unsent[self._bounds[mine] : self._bounds[mine + 1]] += (own_mean - parts[mine]) * size
        return torch.cat(parts)

    def _scaled(self, mean: torch.Tensor, square_mean: float) -> torch.Tensor:
        if self._norm_count:
            norm = norm_factor(square_mean, sum_of_squares(mean[: self._norm_count]), self._transport.size)
            self.factor = norm * self._stretch
        return mean if self.factor == 1.0 else mean.mul_(self.factor)

    # A message: the encoded values, padded, and the riders.

    def _encode(self, values: torch.Tensor, riders: list[float], number: int) -> torch.Tensor:
        nbytes = self._codec.nbytes(values.numel())
        message = torch.zeros(aligned(nbytes) + _RIDER_BYTES, dtype=torch.uint8, device=values.device)
        self._codec.encode(values, message[:nbytes], self._round_number, self._transport.rank, number)
        message[-_RIDER_BYTES:].view(torch.float64).copy_(torch.tensor(riders, dtype=torch.float64))
        return message

    def _decode(self, message: torch.Tensor, count: int) -> torch.Tensor:
        return self._codec.decode(message[: self._codec.nbytes(count)], count)


def norm_factor(square_mean: float, mean_square: float, size: int) -> float:
    """γ = sqrt(mean over ranks of ‖u_k‖² / ‖mean over ranks of u_k‖²), kept within [1, √K].

    Rounded to 12 binary digits: ranks whose sums differ in the last bits of a float64 still scale alike.
    """
    if not (mean_square > 0.0 and math.isfinite(square_mean) and math.isfinite(mean_square)):
        return 1.0
    mantissa, exponent = math.frexp(math.sqrt(square_mean / mean_square))
    return min(max(math.ldexp(round(mantissa * 4096) / 4096, exponent), 1.0), math.sqrt(size))


def sum_of_squares(values: torch.Tensor) -> float:
    """‖values‖², taken in float64."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2 if values.numel() else 0.0
