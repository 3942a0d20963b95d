"""Names for parameters, as Horovod users give them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

NamedParameters = list[tuple[str, torch.Tensor]]


def check_named_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> NamedParameters:
    """The given pairs, checked against the optimizer's parameters; empty if none were given.

    A superset of the optimizer's parameters is fine.

    Raises:
        ValueError: not pairs, a name twice, or a parameter of the optimizer without a name; the message lists them.
    """
    if named_parameters is None:
        return []
    try:
        named = list(named_parameters)
    except TypeError:
        raise ValueError(
            f"named_parameters={named_parameters!r} is a {type(named_parameters).__name__}; give (name, parameter) "
            f"pairs, usually model.named_parameters()"
        ) from None
    for number, pair in enumerate(named):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
                and isinstance(pair[1], torch.Tensor)):  # fmt: skip
            raise ValueError(
                f"named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                f"model.named_parameters(); entry {number} is a {type(pair).__name__}: {_short(pair)}"
            )
    twice = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if twice:
        raise ValueError(
            f"parameter names in named_parameters must be unique; found more than once: {', '.join(twice)}. "
            f"Prefix the names of each model when several share one optimizer."
        )
    known = {id(parameter) for _, parameter in named}
    missing = [
        f"group {g}, parameter {i}, shape {tuple(parameter.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]
    if missing:
        raise ValueError(
            f"named_parameters was specified, but {len(missing)} of the optimizer's parameters have no name in it: "
            f"{'; '.join(missing)}. Pass the named_parameters() of every model that the optimizer trains."
        )
    return named


def trainable_parameters(optimizer: torch.optim.Optimizer, named: NamedParameters) -> NamedParameters:
    """The optimizer's parameters that require a gradient, each once, in its own order, with their names.

    Parameters without a given name are called after their place, ``group0.parameter3``.
    """
    names = {id(parameter): name for name, parameter in reversed(named)}
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if parameter.requires_grad and id(parameter) not in found:
                found[id(parameter)] = (names.get(id(parameter), f"group{g}.parameter{i}"), parameter)
    return list(found.values())


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
