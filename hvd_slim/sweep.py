"""Several steps on sets of coordinates of w̄ and w_k, in one pass over memory where the library of native.c serves.

Sets of a few per cent touch most of a model's cache lines, so that each step of a round would read and write most of
the model's memory again. A sweep takes all of them on a few thousand coordinates, then on the next few thousand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hvd_slim import native
from hvd_slim.arena import Coordinates

if TYPE_CHECKING:
    from hvd_slim.global_model import GlobalModel


@contextlib.contextmanager
def sweep(model: GlobalModel) -> Iterator[Sweep]:
    """A ``Sweep`` over ``model``; at the end of the context every step is taken."""
    steps = _OnePass(model) if model.compiled else Sweep(model)
    yield steps
    steps.flush()


class Sweep:
    """Each step at once, as the model's own methods take it."""

    def __init__(self, model: GlobalModel) -> None:
        self._model = model

    def pending_update(
        self, where: Coordinates, out: torch.Tensor, at_launch: torch.Tensor | None = None,
        unsent: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """out = u_k at ``where``, less what it was at a round's launch, and with what rounding kept back.

        Args:
            out, at_launch, unsent: shape (count,), value dtype. ``unsent`` only with ``at_launch``.
        """
        self._model.pending_update(where, out)
        if at_launch is not None:
            out.sub_(at_launch)
            if unsent is not None:
                out.add_(unsent)
        return out

    def merge(self, where: Coordinates, change: torch.Tensor, left: torch.Tensor | None) -> None:
        """w̄ += change; w_k = w̄ + left, None for nothing left."""
        self.absorb(where, change)
        self.settle(where, left)

    def absorb(self, where: Coordinates, change: torch.Tensor) -> None:
        """w̄ += change."""
        self._model.absorb(where, change)

    def replace(self, where: Coordinates, values: torch.Tensor) -> None:
        """w̄ = values."""
        self._model.replace(where, values)

    def settle(self, where: Coordinates, left: torch.Tensor | None) -> None:
        """w_k = w̄ + left, None for nothing left."""
        self._model.settle(where, left)

    def advance(self, where: Coordinates, change: torch.Tensor) -> None:
        """w̄ += change, and w_k with it."""
        self._model.advance(where, change)

    def flush(self) -> None:
        """Take the steps given so far."""


class _OnePass(Sweep):
    """Steps are noted, and taken together. Tensors given to a step are read, and filled, when it is taken."""

    def __init__(self, model: GlobalModel) -> None:
        super().__init__(model)
        self._steps: list[native.Step] = []
        self._alive: list[torch.Tensor | None] = []

    def _note(
        self, kind: int, where: Coordinates, *, out: torch.Tensor | None = None, change: torch.Tensor | None = None,
        left: torch.Tensor | None = None, unsent: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        tensors = [where.numbers] + [
            t if t is None else t.to(torch.float32).contiguous() for t in (out, change, left, unsent)
        ]
        self._alive += tensors
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._steps.append(native.Step(kind, where.count, 0, *addresses))

    def pending_update(
        self, where: Coordinates, out: torch.Tensor, at_launch: torch.Tensor | None = None,
        unsent: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert out.is_contiguous()
        self._note(native.PENDING, where, out=out, left=at_launch, unsent=unsent)
        return out

    def merge(self, where: Coordinates, change: torch.Tensor, left: torch.Tensor | None) -> None:
        self._note(native.MERGE, where, change=change, left=left)

    def absorb(self, where: Coordinates, change: torch.Tensor) -> None:
        self._note(native.ABSORB, where, change=change)

    def replace(self, where: Coordinates, values: torch.Tensor) -> None:
        self._note(native.REPLACE, where, change=values)

    def settle(self, where: Coordinates, left: torch.Tensor | None) -> None:
        self._note(native.SETTLE, where, left=left)

    def advance(self, where: Coordinates, change: torch.Tensor) -> None:
        self._note(native.ADVANCE, where, change=change)

    def flush(self) -> None:
        if self._steps:
            native.sweep(self._model.arena.memory_table(), self._model.flat[0], self._steps)
        self._steps, self._alive = [], []
