"""Every kind of parameter, and models that change on the way, in arithmetic that is exact in every dtype.

Parameters are multiples of 1/8, gradients multiples of K, the learning rate is 1/8: all sums, means and pending updates
are multiples of 1/8 of less than 32, which even bfloat16 holds. So a law holds to the bit or not at all.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import hvd_slim as hvd
from ranks.support import Named, Options, global_model, identical_on_all_ranks, slim

LR = 0.125
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
OPTIONS: Options = {"comm_fraction": 0.4, "core_fraction": 0.2, "reselect_every": 3}


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def whole_numbers(rng: np.random.Generator, like: torch.Tensor, most: int) -> torch.Tensor:
    """Random whole numbers of at most this size, in both parts if complex; float64 or complex128."""
    shape = (*like.shape, 2)
    parts = torch.from_numpy(rng.integers(-most, most + 1, shape).astype(np.float64)).contiguous()
    return torch.view_as_complex(parts) if like.is_complex() else parts[..., 0]


def parameter(dtype: torch.dtype, *shape: int, seed: int = 0) -> Parameter:
    """Multiples of 1/8 within ±2, the same on every rank."""
    empty = torch.empty(shape, dtype=dtype)
    return Parameter((whole_numbers(np.random.default_rng([seed, *shape]), empty, 16) / 8).to(dtype))


def model_of(dtype: torch.dtype) -> Named:
    return {
        "matrix": parameter(dtype, 9, 7),
        "scalar": parameter(dtype),
        "filters": Parameter(parameter(dtype, 3, 4, 2, 2).detach().to(memory_format=torch.channels_last)),
        "transposed": Parameter(parameter(dtype, 6, 5).detach().t()),
        "columns": Parameter(parameter(dtype, 5, 8).detach()[:, 2:6]),
        "bias": parameter(dtype, 11),
    }


class ExactRun:
    """Slim training beside its law: the mean over ranks of w_k is w_0 − lr · Σ of the mean gradients."""

    def __init__(self, named: Named, optimizer: Any = None, **options: Any) -> None:
        self.named: Named = {}
        self.expected: dict[str, torch.Tensor] = {}
        self.follow(named)
        self.optimizer = slim(named, **{**OPTIONS, **options}) if optimizer is None else optimizer
        self.steps = 0

    def follow(self, named: Named) -> None:
        """Expect something of these parameters from now on."""
        self.named.update(named)
        self.expected.update({name: p.detach().to(wide(p.dtype)).clone() for name, p in named.items()})

    def step(self, steps: int, without_gradient: tuple[str, int] = ("", 0)) -> None:
        """Train. Of the named parameter, ranks from the given one on have no gradient."""
        size = hvd.size()
        for _ in range(steps):
            for name, p in self.named.items():
                p.grad = None
                if not p.requires_grad:
                    continue
                for rank in range(size):
                    rng = np.random.default_rng([self.steps, rank, zlib.crc32(name.encode())])
                    gradient = size * whole_numbers(rng, p, 1)
                    if name == without_gradient[0] and rank >= without_gradient[1]:
                        continue
                    self.expected[name] -= LR * gradient / size
                    if rank == hvd.rank():
                        p.grad = gradient.to(p.dtype)
            self.optimizer.step()
            self.steps += 1

    def check(self) -> None:
        """w̄ has the same bits on all ranks, and the replicas' mean is the expected one, exactly."""
        assert identical_on_all_ranks(global_model(self.optimizer, self.named.values()))
        for name, p in self.named.items():
            parts = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
            replicas = hvd.allgather(parts.double().reshape(1, -1), name="replicas." + name)
            mean = replicas.mean(dim=0).view(parts.shape)
            assert torch.equal(torch.view_as_complex(mean) if p.is_complex() else mean, self.expected[name]), name

    def finish(self) -> None:
        """After a resync every replica holds exactly what is expected."""
        self.check()
        self.optimizer.resync()
        for name, p in self.named.items():
            assert torch.equal(p.detach().to(wide(p.dtype)), self.expected[name]), name

    @property
    def replicas_differ(self) -> bool:
        return hvd.size() > 1 and not identical_on_all_ranks(list(self.named.values()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(dtype: torch.dtype) -> None:
    """CASES 23 to 25."""
    named = model_of(dtype)
    before = {name: (p.dtype, p.stride(), p.data_ptr()) for name, p in named.items()}
    run = ExactRun(named)
    for _ in range(4):
        run.step(3)
        run.check()
    assert run.replicas_differ == (hvd.size() > 1)
    run.finish()
    if dtype.is_complex:
        assert all(p.detach().imag.abs().max() > 0 for p in named.values())
    assert {name: (p.dtype, p.stride(), p.data_ptr()) for name, p in named.items()} == before


def test_all_dtypes_in_one_model() -> None:
    """CASES 23."""
    named = {f"{dtype}.{name}": p for dtype in DTYPES for name, p in model_of(dtype).items()}
    names = list(named)
    random.Random(0).shuffle(names)
    run = ExactRun({name: named[name] for name in names})
    run.step(8)
    assert run.replicas_differ == (hvd.size() > 1)
    run.finish()


@pytest.mark.parametrize(
    "options", [OPTIONS, {"comm_fraction": 1.0, "core_fraction": 0.5}, {"exchange": "dense"}], ids=str
)
def test_what_rounding_takes_from_a_bfloat16_mean_is_not_pending(options: dict[str, Any]) -> None:
    """What was sent is settled, although the mean had to be rounded; and the mean's rest is not lost."""
    named = {"w": Parameter(torch.full((64,), 256.0, dtype=torch.bfloat16))}  # the next ones are 2 away
    optimizer = slim(named, torch.optim.SGD(named.values(), lr=1.0), **options)
    steps = 3 * hvd.size()
    for _ in range(steps):
        named["w"].grad = torch.full((64,), -2.0 if hvd.rank() == 0 else 0.0, dtype=torch.bfloat16)
        optimizer.step()
        settled = named["w"].detach() == global_model(optimizer, named.values())[0]
        assert settled.sum() >= (64 if options is not OPTIONS else 26)
        assert identical_on_all_ranks(global_model(optimizer, named.values()))
    optimizer.resync()
    # Each step's mean is 2/K, of which nothing may be lost; but a third of it has no end in binary.
    assert ((named["w"].detach() - 256.0 - 2.0 * steps / hvd.size()).abs() <= (2.0 if hvd.size() == 3 else 0.0)).all()


def test_tied_weights_are_exchanged_once() -> None:
    """CASES 25. A tensor under two names is one parameter: moved once a step, counted once."""
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(5, 12), "decoder": torch.nn.Linear(5, 12)})
    model["decoder"].weight = model["encoder"].weight
    for number, p in enumerate(model.parameters()):
        p.data = parameter(torch.float32, *p.shape, seed=number).data
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR),
        named_parameters=model.named_parameters(remove_duplicate=False),
        compression=hvd.Compression.slim(**OPTIONS, exchange="allgather"),
    )
    run = ExactRun(dict(model.named_parameters()), optimizer)
    run.step(6)
    run.finish()
    assert model["decoder"].weight is model["encoder"].weight
    assert optimizer.stats()["dense_bytes"] == pytest.approx(6 * 2 * (hvd.size() - 1) / hvd.size() * 4 * (60 + 12 + 12))


