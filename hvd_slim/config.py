"""What a user sets: one validated, immutable object, compared across ranks at the first step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

EXPLORERS = ("random",)
EXCHANGES = ("allgather", "dense")


@dataclasses.dataclass(frozen=True)
class SlimConfig:
    """How much of the model travels each round, and which part (Slim-DP, arXiv 1709.09393).

    The defaults are the reference setting. Fractions are of ``n``, the number of trainable parameters.

    Args:
        comm_fraction: part of the model that each rank sends a round (α), in (0, 1].
            Smaller sends fewer bytes; parameters outside the core wait longer for their turn.
        core_fraction: part of the model in the core set (β), in (0, comm_fraction]. The rest of
            ``comm_fraction`` goes to the explorer set. Equal to ``comm_fraction``: no explorers.
        reselect_every: rounds between two choices of the core set (q), at least 1.
            Smaller follows the training more closely and costs more time and broadcasts.
        resync_every: rounds between two dense exchanges that make all replicas equal; 0 means never.
        local_steps: optimizer steps between two rounds (p), at least 1.
        gradient_weight: weight c of the gradient in the significance \\|w\\| + c·\\|g\\|, at least 0.
        normalize: divide \\|w\\| and \\|g\\| by their root mean square first, so that
            ``gradient_weight`` has no unit. ``False`` adds the raw values.
        explorer: which coordinates outside the core travel. ``"random"``: a stratified uniform draw.
        exchange: how a round moves. ``"allgather"``: core by allreduce, explorers by allgather of
            offset-value pairs. ``"dense"``: every parameter by allreduce (standard data parallelism
            on parameter updates).
        seed: seed of the add-on's own generator, in [0, 2^64). The same on all ranks.

    Raises:
        ValueError, TypeError: a value is outside its range; the message names value and remedy.
    """

    comm_fraction: float = 0.3
    core_fraction: float = 0.15
    reselect_every: int = 20
    resync_every: int = 0
    local_steps: int = 1
    gradient_weight: float = 1.0
    normalize: bool = True
    explorer: str = "random"
    exchange: str = "allgather"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("comm_fraction", "core_fraction"):
            value = _real(name, getattr(self, name))
            if not 0.0 < value <= 1.0:
                raise ValueError(
                    f"{name}={value!r} is outside (0, 1]; give the part of the model as a fraction, 0.3 for 30 %"
                )
        if self.core_fraction > self.comm_fraction:
            raise ValueError(
                f"core_fraction={self.core_fraction!r} is above comm_fraction={self.comm_fraction!r}: the core is "
                f"part of what is sent; lower core_fraction or raise comm_fraction"
            )
        for name, least in (("reselect_every", 1), ("resync_every", 0), ("local_steps", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a whole number")
            if value < least:
                raise ValueError(f"{name}={value!r} is below {least}; give a whole number of at least {least}")
        weight = _real("gradient_weight", self.gradient_weight)
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ValueError(f"gradient_weight={weight!r} is not a finite number of at least 0")
        if not isinstance(self.normalize, bool):
            raise TypeError(f"normalize={self.normalize!r} is a {type(self.normalize).__name__}; give True or False")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed={self.seed!r} is a {type(self.seed).__name__}; give a whole number")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed!r} is outside [0, 2^64)")
        _one_of("explorer", self.explorer, EXPLORERS)
        _one_of("exchange", self.exchange, EXCHANGES)

    def core_count(self, n: int) -> int:
        """Size of the core set for ``n`` parameters: ⌈βn⌉."""
        return ceil_fraction(self.core_fraction, n)

    def explorer_count(self, n: int) -> int:
        """Size of one rank's explorer set for ``n`` parameters: ⌈αn⌉ − ⌈βn⌉."""
        return ceil_fraction(self.comm_fraction, n) - self.core_count(n)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for checkpoints, logs and comparison across ranks."""
        return dataclasses.asdict(self)


def ceil_fraction(fraction: float, n: int) -> int:
    """⌈fraction · n⌉, computed exactly on the fraction as the user wrote it (0.1 · 10 is 1, not 2)."""
    from fractions import Fraction

    return min(n, math.ceil(Fraction(repr(float(fraction))) * n))


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a number")
    return float(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, allowed))}")
