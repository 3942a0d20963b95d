"""What has to be looked at around the wrapped optimizer's own step: sparse gradients, AMP scaling, overflow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

#: what a GradScaler sets on the optimizer around ``step()``
_AMP = ("grad_scale", "found_inf")


def make_dense(parameters: Sequence[torch.Tensor]) -> None:
    """Turn sparse gradients into dense ones, in place of the sparse."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def must_skip(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], on_nonfinite: str) -> bool | None:
    """Whether this rank wants the step left out; None if nobody asks, so that no vote is needed.

    A GradScaler asks by the attribute ``found_inf``, which it sets around ``step()`` on every rank; the setting
    ``on_nonfinite="skip"`` asks always.
    """
    found = getattr(optimizer, "found_inf", None)
    if found is not None:
        return bool(found)
    if on_nonfinite != "skip":
        return None
    return not _gradients_are_finite(parameters)


def _gradients_are_finite(parameters: Sequence[torch.Tensor]) -> bool:
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        # The sum is fast; only one that is not finite needs a second look.
        if not bool(real.sum(dtype=torch.promote_types(real.dtype, torch.float32)).isfinite()) and not bool(
            real.isfinite().all()
        ):
            return False
    return True


@contextlib.contextmanager
def unscaled(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], base: type[torch.optim.Optimizer]
) -> Iterator[None]:
    """Context for the wrapped class's step: gradients are divided by a GradScaler's scale, unless that was done.

    A wrapped class that does it itself (fused) finds what the GradScaler left for it; others refuse to see it.
    """
    natively = getattr(base, "_step_supports_amp_scaling", False) or optimizer.__dict__.get(
        "_step_supports_amp_scaling", False
    )
    left = {} if natively else {name: getattr(optimizer, name) for name in _AMP if hasattr(optimizer, name)}
    scale = left.get("grad_scale")
    if scale is not None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(scale.to(parameter.grad.device))
    for name in left:
        delattr(optimizer, name)
    try:
        yield
    finally:
        for name, value in left.items():
            setattr(optimizer, name, value)


@contextlib.contextmanager
def slowed(optimizer: torch.optim.Optimizer, local_rate: float) -> Iterator[None]:
    """Context for the wrapped class's step: every group's learning rate is ``local_rate`` times its own."""
    if local_rate == 1.0:
        yield
        return
    own = [(group, group["lr"]) for group in optimizer.param_groups]
    slow = [rate * local_rate for _, rate in own]
    for (group, _), rate in zip(own, slow):
        group["lr"] = rate
    try:
        yield
    finally:
        for (group, rate), lent in zip(own, slow):
            if group["lr"] is lent:  # else a hook has set another for the next step
                group["lr"] = rate


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of every parameter group that has one."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
