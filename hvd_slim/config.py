"""What a user sets: one validated, immutable object, compared across ranks at the first step."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

from hvd_slim.values import ROUNDINGS, VALUE_DTYPES

EXPLORERS = ("random", "cyclic", "shared", "greedy", "leader")
#: explorers that choose one set for all ranks; the others choose one for each rank
SHARED_EXPLORERS = ("shared", "leader")
EXCHANGES = ("auto", "allgather", "alltoall", "allreduce", "dense")
TRANSPORTS = ("horovod", "mpi")
WARMUPS = ("dense", "linear")
ON_NONFINITE = ("raise", "skip", "ignore")
#: bytes that one collective may carry, summed over ranks: MPI counts are 32-bit integers
MESSAGE_LIMIT = 2**31 - 1
_LEAST = {
    "reselect_every": 1, "resync_every": 0, "local_steps": 1, "warmup_rounds": 0, "checksum_every": 0,
    "max_message_bytes": 64,
}  # fmt: skip


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
        local_rate: part of the learning rate with which a rank steps by itself (λ), in (0, 1]; merged changes are
            divided by it, so that the global model learns at the optimizer's own rate. Below 1 a rank computes its
            gradients nearer to the global model, at w̄ + λ·(what it has learned and not sent); with everything sent it
            changes nothing but rounding. 1/K was more accurate on one of two networks with SGD and ``"leader"``, and
            less with ``"random"`` and with AdamW (examples/results). Not for 16-bit parameters: small
            steps are lost.
        overlap: merge a round one step after its launch, so that it travels while the next step is computed. Nothing
            is lost or counted twice; what others have learned arrives a step later.
        gradient_weight: weight c of the gradient in the significance \\|w\\| + c·\\|g\\|, at least 0.
        normalize: divide \\|w\\| and \\|g\\| by their root mean square first, so that
            ``gradient_weight`` has no unit. ``False`` adds the raw values.
        explorer: which coordinates outside the core travel. None: ``"shared"`` for adaptive optimizers and with
            ``exchange="allreduce"``, else ``"random"``.
            ``"random"``: a stratified uniform draw, each rank its own (the paper's).
            ``"cyclic"``: each rank walks through every stratum; no index travels.
            ``"greedy"``: where the rank's own pending update is largest.
            ``"shared"``: one random draw for all ranks; no index travels.
            ``"leader"``: the greedy set of one rank, in turn, for all.
        exchange: how a round moves.
            ``"auto"``: the cheapest by prediction, ``"dense"`` when slim would not be faster.
            ``"allgather"``: pairs to everybody; for few ranks and a private explorer.
            ``"alltoall"``: pairs to owners and back; for many ranks and a private explorer.
            ``"allreduce"``: one packed reduction; for ``shared`` and ``leader``.
            ``"dense"``: every parameter (standard data parallelism on parameter updates); the fractions and the
            explorer have no say then.
        transport: who carries the bytes: ``"horovod"``, or ``"mpi"`` for mpi4py.
        value_dtype: width of core and explorer values on the wire: ``"float32"`` (full width: float64 if the model
            has it), ``"float16"``, ``"bfloat16"``, ``"int8"`` or ``"int4"`` (block-scaled). What rounding takes away
            stays in the pending update. A resync is always at full width.
        rounding: ``"nearest"``, or ``"stochastic"`` for int8 and int4.
        restore_norm: scale merged changes by γ, so that an adaptive optimizer steps as far as in dense training.
            None: on for adaptive optimizers, off for others.
        on_nonfinite: what to do about a NaN or an infinity on any rank, the same on all ranks.
            ``"raise"``: parameters are looked through after the local step; ``NonFiniteError`` on every rank before
            anything of that round is merged, so that the global model stays as it was.
            ``"skip"``: gradients are looked through before the local step, and all ranks skip it together (costs a
            vote each step). ``"ignore"``: nothing is looked at.
        checksum_every: rounds between two comparisons of w̄ across ranks, which must be equal to the bit; 0 for never.
        warn_after: seconds that a rank waits for others before it logs who is late.
        stall_limit: seconds that a rank waits for others before it raises ``StalledError``.
        warmup_rounds: rounds at the beginning that send more; 0 for none.
        warmup: ``"dense"``: they send everything. ``"linear"``: the part that is sent falls from everything to
            ``comm_fraction``.
        max_message_bytes: bytes that one collective may carry, summed over ranks; larger ones are cut.
        seed: seed of the add-on's own generator, in [0, 2^64). The same on all ranks.

    Raises:
        ValueError, TypeError: a value is outside its range; the message names value and remedy.
    """

    comm_fraction: float = 0.3
    core_fraction: float = 0.15
    reselect_every: int = 20
    resync_every: int = 0
    local_steps: int = 1
    local_rate: float = 1.0
    overlap: bool = False
    gradient_weight: float = 1.0
    normalize: bool = True
    explorer: str = None  # type: ignore[assignment]  # a name as soon as it is made
    exchange: str = "auto"
    transport: str = "horovod"
    value_dtype: str = "float32"
    rounding: str = "nearest"
    restore_norm: bool | None = None
    on_nonfinite: str = "raise"
    checksum_every: int = 1000
    warn_after: float = 10.0
    stall_limit: float = 300.0
    warmup_rounds: int = 0
    warmup: str = "dense"
    max_message_bytes: int = MESSAGE_LIMIT
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "_open", self.explorer is None and self.exchange == "auto")
        if self.explorer is None:
            object.__setattr__(self, "explorer", "shared" if self.exchange == "allreduce" else "random")
        for name in ("comm_fraction", "core_fraction"):
            value = _real(name, getattr(self, name))
            object.__setattr__(self, name, value)  # 1 is 1.0 on another rank
            if not 0.0 < value <= 1.0:
                raise ValueError(
                    f"{name}={value!r} is outside (0, 1]; give the part of the model as a fraction, 0.3 for 30 %"
                )
        if self.core_fraction > self.comm_fraction:
            raise ValueError(
                f"core_fraction={self.core_fraction!r} is above comm_fraction={self.comm_fraction!r}: the core is "
                f"part of what is sent; lower core_fraction or raise comm_fraction"
            )
        rate = _real("local_rate", self.local_rate)
        object.__setattr__(self, "local_rate", rate)
        if not 0.0 < rate <= 1.0:
            raise ValueError(
                f"local_rate={rate!r} is outside (0, 1]; 1 steps with the whole learning rate, "
                f"1 / hvd.size() makes merged changes sums of what was sent"
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a whole number")
            if value < least:
                raise ValueError(f"{name}={value!r} is below {least}; give a whole number of at least {least}")
        weight = _real("gradient_weight", self.gradient_weight)
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ValueError(f"gradient_weight={weight!r} is not a finite number of at least 0")
        for name in ("normalize", "overlap"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give True or False")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed={self.seed!r} is a {type(self.seed).__name__}; give a whole number")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed!r} is outside [0, 2^64)")
        _one_of("explorer", self.explorer, EXPLORERS)
        _one_of("exchange", self.exchange, EXCHANGES)
        _one_of("transport", self.transport, TRANSPORTS)
        _one_of("value_dtype", self.value_dtype, VALUE_DTYPES)
        _one_of("rounding", self.rounding, ROUNDINGS)
        for name in ("warn_after", "stall_limit"):
            seconds = _real(name, getattr(self, name))
            if not seconds > 0.0:
                raise ValueError(f"{name}={seconds!r} is not a number of seconds above 0")
        _one_of("on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        _one_of("warmup", self.warmup, WARMUPS)
        if not (self.restore_norm is None or isinstance(self.restore_norm, bool)):
            raise TypeError(f"restore_norm={self.restore_norm!r} is neither True, False nor None")
        if self.max_message_bytes > MESSAGE_LIMIT:
            raise ValueError(f"max_message_bytes={self.max_message_bytes!r} is above {MESSAGE_LIMIT}, MPI's own limit")
        if self.rounding == "stochastic" and self.value_dtype not in ("int8", "int4"):
            raise ValueError(
                f"rounding='stochastic' is for value_dtype 'int8' and 'int4', not {self.value_dtype!r}; leave it at "
                f"'nearest'"
            )
        self._check_path()

    def _check_path(self) -> None:
        """Refuse an explorer on a path that makes no sense for it."""
        shared = self.explorer in SHARED_EXPLORERS
        if shared and self.exchange in ("allgather", "alltoall"):
            raise ValueError(
                f"explorer={self.explorer!r} chooses one set for all ranks, so exchange={self.exchange!r} would send "
                f"the same pairs K times; use exchange='allreduce' or 'auto'"
            )
        if not shared and self.exchange == "allreduce":
            raise ValueError(
                f"explorer={self.explorer!r} chooses a set of its own on every rank, whose values cannot be summed "
                f"place by place; use exchange='allgather', 'alltoall' or 'auto', or explorer='shared' or 'leader'"
            )

    def for_optimizer(self, adaptive: bool) -> SlimConfig:
        """The settings for an optimizer that is adaptive or not: what was left open is decided.

        An adaptive optimizer follows dense training more closely where all ranks send the same coordinates
        (examples/results: the small GPT).
        """
        return dataclasses.replace(self, explorer="shared") if adaptive and self.leaves_explorer_open else self

    @property
    def leaves_explorer_open(self) -> bool:
        """Whether the explorer depends on the optimizer."""
        return bool(getattr(self, "_open", False))

    def comm_fraction_at(self, round_number: int) -> float:
        """The part of the model that is sent in ``round_number``; above ``comm_fraction`` during a warm-up."""
        if round_number >= self.warmup_rounds:
            return self.comm_fraction
        if self.warmup == "dense":
            return 1.0
        return 1.0 - (1.0 - self.comm_fraction) * round_number / self.warmup_rounds

    def core_count(self, n: int) -> int:
        """Size of the core set for ``n`` parameters: ⌈βn⌉."""
        return ceil_fraction(self.core_fraction, n)

    def explorer_count(self, n: int, round_number: int | None = None) -> int:
        """Size of one rank's explorer set for ``n`` parameters: ⌈αn⌉ − ⌈βn⌉; in a round of the warm-up, its own."""
        fraction = self.comm_fraction if round_number is None else self.comm_fraction_at(round_number)
        return ceil_fraction(fraction, n) - self.core_count(n)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for checkpoints, logs and comparison across ranks."""
        return dataclasses.asdict(self)


def ceil_fraction(fraction: float, n: int) -> int:
    """⌈fraction · n⌉, computed exactly on the fraction as the user wrote it (0.1 · 10 is 1, not 2)."""
    return min(n, math.ceil(Fraction(repr(float(fraction))) * n))


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a number")
    return float(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, allowed))}")
