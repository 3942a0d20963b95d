"""When something is exchanged: the first step, each round, re-selection, resync. Nothing here knows the optimizer.

Every decision follows counters that are equal on all ranks; none looks at what only this rank knows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_slim import checkpoint, planner, probe, sets, significance
from hvd_slim.agreement import RankMismatchError, are_equal, require_equal
from hvd_slim.arena import Arena, LayoutError, NamedParameters, describe_parameter
from hvd_slim.config import SlimConfig
from hvd_slim.exchange import PATHS
from hvd_slim.exchange.base import Exchange, SlimExchange
from hvd_slim.exchange.flight import Flight
from hvd_slim.global_model import GlobalModel
from hvd_slim.stats import Stats
from hvd_slim.transport.base import Transport

log = logging.getLogger("hvd_slim")


class Synchronizer:
    """Keeps K replicas of one model together. Call ``before_step`` and ``after_step`` around every local step.

    Args:
        config: the settings, equal on all ranks.
        transport: carries the bytes. With one rank nothing is sent, kept or changed.
        restore_norm: scale merged changes by γ.
    """

    def __init__(self, config: SlimConfig, transport: Transport, restore_norm: bool) -> None:
        self.config, self.transport, self.restore_norm = config, transport, restore_norm
        self.steps = self.rounds = self.selections = 0
        self._named: tuple[tuple[str, torch.Tensor], ...] = ()
        self._core: torch.Tensor | None = None  # packed, as it was broadcast
        self._exchange: Exchange | None = None
        self._begun = False  # whether slim rounds have told ranks of a spread w̄ different parts of it
        self._flight: Flight | None = None  # a round that is launched and not merged
        self._restored: dict[str, Any] | None = None
        self._path: str | None = None
        self._swapped = False
        self._learning_rates: list[float] = []
        if self.alone and transport.speaks:
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
            self._restored = None  # of a restored run the counters go on; the live parameters are the global model now
            return
        same = len(trainable) == len(self._named) and all(
            new is old for (_, new), (_, old) in zip(trainable, self._named)
        )
        if self._exchange is not None:
            fits = self._exchange.arena.refresh()
            if same and fits:
                return
            if fits:
                # What leaves the index space must leave it equal on all ranks.
                self.resync()
            elif self._flight is not None:
                self._flight = None
                log.warning(
                    "rank %d: a parameter has another shape, dtype or device than at the last step; the round in "
                    "flight is given up, what it sent is still pending", self.transport.rank,
                )  # fmt: skip
        self._start(tuple(trainable))

    def _follow_parameters(self, exchange: Exchange) -> None:
        """Find the parameters' memory again, which may have been exchanged since the last look.

        Raises:
            RuntimeError: a parameter has another shape, dtype or device.
        """
        if not exchange.arena.refresh():
            raise RuntimeError(
                f"rank {self.transport.rank}: a parameter got another shape, dtype or device since step() began; "
                f"change the model between two steps, on every rank"
            )
        if isinstance(exchange, SlimExchange):
            exchange.follow_layout()

    def anywhere(self, flag: bool | None) -> bool:
        """Whether ``flag`` holds on any rank; without a vote if it is None, as it then is on all. Collective."""
        if flag is None or self.alone:
            return bool(flag)
        return self.transport.any_rank(flag)

    def after_step(self, learning_rates: Sequence[float] = ()) -> None:
        """Count the local step, merge the round in flight, and run or launch one when it is due. Collective.

        Args:
            learning_rates: of the step, for the comparison that comes with a resync.
        """
        self._learning_rates = list(learning_rates)
        self.steps += 1
        self.stats.steps += 1
        if self._exchange is None:
            return
        self._follow_parameters(self._exchange)
        size = self.transport.size
        self.stats.dense_bytes += 2 * (size - 1) / size * sum(flat.nbytes for flat in self._exchange.model.flat)
        self._merge(self._exchange)
        if self.steps % self.config.local_steps == 0:
            self._round()

    def land(self) -> None:
        """Merge the round in flight. Collective where ``Exchange.merge`` is."""
        if self._exchange is not None and self._flight is not None:
            self._follow_parameters(self._exchange)
            self._merge(self._exchange)

    def _merge(self, exchange: Exchange) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            exchange.merge(flight)

    def _round(self) -> None:
        assert self._exchange is not None
        exchange, number = self._exchange, self.rounds
        self.transport.enter_round(number)
        exchange.nonfinite = self._is_nonfinite(exchange)
        if number < self.config.warmup_rounds and self.config.warmup == "dense":
            exchange.dense("dense", self.restore_norm)
        elif isinstance(exchange, SlimExchange):
            self._slim_round(exchange, number)
        elif self._resync_is_due(number) and (self.config.overlap or not exchange.codec.exact):
            self.resync()  # of other dense rounds, each is one
        else:
            self._launch(exchange, number)
        self.rounds += 1
        self.stats.rounds += 1
        if self.config.checksum_every and self.rounds % self.config.checksum_every == 0:
            self._check_replicas(exchange)

    def _check_replicas(self, exchange: Exchange) -> None:
        """Compare, across ranks, what must be equal to the bit: w̄, or of a spread w̄ the core. Collective."""
        if not are_equal(self.transport, exchange.replicated_values()):
            raise RankMismatchError(
                f"rank {self.transport.rank}: the ranks' global models differ after round {self.rounds}. A parameter "
                f"was changed outside step(), or a collective gave different sums; resume from a checkpoint"
            )

    def _slim_round(self, exchange: SlimExchange, number: int) -> None:
        """Re-selection and resync when they are due, else the slim exchange. A resync takes its place."""
        config = self.config
        reselect = self._core is None or number % config.reselect_every == 0
        must_resync = reselect and self._begun and exchange.resync_at_reselection
        if reselect:
            self._reselect(exchange)
        self._begun = True
        if must_resync or self._resync_is_due(number):
            self.resync()
        else:
            exchange.set_explorer_count(config.explorer_count(exchange.arena.n, number))
            self._launch(exchange, number)

    def _launch(self, exchange: Exchange, number: int) -> None:
        """A round of the exchange's own kind; with ``overlap`` it is merged after the next local step."""
        if self.config.overlap:
            self._flight = exchange.launch(number, True, self._next_is_alike(number))
        else:
            exchange.exchange(number)

    def _resync_is_due(self, number: int) -> bool:
        """Whether round ``number`` is the last of ``resync_every``."""
        return self.config.resync_every > 0 and (number + 1) % self.config.resync_every == 0

    def _is_nonfinite(self, exchange: Exchange) -> bool:
        """Whether this rank's parameters hold a NaN or an infinity, and that is to be raised."""
        return self.config.on_nonfinite == "raise" and not exchange.arena.is_finite()

    def _next_is_alike(self, number: int) -> bool:
        """Whether the round after ``number`` is a slim one, on the same core and with as many explorers."""
        config, after = self.config, number + 1
        reselects = after % config.reselect_every == 0
        return not reselects and not self._resync_is_due(after) and number >= config.warmup_rounds

    # Parts of it ----------------------------------------------------------------------------------------------------

    def _start(self, trainable: tuple[tuple[str, torch.Tensor], ...]) -> None:
        """Agree on the model and the options, make all replicas equal, and set w̄ to them. Collective."""
        facts = [(name, repr(value)) for name, value in self.config.to_dict().items()]
        facts.append(("restore_norm as found for the optimizer", repr(self.restore_norm)))
        facts.append(("the round to start from", str((self._restored or self._counters())["rounds"])))
        facts.append(("the path of the run so far", repr(self._path)))
        problem: LayoutError | None = None
        # In the optimizer's order first: the arena's depends on dtypes and would hide which parameter differs.
        described = [(f"parameter {name!r}", describe_parameter(parameter)) for name, parameter in trainable]
        layout: list[tuple[str, str]] = []
        try:
            arena = Arena(trainable)
            layout = arena.describe()
        except LayoutError as error:
            problem = error
            layout = [("its parameters", str(error))]
        misfit = "" if problem else checkpoint.misfit(self._restored, layout)
        facts.append(("whether the checkpoint is of this model", misfit or "yes"))
        require_equal(self.transport, facts, described, layout)
        if problem is not None:
            raise problem
        if misfit:
            raise ValueError(f"rank {self.transport.rank}: {misfit}")

        self._path = path = self._choose_path(arena)
        model = GlobalModel(arena)
        restored, self._restored = self._own_or_shared(self._restored), None
        same_run = restored is not None and self._restore_model(restored, model, path)
        if restored is None or not same_run or restored.get("shared") or PATHS[path].replicated:
            self._make_equal(model)
        self._exchange = PATHS[path](model, self.transport, self.config, self.restore_norm)
        self._named, self._core = (trainable, None)  # an older core belongs to an index space that is gone
        self._begun = False
        if restored is not None and same_run:
            self._restore_exchange(restored, self._exchange)

    def _own_or_shared(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """The restored state; if not every rank has its own, only what holds for all ranks. Collective."""
        writer = None if state is None else state.get("rank")
        of_rank = self.transport.gather_texts(repr(writer))
        if state is None or of_rank == [repr(rank) for rank in range(self.transport.size)]:
            return state
        return checkpoint.shared_state(state)

    def _choose_path(self, arena: Arena) -> str:
        """How rounds move. With "auto" the run so far goes on as it was; a new one measures first. Collective."""
        allowed = planner.allowed_paths(self.config, arena.n)
        if len(allowed) == 1:
            return allowed[0]
        if self._path in allowed:
            return self._path
        path, why = probe.choose_path(self.transport, arena, self.config)
        if self.transport.speaks:
            log.info("%s", why)
        return path

    def _make_equal(self, model: GlobalModel) -> None:
        """Broadcast rank 0's w̄ if the ranks' differ. Collective."""
        if are_equal(self.transport, model.tensors()):
            return
        if self.transport.speaks:
            log.warning("the ranks start from different parameters; rank 0's are broadcast to all")
        for tensor in model.tensors():
            self.transport.broadcast(tensor.view(torch.uint8), 0, "start").wait()
        model.settle_everywhere()

    def _reselect(self, exchange: SlimExchange) -> None:
        """Choose the core on one rank, in turn, from its own parameters and gradient, and tell all. Collective."""
        arena, transport = exchange.arena, self.transport
        count, root = exchange.core_count, self.selections % transport.size
        with self.stats.timed("select"):
            if transport.rank == root:
                weight, normalize = self.config.gradient_weight, self.config.normalize
                core = significance.most_significant(arena, weight, normalize, count)
                packed = sets.pack_indices(core, arena.n).cpu()
            else:
                packed = torch.empty(sets.set_nbytes(count, arena.n), dtype=torch.uint8)
            self._core = transport.broadcast(packed, root, "select").wait()
            exchange.set_core(sets.unpack_indices(self._core, count, arena.n))
        self.selections += 1
        self.stats.reselections += 1

    def resync(self) -> None:
        """Exchange every pending update; all replicas are equal afterwards. Collective; after ``before_step``."""
        if self._exchange is not None:
            self._follow_parameters(self._exchange)
            self._merge(self._exchange)
            self._exchange.nonfinite = self._is_nonfinite(self._exchange)
            self._exchange.dense("resync", restore_norm=False)
            self.stats.resyncs += 1
            self._compare_learning_rates()

    def _compare_learning_rates(self) -> None:
        """Say which ranks step with another learning rate than rank 0. Collective."""
        of_rank = self.transport.gather_texts(repr(self._learning_rates))
        others = [f"rank {rank} with {rates}" for rank, rates in enumerate(of_rank) if rates != of_rank[0]]
        if others and self.transport.speaks:
            log.warning("learning rates differ: rank 0 steps with %s, %s", of_rank[0], ", ".join(others))

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Inside the context the live parameters hold w̄. The round in flight is merged before.

        Collective on the alltoall path, and where ``land`` is.
        """
        if self._swapped or self._exchange is None:
            yield
            return
        if not self._exchange.arena.refresh():
            raise RuntimeError("a parameter has another shape, dtype or device than at the last step; step first")
        self.land()
        model = self._exchange.whole_model()
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

    def state_dict(self, keep_flight: bool = True) -> dict[str, Any]:
        """All that an exact resume needs beside the live parameters. Not collective; tensors are copies.

        What the round in flight brings is waited for, and merged when it would have been. Without ``keep_flight`` that
        round is as if it had not been launched: what it sent is still pending.
        """
        if self._restored is not None:
            return dict(self._restored)
        state: dict[str, Any] = {**checkpoint.fresh_state(self.config), **self._counters()}
        if self._exchange is not None:
            if self._swapped:
                raise RuntimeError("state_dict() inside global_parameters(): leave the context, then save")
            arena = self._exchange.arena
            state["size"], state["rank"] = self.transport.size, self.transport.rank
            state["path"], state["begun"] = self._path, self._begun
            state["layout"] = arena.describe()
            state["global_model"] = [tensor.clone() for tensor in self._exchange.model.tensors()]
            state["core"] = None if self._core is None else self._core.clone()
            state["exchange"] = self._exchange.state()
            flight = self._flight if keep_flight else None
            state["flight"] = None if flight is None else self._exchange.flight_state(flight)
            state["announced"] = self._exchange.announced() if keep_flight else {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a run where ``state_dict`` left it, from the next step on. Not collective."""
        checkpoint.check_version(state)
        self.steps, self.rounds, self.selections = (state["steps"], state["rounds"], state["selections"])
        self._restored, self._named = checkpoint.with_later_settings(state), ()
        self._exchange = self._core = None
        self._flight = None
        if self.alone:
            self._restored = None  # alone, the live parameters are the model
        self._path = state.get("path") if state.get("size") == self.transport.size else None

    def _restore_model(self, state: dict[str, Any], model: GlobalModel, path: str) -> bool:
        """Take w̄ from a checkpoint; whether the run it belongs to goes on.

        Each rank's own checkpoint fits this path and as many ranks; one that was shared among all fits any.
        """
        if "global_model" not in state:
            return False
        if state["config"] != self.config.to_dict() and self.transport.speaks:
            log.warning("the checkpoint was written with other hvd_slim options; this run's options are used")
        for tensor, saved in zip(model.tensors(), state["global_model"]):
            tensor.copy_(saved)
        if state.get("shared") or (state["path"], state["size"]) == (path, self.transport.size):
            return True
        if self.transport.speaks:
            log.warning(
                "the checkpoint was written by %d ranks with exchange %r; what ranks other than its writer had pending "
                "is dropped", state["size"], state["path"],
            )  # fmt: skip
        return False

    def _restore_exchange(self, state: dict[str, Any], exchange: Exchange) -> None:
        exchange.load_state(state["exchange"])
        if state["config"]["local_rate"] != self.config.local_rate:
            exchange.model.stretch_pending_update(self.config.local_rate / state["config"]["local_rate"])
        self._begun = state["begun"] and not state.get("shared")
        same_core = state["config"]["core_fraction"] == self.config.core_fraction
        if isinstance(exchange, SlimExchange) and state["core"] is not None and same_core:
            self._core = state["core"].cpu().clone()
            exchange.set_core(sets.unpack_indices(self._core, exchange.core_count, exchange.arena.n))
        if not checkpoint.gives_the_same_numbers(state["config"], self.config):
            return
        exchange.resume_announced(state["announced"])
        flight = state["flight"]
        if flight is not None:
            if isinstance(exchange, SlimExchange):
                exchange.set_explorer_count(self.config.explorer_count(exchange.arena.n, flight["round_number"]))
            self._flight = exchange.resume_flight(flight)
