"""Training with bfloat16 parameters does not stall: w̄ as it is kept, beside two ways of keeping it that do stall.

A noisy quadratic, most of whose mean updates over ranks are smaller than what bfloat16 can tell apart. Each rank's own
step is large enough to be seen.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hvd_slim import synchronizer
from hvd_slim.arena import Arena, Coordinates
from hvd_slim.config import SlimConfig
from hvd_slim.global_model import GlobalModel
from hvd_slim.synchronizer import Synchronizer
from unit.simulated import SimulatedTransport, on_all_ranks

N, RANKS, STEPS, LR, NOISE = 120, 8, 100, 0.02, 4.0
GOAL = 36.0
PRIVATE: dict[str, Any] = {"exchange": "allgather", "comm_fraction": 0.3, "core_fraction": 0.01}


class RoundedModel(GlobalModel):
    """w̄ in the parameters' dtype and nothing beside it."""

    def __init__(self, arena: Arena, copy: bool = True) -> None:
        super().__init__(arena, copy)
        self.rest = [None for _ in self.flat]


class WideModel(GlobalModel):
    """w̄ in float32: the pending update of every rank contains what rounding takes from its live parameters."""

    def __init__(self, arena: Arena, copy: bool = True) -> None:
        super().__init__(arena, copy)
        self.flat = [flat.float() for flat in self.flat]
        self.rest = [None for _ in self.flat]

    def settle(self, where: Coordinates, unsent: torch.Tensor | None = None) -> None:
        """w_k = w̄ + unsent, rounded."""
        assert unsent is None
        for piece in where.pieces:
            live = self.flat[piece.group].index_select(0, piece.in_group)
            piece.segment.memory.scatter_(0, piece.address, live.to(piece.segment.memory.dtype))


KINDS = {"as it is": GlobalModel, "dropped": RoundedModel, "sent back": WideModel}


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


@functools.cache
def trained(kind: str, dtype: torch.dtype, config: SlimConfig) -> torch.Tensor:
    """What K ranks have learned in the end."""

    def train(transport: SimulatedTransport) -> torch.Tensor:
        weight = torch.nn.Parameter((numbers(0) + 48).to(dtype))
        optimizer = torch.optim.SGD([weight], lr=LR)
        slim = Synchronizer(config, transport, restore_norm=False)
        noise = torch.Generator().manual_seed(10 + transport.rank)
        for _ in range(STEPS):
            slim.before_step([("weight", weight)])
            slope = weight.detach().float() - GOAL - numbers(1) + NOISE * torch.randn(N, generator=noise)
            weight.grad = slope.to(dtype)
            optimizer.step()
            slim.after_step()
        slim.resync()
        return weight.detach().float()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synchronizer, "GlobalModel", KINDS[kind])
        return on_all_ranks(RANKS, train)[0]


def error(kind: str, dtype: torch.dtype, config: SlimConfig) -> float:
    """Mean square of what is left to learn; about 146 at the start."""
    return float((trained(kind, dtype, config) - GOAL - numbers(1)).square().mean())


@pytest.mark.parametrize("options", [PRIVATE, {"exchange": "dense"}], ids=["private explorers", "dense"])
def test_bfloat16_trains_like_float32(options: dict[str, Any]) -> None:
    config = SlimConfig(**options)
    assert error("as it is", torch.bfloat16, config) <= 1.6 * error("as it is", torch.float32, config)


@pytest.mark.parametrize("kind", ["dropped", "sent back"])
def test_it_stalls_if_rounding_is_dropped_or_sent_back(kind: str) -> None:
    config = SlimConfig(**PRIVATE)
    assert error(kind, torch.bfloat16, config) >= 3 * error("as it is", torch.float32, config)
