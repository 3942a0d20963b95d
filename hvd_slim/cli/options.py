"""What users write on the command line: quantities with units, models, settings."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from hvd_slim.cli.errors import UsageError
from hvd_slim.config import EXPLORERS, SHARED_EXPLORERS, SlimConfig
from hvd_slim.values import VALUE_DTYPES

_MULTIPLES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"([0-9][0-9_,]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults and keeps the examples' lines."""


# Quantities ----------------------------------------------------------------------------------------------------------


def bandwidth(text: str) -> float:
    """Bytes a second, of "10gbit", "1.25 GB/s", "800Mbit/s". A unit is required: bits and bytes are mixed up easily."""
    found = re.fullmatch(rf"{_NUMBER} *([kmgt]?)(bit|b)(?:/s|ps)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth; write 10gbit (bits) or 1.25GB (bytes) a second")
    bits = found[3].lower() == "bit" or found[3] == "b"
    return _positive(text, _number(found[1]) * _MULTIPLES[found[2].lower()] / (8 if bits else 1))


def seconds(text: str) -> float:
    """Seconds, of "0.2", "200ms", "50us"."""
    found = re.fullmatch(rf"{_NUMBER} *(s|ms|us|µs|ns|)", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 0.2 (seconds), 200ms or 50us")
    return _number(found[1]) * _SECONDS[found[2].lower()]


def whole(least: int) -> Callable[[str], int]:
    """A whole number of at least ``least``; "25.6M" and "1e6" are fine."""

    def parse(text: str) -> int:
        number = _count(text)
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return parse


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _positive(text: str, value: float) -> float:
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _count(text: str) -> int | None:
    found = re.fullmatch(rf"{_NUMBER} *([kmgtb]?)", text.strip(), re.IGNORECASE)
    if found is None:
        return None
    value = _number(found[1]) * {**_MULTIPLES, "b": 1e9}[found[2].lower()]
    return int(value) if value == int(value) else None


# Models --------------------------------------------------------------------------------------------------------------

MODEL_HELP = "number of trainable parameters (25.6M), or module:function that builds the model, without arguments"
Named = list[tuple[str, torch.nn.Parameter]]


def parameters_of(text: str) -> Named | int:
    """The trainable parameters of what the user named: a count, or the model that ``module:function`` builds.

    Raises:
        UsageError: neither; or the module, the function or the model is not what it should be.
    """
    count = _count(text)
    if count is not None:
        if count < 1:
            raise UsageError(f"{text!r}: a model has at least one parameter")
        return count
    module_name, colon, function_name = text.partition(":")
    if not (colon and module_name and function_name):
        raise UsageError(f"{text!r} is neither a number of parameters (25.6M) nor module:function that builds a model")
    sys.path.insert(0, os.getcwd())
    try:
        build: Any = importlib.import_module(module_name)
        for name in function_name.split("."):
            build = getattr(build, name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{text!r} cannot be imported from {os.getcwd()}: {error}") from error
    except Exception as error:
        raise UsageError(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    return _built(text, build)


def _built(text: str, build: Any) -> Named:
    if not callable(build):
        raise UsageError(f"{text!r} is a {type(build).__name__}; name a function or class that builds a torch module")
    try:
        model = build()
    except Exception as error:
        raise UsageError(f"{text}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{text}() returned a {type(model).__name__}; it must return a torch.nn.Module")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise UsageError(f"the model of {text}() has no trainable parameters")
    return named


def size_and_dtype(parameters: Named | int) -> tuple[int, torch.dtype]:
    """(number of trainable parameters, the dtype that most of them have)."""
    if isinstance(parameters, int):
        return parameters, torch.float32
    of_dtype: dict[torch.dtype, int] = {}
    for _, parameter in parameters:
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        of_dtype[real.dtype] = of_dtype.get(real.dtype, 0) + real.numel()
    return sum(of_dtype.values()), max(of_dtype, key=lambda dtype: of_dtype[dtype])


# Settings ------------------------------------------------------------------------------------------------------------


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Options for the settings to compare: every combination of what they list."""
    group = parser.add_argument_group("settings to compare: every combination of the values given")
    group.add_argument(
        "--fractions", type=_fractions, nargs="+", default=[(0.3, 0.15)], metavar="COMM:CORE",
        help="comm_fraction and core_fraction, 0.3:0.15 for instance",
    )  # fmt: skip
    group.add_argument("--explorer", choices=EXPLORERS, nargs="+", default=list(EXPLORERS))
    group.add_argument("--value-dtype", choices=VALUE_DTYPES, nargs="+", default=["float32"], help="width on the wire")
    group.add_argument("--reselect-every", type=whole(1), default=SlimConfig.reselect_every, help="rounds")


def _fractions(text: str) -> tuple[float, float]:
    comm, colon, core = text.partition(":")
    try:
        pair = float(comm), float(core)
        SlimConfig(comm_fraction=pair[0], core_fraction=pair[1])
    except ValueError as error:
        why = f": {error}" if colon and "could not convert" not in str(error) else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not COMM:CORE, 0.3:0.15 for instance{why}") from None
    return pair


def settings(args: argparse.Namespace) -> list[SlimConfig]:
    """The settings that the options say, one for each path; dense, which comes once, is not among them."""
    configs = []
    for (comm, core), explorer, value_dtype in itertools.product(args.fractions, args.explorer, args.value_dtype):
        for path in ("allreduce",) if explorer in SHARED_EXPLORERS else ("allgather", "alltoall"):
            configs.append(
                SlimConfig(
                    comm_fraction=comm,
                    core_fraction=core,
                    explorer=explorer,
                    value_dtype=value_dtype,
                    exchange=path,
                    reselect_every=args.reselect_every,
                )  # fmt: skip
            )
    return configs


def described(config: SlimConfig) -> tuple[str, str, str, str]:
    """(path, explorer, fractions, width) of a setting, as text for a table's row."""
    if config.exchange == "dense":
        return "dense", "-", "1", config.value_dtype
    return (
        config.exchange, config.explorer, f"{config.comm_fraction:g}:{config.core_fraction:g}", config.value_dtype
    )  # fmt: skip
