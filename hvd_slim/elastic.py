"""Elastic training: ``hvd.elastic`` with a slim optimizer. Workers leave, are killed, and join; the run goes on.

Used as in Horovod::

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, batch=0)

    @hvd.elastic.run
    def train(state): ...

After every change of workers all go on from rank 0's replica: its parameters, buffers, moments, learning rate, round
and core set. ``batch`` and other plain values are rank 0's, too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from horovod.common.elastic import ObjectState
from horovod.torch.elastic import ElasticSampler, run
from horovod.torch.mpi_ops import rank

from hvd_slim.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hvd_slim.optimizer import SlimOptimizer

__all__ = ["ElasticSampler", "TorchState", "run"]


class TorchState(ObjectState):
    """What an elastic worker saves, restores and shares. Horovod's class of this name, for slim optimizers too.

    Everything given becomes an attribute. Modules and optimizers are shared tensor by tensor; whatever else has
    ``state_dict`` and ``load_state_dict`` (schedulers, ``GradScaler``, ``ElasticSampler``) by that state, and stays the
    object that it is; the rest by its value, pickled.

    Args:
        model: a module, or None.
        optimizer: slim, Horovod's own or bare, or None.
        kwargs: more of them, and anything else that belongs to the progress of training.
    """

    _handlers: dict[str, _Handler]
    _saved_state: dict[str, Any]

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler for name, value in given.items() if (handler := _handler_of(value)) is not None}
        self.__dict__["_handlers"] = handlers
        for name, handler in handlers.items():
            self.__dict__[name] = handler.value
        values = {name: value for name, value in given.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **values)

    def __setattr__(self, name: str, value: Any) -> None:
        """A new value of something with state takes the old one's place, and is saved at once."""
        if name in self._handlers:
            self._handlers[name] = _required_handler(name, value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep a copy of everything in memory. Not collective; ``commit()`` saves and is."""
        for handler in self._handlers.values():
            handler.save()
        super().save()
        self._saved_state = copy.deepcopy(self._saved_state)

    def restore(self) -> None:
        """Go back to the copy. Not collective; nothing is asked of Horovod, which may be broken just then."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()
        self._saved_state = copy.deepcopy(self._saved_state)

    def sync(self) -> None:
        """Take over rank 0's state, and keep a copy. Collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().save()  # of plain values, super().sync() sends what was saved
        super().sync()
        self.save()

    def reset(self) -> None:
        """Horovod has started anew with other ranks: connect anew. Not collective."""
        for handler in self._handlers.values():
            handler.reset()
        super().reset()


class _Handler:
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy, because some objects go on to write into what they were given.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def reset(self) -> None:
        if isinstance(self.value, ElasticSampler):
            self.value.reset()


class _ModelHandler(_Handler):
    def sync(self) -> None:
        state = self.value.state_dict()
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        broadcast_parameters(tensors, root_rank=0)
        others = broadcast_object({name: value for name, value in state.items() if name not in tensors})
        if others:  # what modules keep by get_extra_state
            self.value.load_state_dict({**tensors, **others})


class _OptimizerHandler(_Handler):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        if isinstance(self.value, SlimOptimizer):
            slim = self.value._slim
            slim.renew(slim.state_dict(keep_flight=False))  # it was among other ranks


def _handler_of(value: Any) -> _Handler | None:
    if isinstance(value, torch.nn.Module):
        return _ModelHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return _OptimizerHandler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _Handler(value)
    return None


def _required_handler(name: str, value: Any) -> _Handler:
    handler = _handler_of(value)
    if handler is None:
        raise TypeError(f"state.{name} is now a {type(value).__name__}, which has no state_dict; it had one before")
    return handler
