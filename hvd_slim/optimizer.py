"""The drop-in optimizer: the local step of the wrapped class, then one round."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_slim import horovod_module, launchers
from hvd_slim.adaptive import follows_learning_rate, is_adaptive
from hvd_slim.buffers import average_buffers
from hvd_slim.checkpoint import check_version, fresh_state, saved_global_parameters
from hvd_slim.config import SlimConfig
from hvd_slim.local_step import learning_rates, make_dense, must_skip, slowed, unscaled
from hvd_slim.naming import NamedParameters, check_named_parameters, trainable_parameters
from hvd_slim.stats import Stats
from hvd_slim.synchronizer import Synchronizer
from hvd_slim.transport import agree_on_name, make_transport

_STATE_KEY = "hvd_slim"


class SlimOptimizer:
    """What ``DistributedOptimizer`` adds to the wrapped optimizer's own class.

    The optimizer keeps its class, state, hooks and schedulers; ``isinstance`` holds.
    """

    _slim: _Attachment

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped optimizer's step on the local gradient, then one round every ``local_steps`` calls. Collective.

        Args:
            args, kwargs: the wrapped optimizer's own; a closure is evaluated locally by it.

        Returns:
            What the wrapped optimizer's step returns.

        Raises:
            RankMismatchError: at the first step, on every rank, if ranks differ in model or options.
        """
        optimizer: torch.optim.Optimizer = self  # type: ignore[assignment]
        slim = self._slim
        synchronizer = slim.synchronizer()
        if slim.before_each_step is not None:
            slim.before_each_step()
        trainable = trainable_parameters(optimizer, slim.named)
        synchronizer.before_step(trainable)
        optimizer._opt_called = True  # type: ignore[attr-defined]
        parameters = [parameter for _, parameter in trainable]
        if slim.sparse_as_dense:
            make_dense(parameters)
        if synchronizer.anywhere(must_skip(optimizer, parameters, slim.config.on_nonfinite)):
            return None
        rate = 1.0 if synchronizer.alone else slim.config.local_rate
        with unscaled(optimizer, parameters, _base_of(type(self))), slowed(optimizer, rate):
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        synchronizer.after_step(learning_rates(optimizer))
        return result

    # GradScaler then calls step() also on a rank that overflowed; ``must_skip`` settles it across ranks.
    _step_supports_amp_scaling = True

    # torch's schedulers and hook machinery look for these marks; the wrapped class's own step carries the hooks.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Merge the round in flight, if there is one: only with ``overlap=True``. Every rank has to call it then.

        In Horovod's recipe synchronize, clip, skip_synchronize, step it costs no round of its own. Clipping sees the
        local gradient.
        """
        if self._slim.started is not None:
            self._slim.started.land()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Any:
        """Context manager of Horovod's clipping recipe; ``step()`` inside it is one step and one round."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Kept for Horovod's signature: any number of backward passes may precede a step, and costs no round.

        Raises:
            ValueError: ``passes`` is below 1.
        """
        _check_passes(passes)

    def resync(self, model: torch.nn.Module | None = None) -> None:
        """Exchange every pending update: all replicas are equal afterwards. Collective.

        Args:
            model: its floating-point buffers are averaged, too: see ``hvd.average_buffers``.
        """
        synchronizer = self._slim.synchronizer()
        synchronizer.before_step(trainable_parameters(self, self._slim.named))  # type: ignore[arg-type]
        synchronizer.resync()
        if model is not None:
            average_buffers(model, self._slim.process_set)

    def global_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model holds the global model w̄, equal on all ranks: for evaluation or a checkpoint.

        No communication, not collective, with two exceptions, in which every rank has to enter: with
        ``exchange="alltoall"`` w̄ is gathered from its owners, and with ``overlap=True`` and values below full width the
        round in flight is merged. ``step()`` inside it is an error. Before the first step the live parameters are left
        as they are.
        """
        if self._slim.started is not None:
            return self._slim.started.global_parameters()
        state = self._slim.state_dict()
        if "global_model" not in state:
            return contextlib.nullcontext()
        return saved_global_parameters(state, trainable_parameters(self, self._slim.named))  # type: ignore[arg-type]

    def stats(self) -> dict[str, Any]:
        """Bytes sent and received, seconds spent, and what dense training would have sent. Not collective.

        Returns:
            Plain values; the keys are the attributes of ``hvd_slim.stats.Stats``, with ``total_bytes_sent``,
            ``total_bytes_received`` (bytes) and ``ratio`` (sent bytes to dense) added.
        """
        return (Stats() if self._slim.started is None else self._slim.started.stats).to_dict()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under ``"hvd_slim"`` all that an exact resume needs. Not collective.

        Each rank's live parameters belong to it: for a resume to the same bits every rank saves its own model and
        optimizer. The result loads into the bare torch optimizer too.
        """
        state = super().state_dict()  # type: ignore[misc]
        state[_STATE_KEY] = self._slim.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class, or of the bare torch optimizer, returned. Not collective.

        Without slim state (a bare optimizer's checkpoint) the live parameters of the next step start a new run.
        """
        bare = {key: value for key, value in state_dict.items() if key != _STATE_KEY}
        super().load_state_dict(bare)  # type: ignore[misc]
        self._slim.renew(state_dict.get(_STATE_KEY))

    def __reduce__(self) -> Any:
        base_state = super().__getstate__()
        return _rebuild, (_base_of(type(self)), base_state, self._slim.settings(), self._slim.state_dict())