def test_frozen_parameters_cost_nothing_and_stay() -> None:
    """CASES 15."""
    named = model_of(torch.float32)
    frozen = ("matrix", "bias")
    for name in frozen:
        named[name].requires_grad_(False)
    before = {name: named[name].detach().clone() for name in frozen}
    run = ExactRun(named)
    run.step(5)
    run.finish()
    assert all(torch.equal(named[name], before[name]) for name in frozen)
    trainable = sum(p.numel() for p in named.values() if p.requires_grad)
    expected = 5 * 2 * (hvd.size() - 1) / hvd.size() * 4 * trainable
    assert run.optimizer.stats()["dense_bytes"] == pytest.approx(expected)


@pytest.mark.parametrize("without_from", [0, 1], ids=["on all ranks", "on all but one"])
def test_gradients_that_are_none(without_from: int) -> None:
    """CASES 16. An unused branch is merged, not zeroed, and nobody waits for it."""
    run = ExactRun(model_of(torch.float32))
    run.step(2)
    run.step(4, without_gradient=("matrix", without_from))
    run.step(2)
    run.finish()


def test_parameters_thawed_on_the_way() -> None:
    """CASES 15."""
    named = model_of(torch.float32)
    named["filters"].requires_grad_(False)
    run = ExactRun(named)
    run.step(4)
    run.check()
    named["filters"].requires_grad_(True)
    for _ in range(3):
        run.step(2)
        run.check()
    run.finish()


