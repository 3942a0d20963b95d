"""How much a coordinate matters, and choosing the core: the most significant coordinates, exactly as many as asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_slim import native
from hvd_slim.arena import Arena
from hvd_slim.chunks import (
    at_least,
    between,
    chunks,
    count_true,
    equal_to,
    index_dtype,
    indices_of,
    kth_largest,
    others,
)
from hvd_slim.global_model import GlobalModel

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


def most_significant(arena: Arena, gradient_weight: float, normalize: bool, count: int) -> torch.Tensor:
    """The ``count`` most significant coordinates, by this rank's live parameters and gradients; none counts as zero.

    Returns:
        Shape (count,), ascending, int32 (int64 beyond 2^31). Ties go to the lower coordinate.
    """
    pairs = [
        (segment.read_all(), None if grad is None else segment.flatten(grad.detach()))
        for segment in arena.segments()
        for grad in (segment.parameter.grad,)
    ]
    if arena.plain and native.serves(*(gradient for _, gradient in pairs)):
        scale, gradient_scale = _scales(pairs, arena.n, normalize)
        gradients = [gradient if gradient_weight != 0.0 else None for _, gradient in pairs]
        scores = native.Scores(
            arena.memory_table(), arena.n, gradients=gradients, scale=scale, gradient_scale=gradient_scale,
            factor=gradient_weight,
        )  # fmt: skip
        return top_places(scores, count)
    score = torch.empty(arena.n, dtype=arena.value_dtype, device=arena.device)
    return top_coordinates(_combine(pairs, score, gradient_weight, normalize), count)


def largest_updates(
    model: GlobalModel, count: int, outside: torch.Tensor, sent: torch.Tensor | None = None
) -> torch.Tensor:
    """The places of the ``count`` largest |u_k|, not counting the coordinates ``outside``; NaN is largest of all.

    Args:
        outside, sent: ascending coordinates, ``index_dtype(n)``, none in both; |u_k| counts as 0 where it has just
            been ``sent``.

    Returns:
        Shape (count,), ascending: places among the other coordinates. Ties go to the lower one.
    """
    arena = model.arena
    if arena.plain and native.serves(*model.flat, outside, sent):
        table = arena.memory_table()
        return top_places(native.Scores(table, arena.n, mean=model.flat[0], outside=outside, sent=sent), count)
    magnitude = model.pending_update_everywhere(torch.empty(arena.n, dtype=arena.value_dtype, device=arena.device))
    magnitude.abs_().nan_to_num_(nan=float("inf"), posinf=float("inf"))
    if sent is not None:
        magnitude.index_fill_(0, sent.long(), 0.0)
    return top_coordinates(magnitude.index_select(0, others(outside, arena.n)), count)


def _combine(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    score: torch.Tensor,
    gradient_weight: float,
    normalize: bool,
) -> torch.Tensor:
    """The significance of (weight, gradient) stretches one after the other, in ``score``."""
    scale, gradient_scale = _scales(pairs, score.numel(), normalize)
    begin = 0
    for weight, gradient in pairs:
        out = score[begin : begin + weight.numel()]
        sloping = gradient if gradient_weight != 0.0 else None
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


def _scales(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]], n: int, normalize: bool) -> tuple[float, float]:
    """What weights and gradients are divided by."""
    if not normalize:
        return 1.0, 1.0
    weights, gradients = [weight for weight, _ in pairs], [gradient for _, gradient in pairs if gradient is not None]
    return _root_mean_square(weights, n) or 1.0, _root_mean_square(gradients, n) or 1.0


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
    bracket = _bracket(score[:: n // _SAMPLE], count / n) if n > 4 * _SAMPLE else None
    inside, above = (score, 0) if bracket is None else between(score, *bracket)
    if not above < count <= above + inside.numel():
        inside, above = score, 0
    threshold, wanted, there = _threshold(inside, count - above)
    mask = at_least(score, threshold)
    if there > wanted:
        mask[indices_of(equal_to(score, threshold))[wanted:].long()] = False
    return indices_of(mask)


def top_places(scores: native.Scores, count: int) -> torch.Tensor:
    """The same in a compiled pass, as places among the coordinates that are not outside.

    Args:
        count: at most their number.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int32)
    n, candidates, high = scores.n, None, float("inf")
    if n > 4 * _SAMPLE:
        low, high = _bracket(scores.sample(n // _SAMPLE), count / n)
        # Of scores that equal the lower bound, as where nothing was learned, more than ``count`` are never chosen.
        candidates = scores.reaching(max(low, 0.0), count, 2 * count + n // 16)
    if candidates is not None:
        inside, above = between(candidates[1], 0.0, high)
    if candidates is None or not above < count <= above + inside.numel():
        candidates = scores.reaching(0.0, count, n)
        assert candidates is not None
        inside, above = candidates[1], 0
    threshold, wanted, _ = _threshold(inside, count - above)
    return scores.places(*candidates, threshold, wanted, count)


def _bracket(sample: torch.Tensor, share: float) -> tuple[float, float]:
    """Two scores between which, all but surely, the last of the largest ``share`` of all scores lies."""
    size, ordered = sample.numel(), sample.sort(descending=True).values
    margin = _MARGIN * (size * share * (1 - share)) ** 0.5 + 1
    first, last = int(share * size - margin), int(share * size + margin)
    low = float(ordered[last]) if last < size else float("-inf")
    return low, float(ordered[first]) if first >= 0 else float("inf")


def _threshold(score: torch.Tensor, k: int) -> tuple[float, int, int]:
    """(the k-th largest score; how many of the scores equal to it are among the k largest; how many there are)."""
    threshold = kth_largest(score, k)
    reaching, there = count_true(at_least(score, threshold)), count_true(equal_to(score, threshold))
    return threshold, k - (reaching - there), there
