"""From one rank to all: tensors as raw bytes, many in one message, and objects."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_slim import horovod_module
from hvd_slim.config import MESSAGE_LIMIT
from hvd_slim.stats import Stats
from hvd_slim.transport.base import Transport
from hvd_slim.transport.horovod import HorovodTransport

#: under which bytes are counted
PHASE = "start"
#: bytes of tensors that are packed into one message; a larger tensor has a message of its own
_MESSAGE_BYTES = 2**26
_WARN_AFTER = 60.0  # seconds
#: every dtype's size divides it
_ALIGNMENT = 16
#: how a message begins: with what was asked for, or with what went wrong
_FINE, _PROBLEM = b"+", b"-"


def patient_transport(what: str, process_set: Any) -> Transport:
    """Horovod's operations, named after ``what``, without a stall limit: a rank may be reading a large checkpoint."""
    horovod_module.require()
    return HorovodTransport(f"hvd_slim.{what}", process_set, Stats(), MESSAGE_LIMIT, _WARN_AFTER, math.inf)


# Tensors --------------------------------------------------------------------------------------------------------------


def broadcast_tensors(transport: Transport, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Copy the values of rank ``root``'s tensors into every other rank's. Collective.

    Args:
        transport: between the ranks that take part.
        tensors: dense; in shape and dtype equal on all ranks. Strides may differ: values go by index.
        root: its place among the ranks that take part.
    """
    for message in _messages(tensors):
        last, begin = message[-1]
        packed = torch.empty(begin + last.nbytes, dtype=torch.uint8, device=last.device)
        views = [packed[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for tensor, at in message]
        if transport.rank == root:
            for (tensor, _), view in zip(message, views):
                view.copy_(tensor.detach())
        transport.broadcast(packed, root, PHASE).wait()
        if transport.rank != root:
            for (tensor, _), view in zip(message, views):
                write(tensor, view)


def _messages(tensors: Sequence[torch.Tensor]) -> list[list[tuple[torch.Tensor, int]]]:
    """The tensors that travel together, each with the byte at which it begins: one kind of device a message."""
    by_device: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device.type, []).append(tensor)
    messages: list[list[tuple[torch.Tensor, int]]] = []
    for of_device in by_device.values():
        begin = _MESSAGE_BYTES
        for tensor in of_device:
            if begin + tensor.nbytes > _MESSAGE_BYTES:
                messages.append([])
                begin = 0
            messages[-1].append((tensor, begin))
            begin += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return messages


def describe(tensor: torch.Tensor) -> str:
    """What must be equal on all ranks, in one line."""
    return f"shape {tuple(tensor.shape)}, dtype {str(tensor.dtype).removeprefix('torch.')}"


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values``, of the same shape, into ``tensor`` where it lies; it may be an expanded tensor."""
    target = tensor.detach()
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 1:  # several elements share one address
            target, values = target.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    target.copy_(values)


# Objects --------------------------------------------------------------------------------------------------------------


def pickle_or_problem(make: Callable[[], Any], dump: Callable[[Any], bytes] | None = None) -> bytes:
    """What ``make`` returns, pickled, or what went wrong, as one message: others wait for it in either case."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return _FINE + (dump or cloudpickle.dumps)(make())
    except Exception as error:  # noqa: BLE001  (whatever it is, the others have to hear of it)
        return _PROBLEM + f"{type(error).__name__}: {error}".encode()


def pickled_part(transport: Transport, sender: int, message: bytes) -> bytes:
    """The pickle in a message of ``pickle_or_problem`` on rank ``sender``; raises RuntimeError if there is none."""
    if message[:1] == _PROBLEM:
        raise RuntimeError(f"rank {transport.rank}: rank {sender} cannot send its object: {message[1:].decode()}")
    return message[1:]


def broadcast_pickle(
    transport: Transport, make: Callable[[], Any], root: int, dump: Callable[[Any], bytes] | None = None
) -> bytes:
    """What ``make`` returns on rank ``root``, pickled. Collective.

    Raises:
        RuntimeError: on every rank, if ``make`` or pickling raises on the root.
    """
    message = pickle_or_problem(make, dump) if transport.rank == root else b""
    length = torch.tensor([len(message)], dtype=torch.int64)
    transport.broadcast(length.view(torch.uint8), root, PHASE).wait()
    data = torch.frombuffer(bytearray(message.ljust(int(length))), dtype=torch.uint8)
    transport.broadcast(data, root, PHASE).wait()
    return pickled_part(transport, root, data.numpy().tobytes())


def broadcast_with_tensors(transport: Transport, make: Callable[[], Any], root: int) -> Any:
    """What ``make`` returns on rank ``root``, its plain dense tensors sent as they lie in memory. Collective.

    Returns:
        Elsewhere a copy, on the same kind of device. Tensors without gaps keep their strides.

    Raises:
        RuntimeError: on every rank, if ``make`` or pickling raises on the root.
    """
    tensors: list[torch.Tensor] = []
    made: list[Any] = []

    def dump(obj: Any) -> bytes:
        made.append(obj)
        return _dump_without_tensors(obj, tensors)

    data = broadcast_pickle(transport, make, root, dump)
    result = made[0] if made else _load_with_tensors(data, tensors)
    broadcast_tensors(transport, tensors, root)
    return result


def _dump_without_tensors(obj: Any, tensors: list[torch.Tensor]) -> bytes:
    """The pickled object, with a description in the place of each dense tensor, which is put into ``tensors``."""
    import cloudpickle

    numbers: dict[int, int] = {}

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.requires_grad:
                return None
            if id(obj) not in numbers:
                numbers[id(obj)] = len(tensors)
                tensors.append(obj)
            strides = torch.empty_like(obj, device="meta").stride()
            return numbers[id(obj)], tuple(obj.shape), strides, obj.dtype, obj.device.type

    file = io.BytesIO()
    Pickler(file).dump(obj)
    return file.getvalue()


def _load_with_tensors(data: bytes, tensors: list[torch.Tensor]) -> Any:
    """The object, with new and still empty tensors, which are put into ``tensors`` in the order of the dump."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> torch.Tensor:
            number, shape, strides, dtype, device = pid
            if number == len(tensors):
                tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
            return tensors[number]

    return Unpickler(io.BytesIO(data)).load()
