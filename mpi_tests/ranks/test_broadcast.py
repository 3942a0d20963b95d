"""Broadcasts of parameters, optimizer state and objects, and averages of buffers.

CASES 28 (rank 0 alone loads a checkpoint), 40 (BatchNorm buffers), and 23 to 25 (dtypes, layouts) as they travel here.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from unit.layouts import LAYOUTS, whole_storage
from unit.training import OPTIMIZERS, every_optimizer

import hvd_slim as hvd
from hvd_slim import broadcasting
from ranks.support import core_of, identical_on_all_ranks

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip
#: options of every path
PATHS: dict[str, dict[str, Any]] = {
    "allgather": {"exchange": "allgather"},
    "alltoall": {"exchange": "alltoall"},
    "shared": {"exchange": "allreduce", "explorer": "shared"},
    "leader": {"exchange": "allreduce", "explorer": "leader"},
    "dense": {"exchange": "dense"},
}
every_path = pytest.mark.parametrize("path", PATHS)


def last() -> int:
    """A root that is not rank 0, where there is one."""
    return hvd.size() - 1


def several_ranks() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank has nobody to differ from")


# Parameters -----------------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the tensor's bytes."""
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).clone()


def random_bits(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor of any bit patterns: not-a-numbers, too."""
    most = 2 if dtype == torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, most, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_layout_gets_the_roots_bits_where_it_lies(dtype: torch.dtype) -> None:
    """Values to the bit; strides, addresses and what lies in the gaps of a tensor stay as they were."""

    def tensors(rank: int) -> dict[str, torch.Tensor]:
        made = {}
        for number, (name, layout) in enumerate(LAYOUTS.items()):
            made[name] = layout(lambda *shape: random_bits(1000 * rank + number, dtype, shape))  # noqa: B023
        return made

    mine, roots = tensors(hvd.rank()), tensors(last())
    before = tensors(hvd.rank())
    places = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in mine.items()}
    hvd.broadcast_parameters(mine, root_rank=last())
    for name, tensor in mine.items():
        assert (tensor.data_ptr(), tensor.stride()) == places[name], name
        assert torch.equal(bits(tensor), bits(roots[name])), name
        outside = whole_storage(before[name].copy_(tensor))  # elsewhere it still has the old bits
        assert torch.equal(bits(whole_storage(tensor)), bits(outside)), name


def test_layouts_may_differ_between_ranks() -> None:
    values = torch.arange(2 * 4 * 3 * 3.0).view(2, 4, 3, 3)
    mine = torch.empty(2, 4, 3, 3, memory_format=(torch.channels_last, torch.contiguous_format)[hvd.rank() % 2])
    strides = mine.stride()
    mine.copy_(values if hvd.rank() == 0 else -values)
    hvd.broadcast_parameters([mine], 0)
    assert torch.equal(mine, values)
    assert mine.stride() == strides


def test_an_expanded_buffer() -> None:
    """Several elements share one address; torch refuses to copy into such a tensor."""
    row = torch.arange(5.0).add(hvd.rank()).expand(3, 5)
    column = torch.full((1, 1), float(hvd.rank())).expand(2, 4)
    hvd.broadcast_parameters({"row": row, "column": column}, last())
    assert torch.equal(row, torch.arange(5.0).add(last()).expand(3, 5))
    assert torch.equal(column, torch.full((2, 4), float(last())))


def mixed_model() -> Any:
    """Several dtypes, tied weights, buffers; other values on every rank."""
    torch.manual_seed(hvd.rank())
    convolution: Any = torch.nn.Conv2d(4, 4, 3)
    model: Any = torch.nn.ModuleDict(
        {
            "wide": torch.nn.Linear(3, 4).double(),
            "narrow": torch.nn.Linear(4, 2).bfloat16(),
            "convolution": convolution.to(memory_format=torch.channels_last),
            "norm": torch.nn.BatchNorm2d(4),
            "embedding": torch.nn.Embedding(7, 4),
            "head": torch.nn.Linear(4, 7, bias=False),
        }
    )
    model["head"].weight = model["embedding"].weight
    model["norm"](torch.randn(4, 4, 2, 2))
    model.register_buffer("mask", torch.rand(5) > 0.5)
    model.scale = torch.nn.Parameter(torch.randn((), dtype=torch.complex64))
    return model


@pytest.mark.parametrize(
    "params",
    [
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: list(model.parameters()),
        lambda model: model.parameters(),
        lambda model: dict(reversed(model.state_dict().items())) if hvd.rank() % 2 else model.state_dict(),
    ],
    ids=["state_dict", "named iterator", "pairs", "list", "iterator", "order differs"],
)
def test_whatever_a_user_may_pass(params: Callable[[Any], Any]) -> None:
    model = mixed_model()
    hvd.broadcast_parameters(params(model), root_rank=last())
    assert identical_on_all_ranks([bits(tensor) for _, tensor in model.named_parameters()])
    assert model["head"].weight is model["embedding"].weight


def test_the_state_dict_includes_buffers() -> None:
    model = mixed_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert identical_on_all_ranks([bits(tensor) for tensor in model.state_dict().values()])


def test_messages_do_not_grow_with_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 43: a thousand tensors of several dtypes are one message; more bytes than fit into one are more."""
    tensors = [torch.full((3,), float(hvd.rank()), dtype=DTYPES[n % 4]) for n in range(1000)]
    assert len(broadcasting._messages(tensors)) == 1
    monkeypatch.setattr(broadcasting, "_MESSAGE_BYTES", 1000)
    assert len(broadcasting._messages(tensors)) > 10
    tensors.insert(500, torch.full((1000,), float(hvd.rank())))  # larger than a message
    hvd.broadcast_parameters(tensors, last())
    assert all(bool((tensor == last()).all()) for tensor in tensors)


@pytest.mark.parametrize(
    ("of_rank_0", "of_others", "named"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.zeros(2), "b": torch.zeros(4)}, "'b'"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}, "'a'"),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(4)}, "'b'"),
        ({"a": torch.zeros(2)}, {"c": torch.zeros(2)}, "'c'"),
        ([torch.zeros(2)], [], "'0'"),
    ],
    ids=["shape", "dtype", "more", "name", "fewer"],
)
def test_different_models_raise_on_every_rank(of_rank_0: Any, of_others: Any, named: str) -> None:
    """CASES 1: nothing hangs, nothing is written."""
    several_ranks()
    with pytest.raises(hvd.RankMismatchError, match=named):
        hvd.broadcast_parameters(of_rank_0 if hvd.rank() == 0 else of_others, 0)