class _Attachment:
    """What the wrapper remembers: its arguments, and the synchronizer once the first step has come.

    Nothing but ``synchronizer()`` needs Horovod or the other ranks, so that one rank alone may save, load or copy.
    """

    def __init__(
        self, config: SlimConfig, named: NamedParameters, restore_norm: bool, sparse_as_dense: bool, process_set: Any
    ) -> None:
        self.config, self.named, self.restore_norm = config, named, restore_norm
        self.sparse_as_dense, self.process_set = sparse_as_dense, process_set
        self.started: Synchronizer | None = None
        self._loaded: dict[str, Any] | None = None
        #: set while ranks with fewer batches are waited for
        self.before_each_step: Callable[[], None] | None = None
        _attachments.add(self)

    def settings(self) -> tuple[Any, ...]:
        return self.config, self.named, self.restore_norm, self.sparse_as_dense, self.process_set

    def renew(self, state: dict[str, Any] | None = None) -> None:
        """Forget the run so far, counters of bytes included; the next step goes on from ``state``."""
        if state is not None:
            check_version(state)
        if self.started is not None:
            self.started.transport.close()
        self.started, self._loaded = None, state

    def state_dict(self, keep_flight: bool = True) -> dict[str, Any]:
        if self.started is not None:
            return self.started.state_dict(keep_flight)
        return dict(self._loaded) if self._loaded is not None else fresh_state(self.config)

    def synchronizer(self) -> Synchronizer:
        """The synchronizer, made at the first call. Collective then."""
        if self.started is None:
            _require_company()
            name = agree_on_name(self.config, self.process_set)
            transport = make_transport(self.config, name, self.process_set)
            self.started = Synchronizer(self.config, transport, self.restore_norm)
            if self._loaded is not None:
                self.started.load_state_dict(self._loaded)
                self._loaded = None
        return self.started


def _require_company() -> None:
    """Refuse to train alone beside others by mistake: several tasks of one SLURM step, each of which sees one rank."""
    problem = launchers.lonely_task(horovod_module.require().size())
    if problem is not None:
        raise RuntimeError(problem)


_attachments: weakref.WeakSet[_Attachment] = weakref.WeakSet()


def anyone_exchanges() -> bool:
    """Whether a slim optimizer of this process has begun to exchange with other ranks. Not collective."""
    return any(slim.started is not None and not slim.started.alone for slim in _attachments)


_classes: dict[type, type[torch.optim.Optimizer]] = {}


