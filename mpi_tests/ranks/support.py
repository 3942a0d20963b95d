"""What the tests share: models of odd tensors, gradients from seeds, and a look at all ranks at once."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

import hvd_slim as hvd

Options = dict[str, Any]
Named = dict[str, Parameter]


# Tensors as vectors ---------------------------------------------------------------------------------------------------


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dimensions from the outermost in memory to the innermost: a view; complex as (re, im)."""
    tensor = tensor.detach()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    strides = real.stride()
    return real.permute(sorted(range(real.dim()), key=lambda d: -strides[d]))


def flatten(tensors: Iterable[torch.Tensor]) -> np.ndarray:
    """All elements, each tensor in its memory order, as float64 (exact for every real dtype)."""
    return np.concatenate([in_memory_order(tensor).reshape(-1).double().numpy() for tensor in tensors])


def fill(tensors: Iterable[torch.Tensor], values: np.ndarray) -> None:
    """The inverse of ``flatten``."""
    begin = 0
    for tensor in tensors:
        view = in_memory_order(tensor)
        view.copy_(torch.from_numpy(values[begin : begin + view.numel()]).view(view.shape))
        begin += view.numel()
    assert begin == len(values)


def set_gradients(parameters: Iterable[Parameter], values: np.ndarray) -> None:
    """Give every parameter its part of ``values`` as gradient; every other one in C order, whatever its own strides."""
    parameters = list(parameters)
    gradients = [torch.empty_like(parameter) for parameter in parameters]
    fill(gradients, values)
    for number, (parameter, gradient) in enumerate(zip(parameters, gradients)):
        parameter.grad = gradient.contiguous() if number % 2 else gradient


