"""The settings: what is legal, what is refused and in which words, and exact counts."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_slim.config import EXCHANGES, EXPLORERS, SlimConfig, ceil_fraction

fractions = st.floats(min_value=0.0, max_value=1.0, exclude_min=True)


def refused(error: type[Exception], *words: str, **options: Any) -> None:
    """The options are refused, in a message of one line that has all ``words``."""
    with pytest.raises(error) as caught:
        SlimConfig(**options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


@pytest.mark.parametrize("name", ["comm_fraction", "core_fraction"])
@pytest.mark.parametrize("value", [0.0, -0.3, 1.0000001, 30, math.inf, -math.inf, math.nan, -0.0])
def test_fraction_outside_its_range(name: str, value: float) -> None:
    refused(ValueError, f"{name}={float(value)!r}", "(0, 1]", "as a fraction", **{name: value})


@pytest.mark.parametrize("value", [0.0, -0.3, 1.0000001, math.inf, math.nan])
def test_local_rate_outside_its_range(value: float) -> None:
    refused(ValueError, f"local_rate={value!r}", "(0, 1]", "hvd.size()", local_rate=value)


@pytest.mark.parametrize("name", ["comm_fraction", "core_fraction", "gradient_weight", "local_rate"])
@pytest.mark.parametrize("value", [True, False, "0.3", None, 0.3 + 0j, [0.3], Fraction(1, 3)])
def test_number_of_another_type(name: str, value: object) -> None:
    refused(TypeError, name, repr(value), type(value).__name__, "give a number", **{name: value})


def test_core_above_comm() -> None:
    refused(
        ValueError, "core_fraction=0.4", "comm_fraction=0.3", "lower", "raise", comm_fraction=0.3, core_fraction=0.4
    )
    refused(ValueError, "core_fraction=0.15", "comm_fraction=0.1", comm_fraction=0.1)


@given(fractions, fractions)
def test_every_legal_pair_of_fractions(one: float, other: float) -> None:
    config = SlimConfig(comm_fraction=max(one, other), core_fraction=min(one, other))
    assert config.comm_fraction >= config.core_fraction


@pytest.mark.parametrize(
    ("name", "least"),
    [("reselect_every", 1), ("resync_every", 0), ("local_steps", 1), ("warmup_rounds", 0), ("max_message_bytes", 64)],
)
def test_whole_numbers(name: str, least: int) -> None:
    made: dict[str, Any] = {name: least}
    assert getattr(SlimConfig(**made), name) == least
    for value in (least - 1, -20):
        refused(ValueError, f"{name}={value}", f"below {least}", f"at least {least}", **{name: value})
    for other in (True, 2.0, "20", None, math.nan):
        refused(TypeError, f"{name}={other!r}", type(other).__name__, "whole number", **{name: other})


@pytest.mark.parametrize("value", [-1.0, -1e-300, math.inf, math.nan])
def test_gradient_weight_outside_its_range(value: float) -> None:
    refused(ValueError, f"gradient_weight={value!r}", "finite", "at least 0", gradient_weight=value)


@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_normalize_is_true_or_false(value: object) -> None:
    refused(TypeError, f"normalize={value!r}", type(value).__name__, "True or False", normalize=value)


def test_seed() -> None:
    assert SlimConfig(seed=2**64 - 1).seed == 2**64 - 1
    for value in (-1, 2**64):
        refused(ValueError, f"seed={value}", "[0, 2^64)", seed=value)
    for other in (1.0, True, "1", None):
        refused(TypeError, f"seed={other!r}", type(other).__name__, "whole number", seed=other)


@pytest.mark.parametrize("name", ["explorer", "exchange", "transport", "value_dtype", "rounding", "warmup"])
@pytest.mark.parametrize("value", ["Random", "", "topk", None, 3, ["random"]])
def test_unknown_name(name: str, value: object) -> None:
    if (name, value) == ("explorer", None):
        pytest.skip("left open")
    default = getattr(SlimConfig(), name)
    refused(ValueError, f"{name}={value!r} is unknown", "choose one of", repr(default), **{name: value})


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="comm_fractoin"):
        SlimConfig(comm_fractoin=0.3)  # type: ignore[call-arg]


def test_other_refusals() -> None:
    refused(TypeError, "restore_norm='on'", "True", "False", "None", restore_norm="on")
    refused(ValueError, "max_message_bytes=2147483648", "2147483647", max_message_bytes=2**31)
    for value_dtype in ("float32", "float16", "bfloat16"):
        refused(ValueError, "stochastic", repr(value_dtype), "int8", rounding="stochastic", value_dtype=value_dtype)


@pytest.mark.parametrize("explorer", EXPLORERS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_explorer_has_its_paths(explorer: str, exchange: str) -> None:
    """One set for all ranks goes by reduction, a private one in pairs; "auto" and "dense" take any."""
    one_set = explorer in ("shared", "leader")
    if exchange in (("allgather", "alltoall") if one_set else ("allreduce",)):
        refused(ValueError, repr(explorer), "use exchange=", explorer=explorer, exchange=exchange)
    else:
        assert SlimConfig(explorer=explorer, exchange=exchange).exchange == exchange


@given(fractions, fractions, st.integers(1, 50), st.sampled_from(["dense", "linear"]))
def test_warm_up_falls_to_the_fraction(one: float, other: float, warmup_rounds: int, warmup: str) -> None:
    """Never below comm_fraction, never above everything, never rising; exactly comm_fraction when it is over."""
    config = SlimConfig(max(one, other), min(one, other), warmup_rounds=warmup_rounds, warmup=warmup)
    parts = [config.comm_fraction_at(number) for number in range(warmup_rounds + 3)]
    assert parts[0] == 1.0
    assert parts[warmup_rounds:] == [config.comm_fraction] * 3
    assert all(1.0 >= a >= b >= config.comm_fraction for a, b in zip(parts, parts[1:]))
    for n in (1, 7, 1000):
        assert config.core_count(n) + config.explorer_count(n, 0) == n
        assert 0 <= config.explorer_count(n, warmup_rounds) == config.explorer_count(n)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SlimConfig)])
def test_frozen(field: str) -> None:
    config = SlimConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, getattr(config, field))


def test_reference_setting_is_the_default() -> None:
    assert SlimConfig() == SlimConfig(comm_fraction=0.3, core_fraction=0.15, reselect_every=20)


def test_plain_values_make_the_same_settings_again() -> None:
    config = SlimConfig(comm_fraction=0.5, core_fraction=0.25, seed=7, normalize=False)
    assert SlimConfig(**config.to_dict()) == config


@given(fractions, st.integers(min_value=0, max_value=2**48))
def test_ceiling_is_exact(fraction: float, n: int) -> None:
    """⌈fraction · n⌉ in rational arithmetic, on the decimal number that the user sees."""
    count = ceil_fraction(fraction, n)
    exact = Fraction(repr(fraction)) * n
    assert exact <= count < exact + 1
    assert 0 <= count <= n


@pytest.mark.parametrize(
    ("fraction", "n", "count"),
    [(0.1, 10, 1), (0.3, 10, 3), (0.7, 10, 7), (0.15, 100, 15), (0.07, 100, 7), (1.0, 7, 7), (1, 7, 7), (1e-9, 1, 1)],
)
def test_ceiling_of_decimal_fractions(fraction: float, n: int, count: int) -> None:
    """Where floating point products lie a little above the whole number."""
    assert ceil_fraction(fraction, n) == count


@given(fractions, fractions, st.integers(min_value=1, max_value=2**40))
def test_the_two_sets_fit_the_model(one: float, other: float, n: int) -> None:
    config = SlimConfig(comm_fraction=max(one, other), core_fraction=min(one, other))
    core, explorers = config.core_count(n), config.explorer_count(n)
    assert 1 <= core <= n
    assert 0 <= explorers <= n - core
    assert core + explorers == ceil_fraction(config.comm_fraction, n)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("adaptive", [False, True])
def test_an_explorer_left_open_fits_path_and_optimizer(exchange: str, adaptive: bool) -> None:
    """Shared where only that is possible, and for adaptive optimizers where it is; the paper's otherwise."""
    setting = SlimConfig(exchange=exchange, seed=3).for_optimizer(adaptive)
    shared = exchange == "allreduce" or (adaptive and exchange == "auto")
    assert setting == SlimConfig(exchange=exchange, seed=3, explorer="shared" if shared else "random")


@pytest.mark.parametrize("explorer", EXPLORERS)
def test_a_chosen_explorer_holds_for_any_optimizer(explorer: str) -> None:
    assert SlimConfig(explorer=explorer).for_optimizer(adaptive=True).explorer == explorer