def test_parameters_frozen_on_the_way() -> None:
    """What is frozen while updates of it are pending is equal on all ranks from then on."""
    run = ExactRun(model_of(torch.float32))
    run.step(4)
    run.named["matrix"].requires_grad_(False)
    run.step(1)
    assert identical_on_all_ranks([run.named["matrix"]])
    run.step(3)
    run.finish()


def test_parameters_added_on_the_way() -> None:
    """CASES 15."""
    run = ExactRun(model_of(torch.float32))
    run.step(4)
    added = {"late": parameter(torch.float32, 8, 3), "late in bfloat16": parameter(torch.bfloat16, 20)}
    run.optimizer.add_param_group({"params": list(added.values())})
    run.follow(added)
    for _ in range(3):
        run.step(2)
        run.check()
    run.finish()


@pytest.mark.parametrize("close_gaps", [False, True], ids=["same strides", "dense"])
def test_memory_exchanged_on_the_way(close_gaps: bool) -> None:
    """CASES 24. ``p.data = …`` gives a parameter other memory; rounds read and write where it lies now.

    With the same strides, or dense where it used to be columns of a wider matrix.
    """
    run = ExactRun(model_of(torch.float32))
    for _ in range(3):
        run.step(2)
        for p in run.named.values():
            p.data = p.data.clone() if close_gaps else torch.empty_strided(p.shape, p.stride()).copy_(p.data)
        run.check()
    run.finish()


@pytest.mark.parametrize("steps_before", [0, 4], ids=["before the first step", "while updates are pending"])
@pytest.mark.parametrize("look", [False, True], ids=["and trained", "and looked at"])
def test_layout_changed_on_the_way(steps_before: int, look: bool) -> None:
    """``model.to(memory_format=…)`` after wrapping: w̄ stays what it is, and nothing that was pending is lost.

    CASES 24.
    """
    named = {"filters": parameter(torch.float32, 3, 4, 2, 2), "bias": parameter(torch.float32, 11)}
    run = ExactRun(named)
    run.step(steps_before)
    w_bar = global_model(run.optimizer, named.values())
    for memory_format in (torch.channels_last, torch.contiguous_format):
        named["filters"].data = named["filters"].data.to(memory_format=memory_format)
        if look and steps_before:
            assert all(torch.equal(a, b) for a, b in zip(w_bar, global_model(run.optimizer, named.values())))
        run.step(2)
        run.check()
        assert named["filters"].is_contiguous(memory_format=memory_format)
        w_bar = global_model(run.optimizer, named.values())
    run.finish()


def test_the_users_generators_are_not_touched() -> None:
    """CASES 38. Neither torch's, NumPy's nor Python's, whatever a round does."""
    torch.manual_seed(hvd.rank())
    np.random.seed(hvd.rank())
    random.seed(hvd.rank())
    named = model_of(torch.float32)
    before = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    run = ExactRun(named, reselect_every=2, resync_every=5)
    run.step(6)
    with run.optimizer.global_parameters():
        pass
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.step(2)
    run.finish()
    after = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    assert torch.equal(before[0], after[0])
    assert str(before[1]) == str(after[1])
    assert before[2] == after[2]
