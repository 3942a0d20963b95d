"""What an optimizer's step is proportional to: the gradient, the learning rate. Found out by trying."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from hvd_slim import launchers

log = logging.getLogger("hvd_slim")

_SCALE = 64.0
_RATE = 2.0**-10
_STEPS = 10  # RAdam begins to rescale its gradient at the sixth


def is_adaptive(optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> bool:
    """Whether ``optimizer_class`` with ``defaults`` takes steps that are not linear in the gradient.

    A parameter of its own is stepped ten times with one gradient, and another with 64 times that gradient. With SGD
    the second goes 64 times as far (averaging updates is averaging gradients); with Adam as far as the first.
    When the class cannot be tried out (it wants other arguments, say) a line says so and the answer is False.
    """
    try:
        once, more = (_ten_steps(optimizer_class, defaults, 1.0), _ten_steps(optimizer_class, defaults, _SCALE))
    except Exception as error:  # noqa: BLE001  (a stranger's constructor or step may raise anything)
        if launchers.detect().rank == 0:  # all ranks find the same
            log.warning(
                "cannot tell whether %s is adaptive (%s: %s); restore_norm is off unless you set it, and explorers are "
                "those for SGD: set both if the optimizer rescales its gradient",
                optimizer_class.__name__, type(error).__name__, error,
            )  # fmt: skip
        return False
    return not torch.allclose(more, once * _SCALE, rtol=1e-2, atol=0.0)


def follows_learning_rate(optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> bool:
    """Whether half the learning rate makes ``optimizer_class`` with ``defaults`` go half as far.

    When the class cannot be tried out, a line says so and the answer is True: nearly every optimizer does.
    """
    try:
        whole, half = (_ten_steps(optimizer_class, defaults, 1.0, rate) for rate in (_RATE, _RATE / 2))
    except Exception as error:  # noqa: BLE001  (a stranger's constructor or step may raise anything)
        if launchers.detect().rank == 0:
            log.warning(
                "cannot tell whether steps of %s are proportional to its learning rate (%s: %s); local_rate takes them "
                "for it: leave it at 1.0 if they are not", optimizer_class.__name__, type(error).__name__, error,
            )  # fmt: skip
        return True
    return torch.allclose(half * 2.0, whole, rtol=1e-2, atol=0.0)


def _ten_steps(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any], scale: float, rate: float = _RATE
) -> torch.Tensor:
    accepted = inspect.signature(optimizer_class.__init__).parameters
    settings = {name: value for name, value in defaults.items() if name in accepted}
    settings.update({name: 0.0 for name in ("weight_decay",) if name in settings})
    settings.update({name: rate for name in ("lr",) if name in accepted})
    # Zeros, so that the way is read without rounding; two dimensions for optimizers that want matrices.
    parameter = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = optimizer_class([parameter], **settings)
    step: Any = optimizer_class.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # without the hooks that a user may have put on every optimizer
    gradient = torch.tensor([[1.0, -0.5], [0.25, 2.0]], dtype=torch.float64) * scale
    for _ in range(_STEPS):
        parameter.grad = gradient.to_sparse() if optimizer_class is torch.optim.SparseAdam else gradient.clone()
        step(optimizer)
    return parameter.detach().clone()
