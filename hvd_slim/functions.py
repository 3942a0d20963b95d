"""Training state that one rank has and all should have.

Horovod's names and arguments, for slim, plain Horovod and bare torch optimizers alike. Tensors travel as raw bytes,
many at a time: every dtype and memory layout is right, to the bit.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch

from hvd_slim import horovod_module, noticeboard
from hvd_slim.agreement import RankMismatchError, require_equal
from hvd_slim.broadcasting import (
    broadcast_pickle,
    broadcast_tensors,
    broadcast_with_tensors,
    describe,
    patient_transport,
    pickle_or_problem,
    pickled_part,
)
from hvd_slim.buffers import average_buffers
from hvd_slim.checkpoint import shared_state
from hvd_slim.optimizer import SlimOptimizer
from hvd_slim.transport.base import Transport

__all__ = [
    "allgather_object",
    "average_buffers",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "shutdown",
]

_NO_PROBLEM = "none"


def broadcast_parameters(params: Any, root_rank: int, process_set: Any = None) -> None:
    """Copy rank ``root_rank``'s tensors into those of every other rank, in place. Collective.

    Tensors keep their memory: strides, gaps and storage stay, and whatever dtype they have (bfloat16, complex and bool
    too) they hold the root's bits afterwards.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or any other dictionary, list or iterator of
            tensors or of (name, tensor) pairs. Dictionaries are taken in the order of their keys.
        root_rank: a rank among all processes, as everywhere in Horovod.
        process_set: the ranks that take part; None for all. A rank outside returns at once.

    Raises:
        RankMismatchError: on every rank, if names, shapes or dtypes differ.
        TypeError, ValueError: something in ``params`` is not a dense tensor, or ``root_rank`` does not take part.
    """
    named = _named_tensors(params)
    transport = patient_transport("broadcast_parameters", process_set)
    if transport.size > 1:
        root = _place_of(root_rank, transport, process_set)
        require_equal(transport, [(f"tensor {name!r}", describe(tensor)) for name, tensor in named])
        broadcast_tensors(transport, [tensor for _, tensor in named], root)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None, process_set: Any = None
) -> None:
    """Give every rank the optimizer state of rank ``root_rank``: learning rates, moments, counters. Collective.

    ``step()`` is never called, no gradient or parameter is touched, and a rank's own state, or lack of it, makes no
    difference. A slim optimizer also gets the root's round, core set and global model w̄, and goes on from there: what
    the root had pending is pending on every rank once ``broadcast_parameters`` has copied its parameters; what others
    had pending is gone. With ``exchange="alltoall"`` w̄ becomes what the root last saw of it. So call
    ``optimizer.resync()``, after which nothing is pending, before one rank saves for all.

    Args:
        optimizer: slim, Horovod's own or bare.
        root_rank: a rank among all processes, as everywhere in Horovod.
        model: Horovod's argument; not needed.
        process_set: the ranks that take part; None for those that the slim optimizer trains with, else for all.
            A rank outside returns at once.

    Raises:
        RankMismatchError: on every rank, if one cannot take up the root's state, which then is another model's.
        RuntimeError: on every rank, if the root cannot give it.
        ValueError: ``root_rank`` does not take part.
    """
    if process_set is None and isinstance(optimizer, SlimOptimizer):
        process_set = optimizer._slim.process_set
    transport = patient_transport("broadcast_optimizer_state", process_set)
    if transport.size == 1:
        return
    root = _place_of(root_rank, transport, process_set)
    state = broadcast_with_tensors(transport, lambda: _state_for_all(optimizer), root)
    problem = _NO_PROBLEM
    try:
        # On the root too: loading may convert, and the next step has to begin in the same way everywhere.
        optimizer.load_state_dict(state)
    except Exception as error:  # noqa: BLE001  (whatever it is, the others have to hear of it)
        problem = f"{type(error).__name__}: {error}"
    for rank, text in enumerate(transport.gather_texts(problem)):
        if text != _NO_PROBLEM:
            raise RankMismatchError(
                f"rank {transport.rank}: rank {rank} cannot take up the optimizer state of rank {root}: {text}. Build "
                f"the same model and optimizer on every rank, then broadcast"
            )


def _state_for_all(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of this rank's optimizer, fit for every rank."""
    state = optimizer.state_dict()
    slim = state.get("hvd_slim")
    if isinstance(slim, dict) and "global_model" in slim:
        state["hvd_slim"] = shared_state(slim)
    return state


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Rank ``root_rank``'s object, pickled by it and unpickled by the others. Collective.

    Args:
        obj: anything that cloudpickle can pickle. What other ranks give is not looked at.
        root_rank: a rank among all processes, as everywhere in Horovod.
        name: of the operation, in Horovod's timeline and messages; the same on all ranks.
        process_set: the ranks that take part; None for all. A rank outside gets its own object back at once.

    Returns:
        The object itself on the root, a copy elsewhere.

    Raises:
        RuntimeError: on every rank, if the root cannot pickle it.
        ValueError: ``root_rank`` does not take part.
    """
    transport = patient_transport(name or "broadcast_object", process_set)
    if transport.size == 1:
        return obj
    root = _place_of(root_rank, transport, process_set)
    data = broadcast_pickle(transport, lambda: obj, root)
    return obj if transport.rank == root else pickle.loads(data)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Every rank's object, in rank order. Collective.

    Args:
        obj: anything that cloudpickle can pickle; its type may differ between ranks.
        name: of the operation, in Horovod's timeline and messages; the same on all ranks.
        process_set: the ranks that take part; None for all. A rank outside gets a list of its own object at once.

    Raises:
        RuntimeError: on every rank, if one cannot pickle its object.
    """
    transport = patient_transport(name or "allgather_object", process_set)
    if transport.size == 1:
        return [obj]
    message = pickle_or_problem(lambda: obj)
    # Latin-1 maps bytes to characters one to one.
    of_rank = [text.encode("latin-1") for text in transport.gather_texts(message.decode("latin-1"))]
    return [pickle.loads(data) for data in [pickled_part(transport, rank, m) for rank, m in enumerate(of_rank)]]


def shutdown() -> None:
    """Horovod's ``shutdown``, with word left for ranks that still wait in a round: they fail, and can say why."""
    noticeboard.leave()
    horovod_module.require().shutdown()


def _place_of(root_rank: int, transport: Transport, process_set: Any) -> int:
    """The root's place among the ranks that take part."""
    ranks = None if process_set is None else process_set.ranks
    members = list(ranks) if ranks else list(range(transport.size))
    if root_rank not in members:
        raise ValueError(f"root_rank={root_rank!r} is not one of the ranks that take part, {members}")
    return members.index(root_rank)


def _named_tensors(params: Any) -> list[tuple[str, torch.Tensor]]:
    entries = sorted(params.items()) if isinstance(params, dict) else params
    if isinstance(params, torch.Tensor) or not isinstance(entries, Iterable):
        raise ValueError(
            f"params is a {type(params).__name__}; give model.state_dict(), model.named_parameters() or a list of "
            f"tensors"
        )
    named = [entry if isinstance(entry, tuple) else (str(number), entry) for number, entry in enumerate(entries)]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor; send it by broadcast_object")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name!r} has layout {tensor.layout}; only dense tensors can be written in place")
    return named