def random_parameters(rng: np.random.Generator, most: int) -> Named:
    """About ``most`` float32 numbers in tensors of random shape and memory layout, 0-dimensional ones included."""
    named: Named = {}
    total = 0
    while total < most or len(named) < len(_KINDS):
        sizes = (int(size) for size in rng.integers(1, max(2, math.isqrt(most // 4)), 3))
        kind = len(named) if len(named) < len(_KINDS) else int(rng.integers(len(_KINDS)))
        tensor = _KINDS[kind](*sizes)
        fill([tensor], rng.normal(0.0, rng.uniform(0.2, 1.0), tensor.numel()))
        named[f"tensor{len(named)}"] = Parameter(tensor)
        total += tensor.numel()
    return named


_KINDS: list[Callable[[int, int, int], torch.Tensor]] = [
    lambda a, b, c: torch.empty(a, b),
    lambda a, b, c: torch.empty(()),
    lambda a, b, c: torch.empty(a, b).t(),
    lambda a, b, c: torch.empty(1 + a % 4, 1 + b % 4, 3, 2).to(memory_format=torch.channels_last),
    lambda a, b, c: torch.empty(1),
    lambda a, b, c: torch.empty(a, 1 + b % 5, 1 + c % 3).permute(1, 2, 0),
    lambda a, b, c: torch.empty(a, b + 2)[:, :b],  # columns of a wider matrix: not dense in memory
    lambda a, b, c: torch.empty(c),
    lambda a, b, c: torch.empty(0, b),
]


# Training cases -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, options and gradients, all functions of one seed: every rank knows what every rank does.

    Attributes:
        most: about how many parameters.
        grid: 0, or the step of which all parameters and gradients are whole multiples: many equal significances.
    """

    name: str
    seed: int
    options: Options
    most: int = 600
    grid: float = 0.0

    def parameters(self, dtype: torch.dtype = torch.float32) -> Named:
        """The model: equal on all ranks."""
        named = random_parameters(np.random.default_rng([self.seed, 0]), self.most)
        for parameter in named.values():
            fill([parameter], self._on_grid(flatten([parameter])))
            parameter.data = parameter.data.to(dtype)
        return named

    def gradient(self, rank: int, step: int, n: int) -> np.ndarray:
        """Rank ``rank``'s gradient at ``step``: float32, shape (n,); some coordinates learn more than others."""
        scale = np.random.default_rng([self.seed, 1]).lognormal(0.0, 1.0, n)
        noise = np.random.default_rng([self.seed, 2, step]).normal(size=n)
        noise += np.random.default_rng([self.seed, 3, step, rank]).normal(size=n)
        return self._on_grid(scale * noise).astype(np.float32)

    def _on_grid(self, values: np.ndarray) -> np.ndarray:
        return np.round(values / self.grid) * self.grid if self.grid else values


def random_options(rng: np.random.Generator) -> Options:
    """Options from the whole range that a user may set."""
    comm = float(rng.choice([0.05, 0.1, 0.3, 0.55, 0.9, rng.uniform(0.01, 1.0)]))
    return {
        "comm_fraction": comm,
        "core_fraction": float(rng.choice([0.5, rng.uniform(0.1, 1.0)])) * comm,
        "reselect_every": int(rng.integers(1, 9)),
        "resync_every": int(rng.choice([0, 3, 7, 11])),
        "local_steps": int(rng.choice([1, 1, 2, 3])),
        "gradient_weight": float(rng.choice([0.0, 0.3, 3.0])),
        "normalize": bool(rng.random() < 0.7),
        "seed": int(rng.integers(2**63)) * 2 + 1,
    }


class MomentumSGD:
    """``torch.optim.SGD`` with momentum and weight decay in NumPy: the same float32 operations in the same order.

    Learning rate and decay are powers of two: their products are exact, so that it makes no difference whether a
    machine fuses them with the addition that follows.
    """

    lr, momentum, weight_decay = 2.0**-5, 0.9, 2.0**-7

    def __init__(self, ranks: int) -> None:
        self._velocity: list[np.ndarray | None] = [None] * ranks

    def step(self, rank: int, w: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """w after the step."""
        slope = gradient + np.float32(self.weight_decay) * w
        old = self._velocity[rank]
        self._velocity[rank] = velocity = slope if old is None else old * np.float32(self.momentum) + slope
        return w - np.float32(self.lr) * velocity

    @classmethod
    def torch(cls, parameters: Iterable[Parameter]) -> torch.optim.SGD:
        """The optimizer that this class imitates."""
        return torch.optim.SGD(parameters, lr=cls.lr, momentum=cls.momentum, weight_decay=cls.weight_decay)


def slim(named: Named, optimizer: torch.optim.Optimizer | None = None, process_set: Any = None, **options: Any) -> Any:
    """A slim optimizer over ``named``: the given one, or plain SGD with learning rate 1/8; allgather by default.

    On a busy machine any rank may be late: it is not warned of soon, so that a test sees the warnings that it causes.
    """
    return hvd.DistributedOptimizer(
        torch.optim.SGD(named.values(), lr=0.125) if optimizer is None else optimizer,
        named_parameters=named.items(),
        compression=hvd.Compression.slim(**{"exchange": "allgather", "warn_after": 60.0, **options}),
        process_set=process_set,
    )


# Ranks that wait for each other without a collective -----------------------------------------------------------------


class Signs:
    """Files by which ranks, all on one machine, tell each other how far they are. Collective to make.

    Args:
        folder: this rank's own; rank 0's is used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(hvd.broadcast_object(str(folder), root_rank=0, name="signs"))

    def give(self, what: str) -> None:
        """This rank's sign, once or again."""
        (self._folder / f"{what}.{hvd.rank()}").touch()

    def wait_for_others(self, what: str) -> None:
        """Until all other ranks have given theirs; for ever if one does not."""
        for rank in range(hvd.size()):
            while rank != hvd.rank() and not (self._folder / f"{what}.{rank}").exists():
                time.sleep(0.01)


# A look at the ranks and inside --------------------------------------------------------------------------------------


def gather(values: np.ndarray) -> np.ndarray:
    """Every rank's vector of equal length, float64, shape (K, n). Collective."""
    return hvd.allgather(torch.from_numpy(np.asarray(values, dtype=np.float64)).view(1, -1), name="gather").numpy()


def identical_on_all_ranks(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors hold the same bytes on every rank; the answer is the same on all. Collective."""
    data = b"".join(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    rows = hvd.allgather(torch.frombuffer(bytearray(data or b"none"), dtype=torch.uint8).view(1, -1), name="compare")
    return bool((rows == rows[0]).all())


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Their values now, contiguous."""
    return [tensor.detach().clone().contiguous() for tensor in tensors]


def global_model(optimizer: Any, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """w̄ as copies shaped like the parameters."""
    with optimizer.global_parameters():
        return copies(parameters)


def global_vector(optimizer: Any, parameters: Iterable[torch.Tensor]) -> np.ndarray:
    """w̄ as ``flatten`` orders it."""
    with optimizer.global_parameters():
        return flatten(parameters)


def core_of(optimizer: Any) -> np.ndarray:
    """The core set in use, ascending."""
    exchange = optimizer._slim.synchronizer()._exchange
    if not hasattr(exchange, "core"):
        return np.arange(0)
    groups = exchange.arena.groups
    return np.concatenate([piece.in_group.numpy() + groups[piece.group].start for piece in exchange.core.pieces])


def explored_by(optimizer: Any, round_number: int, rank: int) -> np.ndarray:
    """The explorer set that ``rank`` sends in a round under the core set in use, ascending."""
    exchange = optimizer._slim.synchronizer()._exchange
    return exchange.coordinates_at(exchange.explorer.draw(round_number, rank).positions).numpy()
