"""A round between its launch and its merge."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from hvd_slim.transport.base import Pending


@dataclasses.dataclass
class Flight:
    """What one rank has to remember of a round that it has launched and not yet merged.

    With ``overlap`` a local step comes in between. What was pending at the launch is then kept, so that what was
    learned since can be told from it. Without, the round is merged at once, and nothing has to be kept.

    Attributes:
        round_number: of the round.
        explored: coordinates of the explorer set E_k, ascending; empty without explorers.
        pending_core: u_k on the core (allreduce: and on E_k; dense: everywhere) at the launch; or None.
        pending_explored: u_k on E_k at the launch; or None.
        unsent: what rounding kept back of u_k on E_k; None if nothing.
        lengths: how many of E_k each rank owns (alltoall).
        brought: the explorer messages to come; None without explorers.
    """

    round_number: int
    explored: torch.Tensor
    pending_core: torch.Tensor | None = None
    pending_explored: torch.Tensor | None = None
    unsent: torch.Tensor | None = None
    lengths: list[int] = dataclasses.field(default_factory=list)
    brought: Pending[Any] | None = None

    def state(self) -> dict[str, Any]:
        """Plain values and copies of tensors, once everything has arrived. Not collective."""
        state = {field.name: _copy(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if self.brought is not None:
            state["brought"] = _copy(self.brought.arrive())
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Flight:
        """The flight again, its messages there."""
        values = {name: _copy(value, device) for name, value in state.items()}
        brought = values.pop("brought")
        return cls(**values, brought=None if brought is None else Pending(lambda: brought))


def _copy(value: Any, device: torch.device | None = None) -> Any:
    """A value of a state with tensors of its own, on another device if one is given."""
    if isinstance(value, torch.Tensor):
        return value.to(value.device if device is None else device, copy=True)
    if isinstance(value, (tuple, list)):
        return type(value)(_copy(item, device) for item in value)
    return value