def test_what_cannot_be_broadcast_says_so() -> None:
    with pytest.raises(TypeError, match="'extra' is a dict"):
        hvd.broadcast_parameters({"extra": {}}, 0)
    with pytest.raises(TypeError, match="layout torch.sparse_coo"):
        hvd.broadcast_parameters([torch.eye(2).to_sparse()], 0)
    with pytest.raises(ValueError, match="params is a Tensor"):
        hvd.broadcast_parameters(torch.zeros(2), 0)
    with pytest.raises(ValueError, match="params is a int"):
        hvd.broadcast_parameters(3, 0)
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="root_rank=99"):
            hvd.broadcast_parameters([torch.zeros(2)], 99)


# Optimizer state ------------------------------------------------------------------------------------------------------


def network(seed: int, dtype: torch.dtype = torch.float32, channels_last: bool = True) -> Any:
    """A small model with a frozen bias."""
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(
        torch.nn.Conv2d(4, 6, 3), torch.nn.Flatten(), torch.nn.Tanh(), torch.nn.Linear(6, 3), torch.nn.Linear(3, 2)
    )
    model[3].bias.requires_grad_(False)
    return model.to(dtype=dtype, memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    """Batches that are functions of step and rank."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        batch = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        optimizer.zero_grad()
        model(batch.to(dtype)).float().square().mean().backward()
        optimizer.step()


def wrapped(bare: torch.optim.Optimizer, model: torch.nn.Module, path: str) -> Any:
    """Slim on one of the paths, ``horovod`` for Horovod's own, or ``bare``."""
    if path == "bare":
        return bare
    compression = hvd.Compression.none
    if path in PATHS:
        options = {"reselect_every": 4, "warn_after": 60.0, **PATHS[path]}
        compression = hvd.Compression.slim(**options)
    return hvd.DistributedOptimizer(bare, named_parameters=model.named_parameters(), compression=compression)


def flat_state(tree: Any) -> tuple[str, list[torch.Tensor]]:
    """What a state holds, as text, and its tensors' bytes."""
    if isinstance(tree, torch.Tensor):
        return f"{tree.dtype}{tuple(tree.shape)}", [bits(tree)]
    if isinstance(tree, dict):
        items = [(repr(key), flat_state(value)) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        items = [(str(number), flat_state(value)) for number, value in enumerate(tree)]
    else:
        return repr(tree), []
    return str([(key, text) for key, (text, _) in items]), [tensor for _, (_, part) in items for tensor in part]


def equal_everywhere(state: Any) -> bool:
    """Whether all ranks hold the same state, numbers and tensors. Collective."""
    text, tensors = flat_state(state)
    return len(set(hvd.allgather_object(text))) == 1 and identical_on_all_ranks(tensors or [torch.zeros(1)])


def saved_by_rank_0(model: torch.nn.Module, optimizer: Any) -> io.BytesIO:
    file = io.BytesIO()
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
    return file


def resume_from_rank_0(file: io.BytesIO, model: torch.nn.Module, optimizer: Any) -> None:
    """Horovod's recipe: rank 0 loads, then two broadcasts."""
    if hvd.rank() == 0:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@pytest.mark.parametrize("path", [*PATHS, "horovod", "bare"])
@pytest.mark.parametrize("kind", ["SGD", "momentum", "AdamW"])
def test_rank_0_alone_loads_a_checkpoint(kind: str, path: str) -> None:
    """CASES 28: afterwards everything is equal on all ranks, nobody has stepped, and training goes on."""
    make, channels_last = OPTIMIZERS[kind], path != "horovod"  # Horovod's optimizer refuses such gradients
    model = network(1, channels_last=channels_last)
    optimizer = wrapped(make(model.parameters()), model, path)
    train(model, optimizer, range(6))
    file = saved_by_rank_0(model, optimizer)
    weights = [bits(parameter) for parameter in model.parameters()]

    model = network(2 + hvd.rank(), channels_last=channels_last)
    bare = make(model.parameters())
    bare.param_groups[0]["lr"] = 7.0 + hvd.rank()
    steps: list[int] = []
    bare.register_step_pre_hook(lambda *_: steps.append(1))
    optimizer = wrapped(bare, model, path)
    resume_from_rank_0(file, model, optimizer)

    assert not steps
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.param_groups[0]["lr"] == make([torch.zeros(1)]).param_groups[0]["lr"]
    assert equal_everywhere(optimizer.state_dict())
    assert identical_on_all_ranks(list(model.parameters()))
    if hvd.rank() == 0:
        assert all(torch.equal(bits(parameter), w) for parameter, w in zip(model.parameters(), weights))
    train(model, optimizer, range(6, 9))
    if path in PATHS:
        slim = optimizer.state_dict()["hvd_slim"]
        assert (slim["steps"], slim["rounds"]) == (9, 9 if hvd.size() > 1 else 0)
        with optimizer.global_parameters():
            assert identical_on_all_ranks(list(model.parameters()))


@every_path
def test_resumed_by_rank_0_after_a_resync_to_the_same_bits(path: str) -> None:
    """CASES 28: same round, core and seeds; so with plain SGD all that follows is the same."""
    model = network(1)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, path)
    train(model, optimizer, range(5))
    optimizer.resync()
    file = saved_by_rank_0(model, optimizer)
    again = network(2 + hvd.rank())
    resumed = wrapped(torch.optim.SGD(again.parameters(), lr=9.0), again, path)
    resume_from_rank_0(file, again, resumed)
    for step in range(5, 14):
        for m, o in ((model, optimizer), (again, resumed)):
            train(m, o, range(step, step + 1))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
        assert (core_of(optimizer) == core_of(resumed)).all()


@every_path
def test_in_the_middle_of_a_run(path: str) -> None:
    """Also from another root, with pending updates everywhere: all go on from the root's replica."""
    model = network(1)
    optimizer = wrapped(OPTIMIZERS["momentum"](model.parameters()), model, path)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=last())
    hvd.broadcast_optimizer_state(optimizer, root_rank=last())
    assert equal_everywhere(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.01 * hvd.size()
    train(model, optimizer, range(3, 9))
    with optimizer.global_parameters():
        assert identical_on_all_ranks(list(model.parameters()))
    optimizer.resync()
    assert identical_on_all_ranks(list(model.parameters()))


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def test_every_optimizer_and_dtype(kind: str, dtype: torch.dtype) -> None:
    """Ranks without any state get the root's; a root without any takes away that of others. Strides are kept."""
    for root_has_state in (True, False):
        model = network(hvd.rank(), dtype)
        optimizer = OPTIMIZERS[kind](model.parameters())
        if (hvd.rank() == 0) == root_has_state:
            train(model, optimizer, range(2))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        state = optimizer.state_dict()
        assert equal_everywhere(state)
        if kind not in ("SGD", "without closure", "Adagrad"):  # the first two never have state, the last one always
            assert bool(state["state"]) == root_has_state
        for parameter, of_parameter in optimizer.state.items():
            for value in of_parameter.values():
                if isinstance(value, torch.Tensor) and value.dim() == 4:
                    assert value.stride() == parameter.stride()


def test_a_rank_that_cannot_take_up_the_state_is_named_everywhere() -> None:
    several_ranks()
    model = network(1)
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = torch.optim.SGD(groups if hvd.rank() == last() else model.parameters(), lr=0.1)
    with pytest.raises(hvd.RankMismatchError, match=f"rank {last()} cannot take up the optimizer state of rank 0"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def test_a_root_that_cannot_give_its_state_is_named_everywhere() -> None:
    several_ranks()
    model = network(1)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, "allgather")
    train(model, optimizer, range(2))
    with optimizer.global_parameters(), pytest.raises(RuntimeError, match="rank 0 cannot send .*global_parameters"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(2, 4))


# Objects --------------------------------------------------------------------------------------------------------------


def test_objects_of_another_kind_on_every_rank() -> None:
    """Horovod names the operation after the object's type, and waits for ever when types differ."""
    mine = [None, {"lr": 0.1}, "text", 3][hvd.rank() % 4]
    assert hvd.broadcast_object(mine, root_rank=last()) == [None, {"lr": 0.1}, "text", 3][last() % 4]
    assert hvd.allgather_object(mine) == [[None, {"lr": 0.1}, "text", 3][rank % 4] for rank in range(hvd.size())]
    assert hvd.allgather_object(bytes(range(256)) * (1 + hvd.rank()), name="bytes") == [
        bytes(range(256)) * (1 + rank) for rank in range(hvd.size())
    ]


def test_an_object_is_what_it_was() -> None:
    """Modules keep their parameters, functions their closure."""
    model = hvd.broadcast_object(network(hvd.rank()), root_rank=last())
    assert isinstance(next(model.parameters()), torch.nn.Parameter)
    assert identical_on_all_ranks(list(model.parameters()))
    rank = hvd.rank()
    assert hvd.broadcast_object(lambda: rank, root_rank=last())() == last()


def test_what_cannot_be_pickled_raises_on_every_rank() -> None:
    several_ranks()
    with pytest.raises(RuntimeError, match="rank 0 cannot send its object"):
        hvd.broadcast_object(threading.Lock() if hvd.rank() == 0 else None)
    with pytest.raises(RuntimeError, match=f"rank {last()} cannot send its object"):
        hvd.allgather_object(threading.Lock() if hvd.rank() == last() else None)


# Buffers --------------------------------------------------------------------------------------------------------------


def test_buffers_are_averaged_and_counters_left_alone() -> None:
    """CASES 40."""
    torch.manual_seed(hvd.rank())
    model: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    for _ in range(1 + hvd.rank()):
        model(torch.randn(5, 3, 2, 2))
    model.register_buffer("third", torch.tensor([1 / 3, 0.1, 7e30]))
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    model.register_buffer("narrow", torch.full((3, 2), float(hvd.rank()), dtype=torch.bfloat16).t())
    model.register_buffer("complex", torch.tensor(complex(hvd.rank(), 2 * hvd.rank())))
    model.register_buffer("expanded", torch.tensor([float(hvd.rank())]).expand(4))
    model.register_buffer("numbers", torch.arange(3) + hvd.rank())
    constants = [bits(model.third), bits(model.mask)]
    norm, parameters = model[1], [bits(p) for p in model.parameters()]
    means = hvd.allgather(norm.running_mean.double()[None], name="means").mean(0).float()
    variances = hvd.allgather(norm.running_var.double()[None], name="variances").mean(0).float()

    hvd.average_buffers(model)

    assert identical_on_all_ranks([b for b in model.buffers() if b.dtype != torch.int64])
    torch.testing.assert_close(norm.running_mean, means, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var, variances, rtol=1e-6, atol=0)
    assert norm.num_batches_tracked == 1 + hvd.rank()
    assert torch.equal(model.numbers, torch.arange(3) + hvd.rank())
    assert [torch.equal(a, bits(b)) for a, b in zip(constants, (model.third, model.mask))] == [True, True]
    mean = (hvd.size() - 1) / 2
    assert torch.equal(model.narrow, torch.full((2, 3), mean, dtype=torch.bfloat16))
    assert complex(model.complex) == complex(mean, 2 * mean)
    assert torch.equal(model.expanded, torch.full((4,), mean))
    assert all(torch.equal(a, bits(b)) for a, b in zip(parameters, model.parameters()))


def test_a_resync_averages_buffers_of_the_model_that_it_is_given() -> None:
    """CASES 40. Otherwise buffers are left alone: the optimizer does not know them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, "allgather")
    for _ in range(3):
        model(torch.randn(6, 4) + hvd.rank()).square().sum().backward()
        optimizer.step()
    optimizer.resync()
    assert identical_on_all_ranks(list(model.parameters()))
    assert identical_on_all_ranks(list(model.buffers())) == (hvd.size() == 1)
    optimizer.resync(model)
    assert identical_on_all_ranks(list(model.buffers()))


def test_different_buffers_raise_on_every_rank() -> None:
    several_ranks()
    model = torch.nn.BatchNorm1d(4 if hvd.rank() == 0 else 5)
    with pytest.raises(hvd.RankMismatchError, match="buffer 'running_mean'"):
        hvd.average_buffers(model)


def test_a_model_without_buffers() -> None:
    hvd.average_buffers(torch.nn.Linear(2, 2))


def test_horovods_own_sync_batch_norm_is_there() -> None:
    import horovod.torch as horovod

    assert hvd.SyncBatchNorm is horovod.SyncBatchNorm
    layer = hvd.SyncBatchNorm(4)
    hvd.broadcast_parameters(layer.state_dict(), 0)
    hvd.average_buffers(layer)
