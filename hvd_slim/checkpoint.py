"""The state of a run as a checkpoint holds it: plain values and tensors, of one rank or shared by all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hvd_slim.arena import Arena, NamedParameters
from hvd_slim.config import SlimConfig
from hvd_slim.global_model import GlobalModel

_VERSION = 1
#: settings that change no number: a round in flight may go on under others
_WITHOUT_EFFECT = dict.fromkeys(("warn_after", "stall_limit", "checksum_every", "max_message_bytes", "on_nonfinite"))


def check_version(state: dict[str, Any]) -> None:
    """Raise ValueError if ``state`` is not of this version."""
    if state.get("version") != _VERSION:
        raise ValueError(
            f"hvd_slim state of version {state.get('version')!r} cannot be read; this is version {_VERSION}"
        )


def with_later_settings(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with the settings that there were not yet when it was written, at what they were then in effect."""
    return {**state, "config": {"local_rate": 1.0, **state["config"]}}


def fresh_state(config: SlimConfig) -> dict[str, Any]:
    """The state of a run that has not begun."""
    return {"version": _VERSION, "config": config.to_dict(), "steps": 0, "rounds": 0, "selections": 0}


def shared_state(state: dict[str, Any]) -> dict[str, Any]:
    """What holds for all ranks of one rank's state.

    What belongs to it alone (its slice of a spread w̄, a round in flight) is left out: each rank takes its own slice
    from w̄, and what was sent is still pending.
    """
    return {**state, "exchange": {}, "flight": None, "announced": {}, "shared": True}


@contextlib.contextmanager
def saved_global_parameters(state: dict[str, Any], trainable: NamedParameters) -> Iterator[None]:
    """Inside the context ``trainable`` hold the w̄ of a checkpoint that no step has followed yet. Not collective.

    Raises:
        RuntimeError: w̄ was spread over the ranks.
        ValueError: the checkpoint is of another model.
    """
    if state.get("path") == "alltoall" and not state.get("shared"):
        raise RuntimeError(
            "global_parameters() right after a checkpoint with exchange='alltoall' was loaded: w̄ lies spread over the "
            "ranks; call resync() or step() on every rank first"
        )
    model = GlobalModel(Arena(trainable))
    problem = misfit(state, model.arena.describe())
    if problem:
        raise ValueError(problem)
    for tensor, saved in zip(model.tensors(), state["global_model"]):
        tensor.copy_(saved)
    model.swap_with_live()
    try:
        yield
    finally:
        model.swap_with_live()


def misfit(state: dict[str, Any] | None, layout: list[tuple[str, str]]) -> str:
    """What a checkpoint has that a model of this layout has not, as text; "" for nothing."""
    if state is None or "global_model" not in state:
        return ""
    saved = [tuple(fact) for fact in state["layout"]]
    if saved == layout:
        return ""
    pairs = zip(saved, layout)
    first = next((f"{a[0]}: {a[1]} there, {b[0]}: {b[1]} here" for a, b in pairs if a != b), "the rest")
    return (
        f"the checkpoint's parameters are not this model's ({len(saved)} there, {len(layout)} here; first difference: "
        f"{first}); build the model that was saved"
    )


def gives_the_same_numbers(saved: dict[str, Any], config: SlimConfig) -> bool:
    """Whether a run with the saved settings and one with ``config`` go the same way."""
    return {**saved, **_WITHOUT_EFFECT} == {**config.to_dict(), **_WITHOUT_EFFECT}
