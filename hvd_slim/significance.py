"""How much a coordinate matters, and choosing the core: the most significant coordinates, exactly as many as asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_slim import native
from hvd_slim.arena import Arena
from hvd_slim.chunks import at_least, between, chunks, count_true, equal_to, index_dtype, indices_of, kth_largest

_SAMPLE = 1 << 16
_MARGIN = 5.0  # standard deviations of the sampled rank that the bracket keeps on either side


def significance(weight: torch.Tensor, gradient: torch.Tensor, gradient_weight: float, normalize: bool) -> torch.Tensor:
    """S = \\|w\\| + c·\\|g\\| for every coordinate; with ``normalize`` each term is first divided by its RMS.

    Args:
        weight, gradient: shape (n,), floating. Neither is changed.
        gradient_weight: c, without unit when ``normalize`` is true.

    Returns:
        Shape (n,), float32 (float64 for float64 weights), never NaN: a coordinate whose significance cannot be told
        counts as most significant.
    """
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    score = torch.empty(weight.numel(), dtype=wide, device=weight.device)
    return _combine([(weight, gradient)], score, gradient_weight, normalize)


def of_arena(arena: Arena, gradient_weight: float, normalize: bool) -> torch.Tensor:
    """The significance of every coordinate from this rank's live parameters and gradients; none counts as zero.

    Returns:
        Shape (n,), the arena's value dtype.
    """
    pairs = [
        (segment.read_all(), None if grad is None else segment.flatten(grad.detach()))
        for segment in arena.segments()
        for grad in (segment.parameter.grad,)
    ]
    score = torch.empty(arena.n, dtype=arena.value_dtype, device=arena.device)
    return _combine(pairs, score, gradient_weight, normalize)


def _combine(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    score: torch.Tensor,
    gradient_weight: float,
    normalize: bool,
) -> torch.Tensor:
    """The significance of (weight, gradient) stretches one after the other, in ``score``."""
    scale = gradient_scale = 1.0
    if normalize:
        n = score.numel()
        scale = _root_mean_square([weight for weight, _ in pairs], n) or 1.0
        gradient_scale = _root_mean_square([gradient for _, gradient in pairs if gradient is not None], n) or 1.0
    begin = 0
    for weight, gradient in pairs:
        out = score[begin : begin + weight.numel()]
        sloping = gradient if gradient_weight != 0.0 else None
        if score.dtype == torch.float32 and native.serves(weight, sloping, score):
            native.score(weight, sloping, scale, gradient_scale, gradient_weight, out)
            begin += weight.numel()
            continue
        for part in chunks(weight.numel(), weight.device):
            some = out[part]
            some.copy_(weight[part]).abs_()
            if scale != 1.0:
                some.div_(scale)
            if sloping is not None:
                slope = sloping[part].to(some.device, some.dtype).abs()
                if gradient_scale != 1.0:
                    slope.div_(gradient_scale)
                some.add_(slope.mul_(gradient_weight))
            some.nan_to_num_(nan=float("inf"), posinf=float("inf"))
        begin += weight.numel()
    return score


def _root_mean_square(stretches: Sequence[torch.Tensor], n: int) -> float:
    """RMS over ``n`` values, those not in ``stretches`` being 0, in float64; 0 if all are 0 or some not finite."""
    squares = sum(
        _norm(stretch[part]) ** 2 for stretch in stretches for part in chunks(stretch.numel(), stretch.device)
    )
    if 0.0 < squares < float("inf"):
        return float(squares / n) ** 0.5
    # Squares that overflowed or vanished: relative to the largest value.
    largest = max((float(stretch.abs().max()) for stretch in stretches if stretch.numel()), default=0.0)
    if not 0.0 < largest < float("inf"):
        return 0.0
    return largest * sum(_norm(stretch / largest) ** 2 for stretch in stretches) ** 0.5 / float(n) ** 0.5


def _norm(values: torch.Tensor) -> float:
    if values.device.type == "cpu" and values.dtype == torch.float32:
        wide = values.double()  # in cache; faster than a norm that widens as it goes
        return float(torch.dot(wide, wide)) ** 0.5
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def top_coordinates(score: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` coordinates with the largest score, ties to the lower one, found by threshold and count.

    Args:
        score: shape (n,), float32 or float64, without NaN.
        count: 0 ≤ count ≤ n.

    Returns:
        Shape (count,), ascending, int32 (int64 beyond 2^31).
    """
    n = score.numel()
    if count in (0, n):
        return torch.arange(count, dtype=index_dtype(n), device=score.device)
    threshold, wanted, there = _kth_largest(score, count)
    if native.serves(score):
        return native.places(score, threshold, wanted, float("-inf"), count)
    mask = at_least(score, threshold)
    if there > wanted:
        ties = indices_of(equal_to(score, threshold))
        mask[ties[wanted:].long()] = False
    return indices_of(mask)


def top_places(score: torch.Tensor, count: int) -> torch.Tensor:
    """The same where negative scores do not count: each coordinate's place among those of the others.

    Args:
        score: shape (n,), float32 or float64, without NaN; at least ``count`` are not negative.
    """
    if count == 0 or not native.serves(score):
        return top_coordinates(score[score >= 0.0], count)
    threshold, wanted, _ = _kth_largest(score, count)
    return native.places(score, threshold, wanted, 0.0, count)


def _kth_largest(score: torch.Tensor, k: int) -> tuple[float, int, int]:
    """(the k-th largest score; how many of the scores equal to it are among the k largest; how many there are).

    A strided sample gives a bracket around it; only what lies inside is searched.
    """
    n, above = score.numel(), 0
    if n > 4 * _SAMPLE:
        sample = score[:: n // _SAMPLE].sort(descending=True).values
        expected = k / n * sample.numel()
        margin = _MARGIN * (sample.numel() * (k / n) * (1 - k / n)) ** 0.5 + 1
        first, last = int(expected - margin), int(expected + margin)
        high = float(sample[first]) if first >= 0 else float("inf")
        low = float(sample[last]) if last < sample.numel() else float("-inf")
        bracket, passed = between(score, low, high)
        if passed < k <= passed + bracket.numel():
            score, above = bracket, passed
    threshold = kth_largest(score, k - above)
    reaching, there = count_true(at_least(score, threshold)), count_true(equal_to(score, threshold))
    return threshold, k - above - (reaching - there), there
