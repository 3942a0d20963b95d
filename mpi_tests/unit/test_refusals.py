"""What DistributedOptimizer refuses: with a message that names value and remedy, and the optimizer as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Union

import pytest
import torch

import hvd_slim as hvd
from hvd_slim.naming import check_named_parameters, trainable_parameters
from unit.test_adaptive import Demanding, Rooted

pytestmark = pytest.mark.usefixtures("alone")
SLIM = hvd.Compression.slim()


def model() -> torch.nn.Module:
    """Two layers: four parameters of different shapes."""
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


Errors = Union[type[Exception], tuple[type[Exception], ...]]


def refused(optimizer: Any, words: Iterable[str], error: Errors = ValueError, **arguments: Any) -> None:
    """Wrapping is refused in one line that has all ``words``; neither class nor content of the optimizer changed."""
    before = dict(vars(optimizer)) if hasattr(optimizer, "__dict__") else {}
    kind = type(optimizer)
    state = copy.deepcopy(optimizer.state_dict()) if isinstance(optimizer, torch.optim.Optimizer) else None
    with pytest.raises(error) as caught:
        hvd.DistributedOptimizer(optimizer, **{"compression": SLIM, **arguments})
    message = str(caught.value)
    assert "\n" not in message
    assert "0x" not in message, "an address tells nobody anything"
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    assert type(optimizer) is kind
    if before:
        assert vars(optimizer).keys() == before.keys()
        assert all(vars(optimizer)[name] is value for name, value in before.items())
    if state is not None:
        assert optimizer.state_dict() == state


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9)


def test_other_operations_than_average() -> None:
    refused(sgd(), ["op=Adasum", "hvd.Average", "Compression.none"], op=hvd.Adasum)
    refused(sgd(), ["op=Sum", "hvd.Average"], op=hvd.Sum)
    refused(sgd(), ["op=", "hvd.Average"], op=hvd.Min)
    refused(sgd(), ["op='average'", "hvd.Average"], op="average")
    refused(sgd(), ["op=17", "hvd.Average"], op=17)


def test_a_local_rate_that_would_not_be_one() -> None:
    slower: dict[str, Any] = {"compression": hvd.Compression.slim(local_rate=0.25)}
    refused(Rooted(model().parameters(), lr=0.1), ["local_rate=0.25", "Rooted", "1.0"], **slower)
    refused(Demanding(model().parameters(), lambda step: 0.1), ["local_rate=0.25", "Demanding", "1.0"], **slower)
    half = torch.optim.SGD(model().to(torch.bfloat16).parameters(), lr=0.1)
    refused(half, ["local_rate=0.25", "bfloat16", "autocast"], **slower)
    assert isinstance(hvd.DistributedOptimizer(sgd(), **slower), torch.optim.SGD)


def test_average_is_accepted() -> None:
    assert isinstance(hvd.DistributedOptimizer(sgd(), compression=SLIM, op=hvd.Average), torch.optim.SGD)


def test_not_pairs() -> None:
    parameters = model()
    optimizer = torch.optim.SGD(parameters.parameters(), lr=0.1)
    hint = ["tuples (name, parameter)", "model.named_parameters()"]
    refused(optimizer, [*hint, "entry 0", "Parameter"], named_parameters=parameters.parameters())
    refused(optimizer, [*hint, "entry 0", "str", "'0.weight'"], named_parameters=dict(parameters.named_parameters()))
    refused(optimizer, [*hint, "entry 0", "list"], named_parameters=[["w", torch.zeros(1)]])
    refused(optimizer, [*hint, "entry 0", "tuple"], named_parameters=[(torch.zeros(1), "w")])
    refused(optimizer, [*hint, "entry 0", "tuple"], named_parameters=[("w",)])
    named = list(parameters.named_parameters())
    refused(optimizer, [*hint, "entry 2", "None"], named_parameters=[*named[:2], None])


def test_not_iterable() -> None:
    refused(sgd(), ["named_parameters", "model.named_parameters()"], (TypeError, ValueError), named_parameters=3)


def test_a_name_twice() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    named = [*first.named_parameters(), *second.named_parameters()]
    refused(optimizer, ["more than once: bias, weight", "Prefix"], named_parameters=named)


def test_a_subset() -> None:
    """CASES 18. The message lists group, place and shape of what has no name."""
    first, second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD([{"params": first.parameters()}, {"params": second.parameters()}], lr=0.1)
    places = ["group 1, parameter 0, shape (2, 4)", "group 1, parameter 1, shape (2,)"]
    refused(optimizer, ["2 of the optimizer's parameters", *places], named_parameters=first.named_parameters())
    refused(sgd(), ["4 of the optimizer's parameters", "shape (4, 3)"], named_parameters=[])


def test_a_superset_is_accepted() -> None:
    """CASES 18."""
    whole = model()
    optimizer = torch.optim.SGD(whole[1].parameters(), lr=0.1)  # type: ignore[index]
    hvd.DistributedOptimizer(optimizer, named_parameters=whole.named_parameters(), compression=SLIM)


def test_wrapped_twice() -> None:
    optimizer = hvd.DistributedOptimizer(sgd(), compression=SLIM)
    refused(optimizer, ["already", "bare torch optimizer"])


def test_lbfgs() -> None:
    """CASES 14."""
    refused(torch.optim.LBFGS(model().parameters()), ["LBFGS", "closure", "Use SGD, Adam"], (TypeError, ValueError))


def test_not_an_optimizer() -> None:
    refused(model(), ["Sequential", "torch.optim.Optimizer"], TypeError)
    refused(None, ["NoneType", "torch.optim.Optimizer"], TypeError)


@pytest.mark.parametrize("passes", [0, -1, 1.0, True, "2", None])
def test_backward_passes(passes: Any) -> None:
    refused(sgd(), [f"backward_passes_per_step={passes!r}", "at least 1"], backward_passes_per_step=passes)
    optimizer = hvd.DistributedOptimizer(sgd(), compression=SLIM, backward_passes_per_step=3)
    with pytest.raises(ValueError, match="at least 1"):
        optimizer.set_backward_passes_per_step(passes)  # type: ignore[attr-defined]


def test_options_without_meaning() -> None:
    refused(sgd(), ["gradient_predivide_factor=2.0", "leave it at 1.0"], gradient_predivide_factor=2.0)
    refused(sgd(), ["num_groups=2", "leave both out"], num_groups=2)
    refused(sgd(), ["groups=given", "leave both out"], groups=[[torch.zeros(1)]])


def test_compression_that_is_none() -> None:
    """A forgotten pair of brackets, a name, settings on their own: said at once, not at the first backward pass."""
    for value in (hvd.Compression.slim, hvd.SlimConfig, "slim", 0.3):
        refused(sgd(), ["compression=", "Compression.slim("], (TypeError, ValueError), compression=value)


# Names ---------------------------------------------------------------------------------------------------------------


def test_names_are_given_to_the_optimizers_parameters_in_its_own_order() -> None:
    whole = model()
    parameters = list(whole.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[2:]}, {"params": parameters[:2]}], lr=0.1)
    named = check_named_parameters(optimizer, whole.named_parameters())
    assert [name for name, _ in trainable_parameters(optimizer, named)] == ["1.weight", "1.bias", "0.weight", "0.bias"]


def test_without_names_parameters_are_called_after_their_place() -> None:
    """CASES 18."""
    parameters = list(model().parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)
    names = [name for name, _ in trainable_parameters(optimizer, check_named_parameters(optimizer, None))]
    assert names == ["group0.parameter0", "group0.parameter1", "group1.parameter0", "group1.parameter1"]


def test_frozen_parameters_do_not_travel_and_tied_ones_travel_once() -> None:
    """CASES 15 and 25."""
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    both = torch.nn.ModuleDict({"a": first, "b": second})
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    named = check_named_parameters(optimizer, both.named_parameters(remove_duplicate=False))
    assert [name for name, _ in trainable_parameters(optimizer, named)] == ["a.weight", "b.bias"]
