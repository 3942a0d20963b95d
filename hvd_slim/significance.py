"""How much a coordinate matters, and choosing the core: the most significant coordinates, exactly as many as asked."""

from __future__ import annotations

import torch

from hvd_slim.arena import Arena

_SAMPLE = 1 << 16
_MARGIN = 5.0  # standard deviations of the sampled rank that the bracket keeps on either side


def significance(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    gradient_weight: float,
    normalize: bool,
) -> torch.Tensor:
    """S = \\|w\\| + c·\\|g\\| for every coordinate; with ``normalize`` each term is first divided by its RMS.

    Args:
        weight, gradient: shape (n,), floating. Neither is changed.
        gradient_weight: c, without unit when ``normalize`` is true.

    Returns:
        Shape (n,), float32 (float64 for float64 weights), never NaN: a coordinate whose significance cannot be told
        counts as most significant.
    """
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return _combine(
        weight.to(wide, copy=True),
        gradient.to(wide, copy=True),
        gradient_weight,
        normalize,
    )


def of_arena(arena: Arena, gradient_weight: float, normalize: bool) -> torch.Tensor:
    """The significance of every coordinate from this rank's live parameters and gradients; none counts as zero.

    Returns:
        Shape (n,), the arena's value dtype.
    """
    weight = torch.empty(arena.n, dtype=arena.value_dtype, device=arena.device)
    gradient = torch.zeros_like(weight)
    for segment in arena.segments():
        weight[segment.start : segment.stop] = segment.read_all()
        if segment.parameter.grad is not None:
            gradient[segment.start : segment.stop] = segment.flatten(segment.parameter.grad.detach())
    return _combine(weight, gradient, gradient_weight, normalize)


def _combine(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    gradient_weight: float,
    normalize: bool,
) -> torch.Tensor:
    """The significance, in the memory of ``weight``; ``gradient`` is used up."""
    score, slope = weight.abs_(), gradient.abs_()
    factor = gradient_weight
    if normalize:
        score_scale, slope_scale = _root_mean_square(score), _root_mean_square(slope)
        if score_scale > 0.0:
            score.div_(score_scale)
        factor = gradient_weight / slope_scale if slope_scale > 0.0 else 0.0
    if factor != 0.0:
        score.add_(slope.mul_(factor))
    return score.nan_to_num_(nan=float("inf"), posinf=float("inf"))


def _root_mean_square(values: torch.Tensor) -> float:
    """RMS of values ≥ 0, taken in float64; 0 if there is none or it is not finite."""
    largest = float(values.max()) if values.numel() else 0.0
    if not 0.0 < largest < float("inf"):
        return 0.0
    if values.dtype == torch.float64:  # whose squares could overflow or vanish
        norm = largest * float(torch.linalg.vector_norm(values / largest))
    else:
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm / values.numel() ** 0.5


def top_coordinates(score: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` coordinates with the largest score, ties to the lower index, found by threshold and count.

    Args:
        score: shape (n,), float32 or float64, without NaN.
        count: 0 ≤ count ≤ n.

    Returns:
        Shape (count,), int64, ascending.
    """
    n = score.numel()
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=score.device)
    if count == n:
        return torch.arange(n, device=score.device)
    threshold = _kth_largest(score, count)
    above = score > threshold
    ties_wanted = count - int(above.sum())
    ties = (score == threshold).nonzero().squeeze(1)[:ties_wanted]
    above[ties] = True
    return above.nonzero().squeeze(1)


def _kth_largest(score: torch.Tensor, k: int) -> float:
    """The k-th largest score. A strided sample gives a bracket around it; only what lies inside is searched."""
    n = score.numel()
    if n > 4 * _SAMPLE:
        sample = score[:: n // _SAMPLE].sort(descending=True).values
        expected = k / n * sample.numel()
        margin = _MARGIN * (sample.numel() * (k / n) * (1 - k / n)) ** 0.5 + 1
        high = sample[max(0, int(expected - margin))]
        low = sample[min(sample.numel() - 1, int(expected + margin))]
        above = int((score > high).sum())
        inside = score[(score >= low) & (score <= high)]
        if above < k <= above + inside.numel():
            score, k = inside, k - above
    return float(torch.kthvalue(score, score.numel() - k + 1).values)
