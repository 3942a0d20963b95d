"""What all ranks must agree on before the first number travels. Disagreement raises on every rank; nothing hangs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import torch

from hvd_slim.transport.base import Transport


class RankMismatchError(ValueError):
    """Two ranks differ in something that must be equal on all; raised on every rank."""


class NonFiniteError(ArithmeticError):
    """A rank's parameters hold a NaN or an infinity; raised on every rank, before anything was merged."""


def require_finite(transport: Transport, bad_ranks: int, rank_sum: int) -> None:
    """Raise on every rank if ``bad_ranks``, whose numbers add up to ``rank_sum``, is not 0. Not collective.

    Raises:
        NonFiniteError: names the rank, if it is a single one.
    """
    if bad_ranks:
        who = f"rank {rank_sum} has" if bad_ranks == 1 else f"{bad_ranks} of {transport.size} ranks have"
        raise NonFiniteError(
            f"rank {transport.rank}: {who} a NaN or an infinity in the parameters after the local step. Nothing of "
            f"this round was merged: global_parameters() holds the last good model. Lower the learning rate or clip "
            f"gradients; on_nonfinite='skip' leaves such steps out"
        )


def require_equal(transport: Transport, *sections: Sequence[tuple[str, str]]) -> None:
    """Raise on every rank unless all ``sections``, (what, value) pairs in order, are the same on all. Collective.

    Raises:
        RankMismatchError: names the first difference of the first section that has one, two ranks and both values.
    """
    of_rank = [json.loads(text) for text in transport.gather_texts(json.dumps([list(facts) for facts in sections]))]
    for number in range(len(sections)):
        for rank in range(1, transport.size):
            difference = _first_difference(of_rank[0][number], of_rank[rank][number])
            if difference is not None:
                what, first, other = difference
                raise RankMismatchError(
                    f"rank {transport.rank}: ranks 0 and {rank} differ in {what}: rank 0 has {first}, rank {rank} has "
                    f"{other}. Build the same model with the same options, in the same order, on every rank."
                )


def _first_difference(first: list[list[str]], other: list[list[str]]) -> tuple[str, str, str] | None:
    for (what, value), (other_what, other_value) in zip(first, other):
        if what != other_what:
            return ("what comes next", f"{what} ({value})", f"{other_what} ({other_value})")
        if value != other_value:
            return what, value, other_value
    if len(first) != len(other):
        longer = first if len(first) > len(other) else other
        what, value = longer[min(len(first), len(other))]
        return what, *((value, "nothing") if longer is first else ("nothing", value))
    return None


def are_equal(transport: Transport, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the bytes of ``tensors`` (one-dimensional, contiguous) are the same on all ranks. Collective.

    Compares CRC-32 checksums; the answer is the same on every rank.
    """
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.cpu().view(torch.uint8).numpy().data, checksum)
    return len(set(transport.gather_texts(str(checksum)))) == 1