def _slim_class(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The slim form of an optimizer class; always the same one, so that ``type(a) is type(b)`` holds as before."""
    if base not in _classes:
        _classes[base] = type(
            base.__name__, (SlimOptimizer, base), {"__module__": base.__module__, "__doc__": base.__doc__}
        )
    return _classes[base]


def _base_of(cls: type) -> type[torch.optim.Optimizer]:
    return cls.__mro__[cls.__mro__.index(SlimOptimizer) + 1]


def _rebuild(
    base: type[torch.optim.Optimizer], base_state: dict[str, Any], settings: tuple[Any, ...], slim_state: Any
) -> torch.optim.Optimizer:
    cls = _slim_class(base)
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(base_state)
    optimizer._slim = _Attachment(*settings)  # type: ignore[attr-defined]
    optimizer._slim.renew(slim_state)  # type: ignore[attr-defined]
    return optimizer


def DistributedOptimizer(  # noqa: N802  (the name Horovod gave it)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> torch.optim.Optimizer:
    """Make ``optimizer`` train data-parallel. Horovod's signature; not collective.

    With ``compression=Compression.slim(...)`` the given optimizer itself, its state kept, becomes a slim one and is
    returned: each ``step()`` is its own local step followed by a Slim-DP round (arXiv 1709.09393). With
    ``Compression.none`` (the default) or ``Compression.fp16`` the call returns plain Horovod's own optimizer.

    Args:
        optimizer: any torch optimizer but LBFGS.
        named_parameters: (name, parameter) pairs, usually ``model.named_parameters()``; a superset is fine.
        compression: ``Compression.none``, ``Compression.fp16`` or ``Compression.slim(...)``.
        backward_passes_per_step: any number is legal with slim: only ``step()`` exchanges.
        op: ``Average``; slim knows no other.
        gradient_predivide_factor, num_groups, groups: Horovod's; slim sends no gradients and packs everything
            into one buffer, so only the defaults are accepted.
        sparse_as_dense: turn sparse gradients into dense ones before the local step.
        process_set: the ranks that train together; None for all.

    Raises:
        ValueError, TypeError: an argument is outside its range; the message names value and remedy. The given
            optimizer is unchanged then.
    """
    horovod = horovod_module.require()
    process_set = horovod.global_process_set if process_set is None else process_set
    op = horovod.Average if op is None else op
    if not isinstance(compression, SlimConfig):
        _check_compression(compression)
        return horovod.DistributedOptimizer(
            optimizer,
            named_parameters=named_parameters,
            compression=horovod.Compression.none if compression is None else compression,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if isinstance(optimizer, SlimOptimizer):
        raise ValueError(  # noqa: TRY004
            "this optimizer is already distributed by hvd_slim; wrap the bare torch optimizer, once"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS cannot be distributed: it evaluates the closure a number of times that differs between ranks, and "
            "its line search would follow each rank's own loss. Use SGD, Adam or another one-step optimizer."
        )
    if op != horovod.Average:
        name = {horovod.Adasum: "Adasum", horovod.Sum: "Sum"}.get(op, repr(op))
        raise ValueError(
            f"op={name} is not possible with Compression.slim, which averages the ranks' parameter updates; leave op "
            f"at hvd.Average" + (", or use Compression.none for Adasum" if name == "Adasum" else "")
        )
    _check_passes(backward_passes_per_step)
    if gradient_predivide_factor != 1.0:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor!r} has no meaning with Compression.slim, which "
            f"sends no gradients; leave it at 1.0"
        )
    if num_groups != 0 or groups is not None:
        raise ValueError(
            f"num_groups={num_groups!r}, groups={'given' if groups is not None else None}: Compression.slim packs all "
            f"parameters into one buffer already; leave both out"
        )
    named = check_named_parameters(optimizer, named_parameters)
    _check_local_rate(compression.local_rate, optimizer)
    matters = compression.restore_norm is None or compression.leaves_explorer_open
    adaptive = matters and is_adaptive(type(optimizer), optimizer.defaults)
    compression = compression.for_optimizer(adaptive)
    restore_norm = adaptive if compression.restore_norm is None else compression.restore_norm
    # All ranks: None, not an object that a copy of the optimizer would take along to where there are others.
    members = None if process_set.process_set_id == 0 else process_set
    attachment = _Attachment(compression, named, restore_norm, bool(sparse_as_dense), members)
    # A scheduler made earlier has put its own mark around the bare step; ours carries that mark itself.
    if hasattr(optimizer.__dict__.get("step"), "_wrapped_by_lr_sched"):
        del optimizer.__dict__["step"]
    optimizer.__class__ = _slim_class(type(optimizer))
    optimizer._slim = attachment  # type: ignore[attr-defined]
    return optimizer


def _check_compression(compression: Any) -> None:
    if compression is SlimConfig:
        raise TypeError("compression=Compression.slim lacks its brackets; write Compression.slim()")
    if compression is not None and not hasattr(compression, "compress"):
        raise TypeError(
            f"compression={compression!r} is a {type(compression).__name__}; give Compression.none, Compression.fp16 "
            f"or Compression.slim(...)"
        )


def _check_passes(passes: int) -> None:
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise ValueError(f"backward_passes_per_step={passes!r} must be a whole number of at least 1")


def _check_local_rate(local_rate: float, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to step with a part of the learning rate where that is not a step of that part, or is lost."""
    if local_rate == 1.0:
        return
    if not all("lr" in group for group in optimizer.param_groups) or not follows_learning_rate(
        type(optimizer), optimizer.defaults
    ):
        raise ValueError(
            f"local_rate={local_rate!r} needs steps that are proportional to the learning rate, which those of "
            f"{type(optimizer).__name__} are not; leave it at 1.0"
        )
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    narrow = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.itemsize < 4)
    if narrow:
        raise ValueError(
            f"local_rate={local_rate!r} with {narrow[0]} parameters: smaller steps would be lost in rounding; leave "
            f"it at 1.0, or keep the parameters in float32 and use autocast"
        )
