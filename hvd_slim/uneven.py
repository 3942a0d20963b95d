"""Ranks with fewer batches than others: whoever is out of data keeps the others company until all are out."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from hvd_slim import horovod_module
from hvd_slim.local_step import learning_rates, must_skip
from hvd_slim.naming import trainable_parameters
from hvd_slim.optimizer import SlimOptimizer, anyone_exchanges
from hvd_slim.transport.base import Pending, Transport


@contextlib.contextmanager
def uneven_inputs(*optimizers: torch.optim.Optimizer) -> Iterator[None]:
    """Context for a loop over batches of which some ranks have fewer, or none. Collective: every rank enters it.

    ::

        with hvd.uneven_inputs(optimizer):
            for batch in loader:
                ...
                optimizer.step()

    A rank that leaves the block before others takes part in every step that any rank still takes, without a local step
    of its own: nothing new is pending on it, what it had pending goes on being sent, and what others learn is merged
    into its parameters. It goes on when all ranks have left; all have counted the same steps and rounds then. A mean is
    always over all ranks (as with Horovod's join): the fewer ranks still learn, the shorter the merged steps.

    Each step costs one more collective, of a few bytes, for which ranks with data do not wait. Collectives of the
    user's own do not belong inside the block, nor does a scheduler that counts batches: ranks would count differently.

    Args:
        optimizers: all those that step inside the block, in the same order on every rank: slim ones on one process set,
            or Horovod's own, for which this is Horovod's join.

    Raises:
        TypeError, ValueError, RuntimeError: the optimizers are none, of both kinds or of different process sets, or a
            block is open for one already.
    """
    slim = [optimizer for optimizer in optimizers if isinstance(optimizer, SlimOptimizer)]
    if not slim and optimizers and all(hasattr(optimizer, "skip_synchronize") for optimizer in optimizers):
        yield
        horovod_module.require().join()
        return
    if len(slim) < len(optimizers) or not slim:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise TypeError(f"uneven_inputs({kinds}): give optimizers made by hvd.DistributedOptimizer, all of one kind")
    if len({_process_set_id(optimizer) for optimizer in slim}) > 1:
        raise ValueError("uneven_inputs: the optimizers train on different process sets; open one block for each set")
    if any(optimizer._slim.before_each_step is not None for optimizer in slim):
        raise RuntimeError("uneven_inputs: a block is open for one of these optimizers already")
    roll_call = _RollCall(slim)
    for number, optimizer in enumerate(slim):
        optimizer._slim.before_each_step = lambda number=number: roll_call.present(number)
    try:
        yield
    finally:
        for optimizer in slim:
            optimizer._slim.before_each_step = None
    while (step := roll_call.absent()) is not None:
        _step_without_data(*step)


def join(device: int = -1) -> int:
    """Horovod's join, for Horovod's own optimizers.

    Raises:
        RuntimeError: a slim optimizer exchanges with other ranks. Horovod's join knows no allgather, alltoall or
            broadcast, on which its background thread would fail.
    """
    horovod = horovod_module.require()
    if anyone_exchanges() and (gc.collect() or anyone_exchanges()):  # one that is out of use may still lie around
        raise RuntimeError(
            f"rank {horovod.rank()}: hvd.join() cannot be used with a slim optimizer; put the loop over batches into "
            f"`with hvd.uneven_inputs(optimizer):` instead"
        )
    return int(horovod.join(device))


class _RollCall:
    """Before each step all ranks say which optimizer they step, or that they are out of data.

    Attributes:
        optimizers: the same on every rank, in the same order.
    """

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers
        # All connect now: a rank without any data will not do so in a step of its own.
        first, *_ = [optimizer._slim.synchronizer() for optimizer in optimizers]
        self._transport: Transport | None = None if first.alone else first.transport
        self._called: Pending[torch.Tensor] | None = None

    def present(self, number: int) -> None:
        """This rank is about to step optimizer ``number``. Collective; waits for the previous call only."""
        if self._transport is None:
            return
        optimizer = self.optimizers[number]
        votes = must_skip(optimizer, (), optimizer._slim.config.on_nonfinite) is not None
        self._finish()
        self._called = self._call(self._transport, 2 * number + votes)

    def absent(self) -> tuple[Any, bool] | None:
        """This rank is out of data. Collective.

        Returns:
            The optimizer that others step, and whether they vote on leaving the step out; None if all are out, too.
        """
        if self._transport is None:
            return None
        self._finish()
        counts = self._call(self._transport, None).wait().tolist()
        present = next((place for place, count in enumerate(counts) if count), None)
        return None if present is None else (self.optimizers[present // 2], bool(present % 2))

    def _finish(self) -> None:
        if self._called is not None:
            self._called.wait()
            self._called = None

    def _call(self, transport: Transport, place: int | None) -> Pending[torch.Tensor]:
        counts = torch.zeros(2 * len(self.optimizers))
        if place is not None:
            counts[place] = 1.0
        return transport.allreduce(counts, "roll_call")


def _step_without_data(optimizer: Any, votes: bool) -> None:
    """What ``step()`` does for the other ranks, and nothing else. Collective."""
    slim = optimizer._slim
    synchronizer = slim.synchronizer()
    synchronizer.before_step(trainable_parameters(optimizer, slim.named))
    if not (votes and synchronizer.anywhere(False)):
        synchronizer.after_step(learning_rates(optimizer))


def _process_set_id(optimizer: Any) -> int:
    process_set = optimizer._slim.process_set
    return 0 if process_set is None else int(process_set.process_set_id)
