"""When something is exchanged: the first step, each round, re-selection, resync. Nothing here knows the optimizer.

Every decision follows counters that are equal on all ranks; none looks at what only this rank knows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_slim import significance, wire
from hvd_slim.agreement import are_equal, require_equal
from hvd_slim.arena import Arena, LayoutError
from hvd_slim.config import SlimConfig
from hvd_slim.exchange.allgather import AllgatherExchange
from hvd_slim.exchange.dense import DenseExchange
from hvd_slim.global_model import GlobalModel
from hvd_slim.stats import Stats
from hvd_slim.transport.base import Transport

log = logging.getLogger("hvd_slim")

NamedParameters = Sequence[tuple[str, torch.Tensor]]


class Synchronizer:
    """Keeps K replicas of one model together. Call ``before_step`` and ``after_step`` around every local step.

    Args:
        config: the settings, equal on all ranks.
        transport: carries the bytes. With one rank nothing is sent, kept or changed.
    """

    def __init__(self, config: SlimConfig, transport: Transport) -> None:
        self.config, self.transport = config, transport
        self.steps = self.rounds = self.selections = 0
        self._named: tuple[tuple[str, torch.Tensor], ...] = ()
        self._core: torch.Tensor | None = None
        self._global_model: GlobalModel | None = None
        self._dense: DenseExchange | None = None
        self._slim: AllgatherExchange | None = None
        self._restored: dict[str, Any] | None = None
        self._swapped = False
        if self.alone:
            log.info("one rank: nothing is exchanged, training runs as without hvd_slim")

    @property
    def alone(self) -> bool:
        """Whether there is nobody to exchange with."""
        return self.transport.size <= 1

    @property
    def stats(self) -> Stats:
        """The transport's counters."""
        return self.transport.stats

    # Around a local step --------------------------------------------------------------------------------------------

    def before_step(self, trainable: NamedParameters) -> None:
        """Build, or follow, the index space over ``trainable``. Collective at the first step and when it changed."""
        if self._swapped:
            raise RuntimeError("step() inside global_parameters(): leave the context before training goes on")
        if self.alone:
            return
        same = len(trainable) == len(self._named) and all(
            new is old for (_, new), (_, old) in zip(trainable, self._named)
        )
        if self._global_model is not None:
            if same and self._global_model.arena.refresh():
                return
            if not same:
                # What leaves the index space must leave it equal on all ranks.
                self.resync()
        self._start(tuple(trainable))

    def after_step(self) -> None:
        """Count the local step and run a round when one is due. Collective."""
        self.steps += 1
        self.stats.steps += 1
        if self.alone or self._global_model is None:
            return
        size = self.transport.size
        self.stats.dense_bytes += 2 * (size - 1) / size * sum(flat.nbytes for flat in self._global_model.flat)
        if self.steps % self.config.local_steps == 0:
            self._round()

    def _round(self) -> None:
        assert self._dense is not None
        config, number = self.config, self.rounds
        if self._slim is None:
            self._dense.exchange()
        else:
            if self._core is None or number % config.reselect_every == 0:
                self._reselect()
            if config.resync_every and (number + 1) % config.resync_every == 0:
                self.resync()
            else:
                self._slim.exchange(number)
        self.rounds += 1
        self.stats.rounds += 1

    # Parts of it ----------------------------------------------------------------------------------------------------

    def _start(self, trainable: tuple[tuple[str, torch.Tensor], ...]) -> None:
        """Agree on the model and the options, make all replicas equal, and set w̄ to them. Collective."""
        facts = [(name, repr(value)) for name, value in self.config.to_dict().items()]
        facts.append(("the round to start from", str((self._restored or self._counters())["rounds"])))
        problem: LayoutError | None = None
        try:
            arena = Arena(trainable)
            facts += arena.describe()
        except LayoutError as error:
            problem = error
            facts.append(("its parameters", str(error)))
        require_equal(self.transport, facts)
        if problem is not None:
            raise problem

        model = GlobalModel(arena)
        restored, self._restored = self._restored, None
        if restored is not None:
            self._apply(restored, model)
        if not are_equal(self.transport, model.flat):
            log.warning(
                "rank %d: the ranks start from different parameters; rank 0's are broadcast to all", self.transport.rank
            )
            for flat in model.flat:
                raw = flat.view(torch.uint8)
                raw.copy_(self.transport.broadcast(raw, 0, "start").wait())
            model.copy_to_live()

        n = arena.n
        self._named, self._global_model = trainable, model
        self._dense = DenseExchange(model, self.transport)
        core_count, explorer_count = self.config.core_count(n), self.config.explorer_count(n)
        if self.config.exchange == "dense" or core_count == n:
            self._slim = None
        else:
            self._slim = AllgatherExchange(model, self.transport, core_count, explorer_count, self.config.seed)
            if self._core is not None and restored is None:
                self._core = None  # coordinates of an index space that is gone
            if self._core is not None:
                self._slim.set_core(self._core)

    def _reselect(self) -> None:
        """Choose the core on one rank, in turn, from its own parameters and gradient, and tell all. Collective."""
        assert self._global_model is not None
        assert self._slim is not None
        arena, transport = self._global_model.arena, self.transport
        count, root = self.config.core_count(arena.n), self.selections % transport.size
        with self.stats.timed("select"):
            if transport.rank == root:
                score = significance.of_arena(arena, self.config.gradient_weight, self.config.normalize)
                packed = wire.pack_set(significance.top_coordinates(score, count), arena.n)
            else:
                packed = torch.empty(wire.set_nbytes(count, arena.n), dtype=torch.uint8)
            packed = transport.broadcast(packed, root, "select").wait()
            self._core = wire.unpack_set(packed, count, arena.n).to(arena.device)
            self._slim.set_core(self._core)
        self.selections += 1
        self.stats.reselections += 1

    def resync(self) -> None:
        """Exchange every pending update; all replicas are equal afterwards. Collective."""
        if self._dense is not None:
            self._dense.exchange("resync")
            self.stats.resyncs += 1

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Inside the context the live parameters hold w̄. No communication."""
        model = self._global_model
        if self._swapped or model is None:
            yield
            return
        model.arena.refresh()
        model.swap_with_live()
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            model.swap_with_live()

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _counters(self) -> dict[str, Any]:
        return {"steps": self.steps, "rounds": self.rounds, "selections": self.selections}

    def state_dict(self) -> dict[str, Any]:
        """All that an exact resume needs beside the live parameters. Not collective; tensors are copies."""
        if self._restored is not None:
            return dict(self._restored)
        state: dict[str, Any] = {"version": 1, "config": self.config.to_dict(), **self._counters()}
        if self._global_model is not None:
            if self._swapped:
                raise RuntimeError("state_dict() inside global_parameters(): leave the context, then save")
            state["layout"] = self._global_model.arena.describe()
            state["global_model"] = [flat.clone() for flat in self._global_model.flat]
            state["core"] = None if self._core is None else wire.pack_set(self._core, self._global_model.arena.n)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a run where ``state_dict`` left it, from the next step on. Not collective."""
        if state.get("version") != 1:
            raise ValueError(f"hvd_slim state of version {state.get('version')!r} cannot be read; this is version 1")
        self.steps, self.rounds, self.selections = state["steps"], state["rounds"], state["selections"]
        self._restored, self._named, self._global_model, self._dense, self._slim = dict(state), (), None, None, None

    def _apply(self, state: dict[str, Any], model: GlobalModel) -> None:
        if "global_model" not in state:
            return
        arena = model.arena
        if [tuple(fact) for fact in state["layout"]] != arena.describe():
            raise ValueError(
                f"rank {self.transport.rank}: the checkpoint's parameters are not this model's "
                f"({len(state['layout'])} in the checkpoint, {len(arena.describe())} here, or other names, shapes or "
                f"dtypes); build the model that was saved"
            )
        if state["config"] != self.config.to_dict():
            log.warning("the checkpoint was written with other hvd_slim options; this run's options are used")
        for flat, saved in zip(model.flat, state["global_model"]):
            flat.copy_(saved)
        same_core = state["core"] is not None and state["config"]["core_fraction"] == self.config.core_fraction
        count = self.config.core_count(arena.n)
        self._core = wire.unpack_set(state["core"].cpu(), count, arena.n).to(arena.device) if same_core else None
