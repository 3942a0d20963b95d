"""Training scripts as Horovod's documentation teaches them, with only the import and ``compression=`` changed.

Each takes ``hvd`` (here hvd_slim, as the changed import would give it) and the compression to use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hvd_slim as hvd
from ranks.support import global_model, identical_on_all_ranks

SLIM = hvd.Compression.slim(comm_fraction=0.4, core_fraction=0.2, reselect_every=5, exchange="allgather")


class Net(nn.Module):
    """A small network for 12x12 images of ten classes, with the layers of the usual MNIST script."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=3)
        self.norm = nn.BatchNorm2d(4)
        self.fc1 = nn.Linear(4 * 5 * 5, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.norm(self.conv1(x)), 2))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


class Blobs(torch.utils.data.Dataset[Any]):
    """Images with a bright spot whose place is their class."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.targets = torch.randint(10, (count,), generator=generator)
        self.images = 0.3 * torch.randn(count, 1, 12, 12, generator=generator)
        for image, target in zip(self.images, self.targets.tolist()):
            row, column = divmod(target, 5)
            image[0, 5 * row : 5 * row + 4, 2 * column : 2 * column + 3] += 2.0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.targets[index]


def loader(dataset: Any, sampler: Any, batch_size: int) -> torch.utils.data.DataLoader[Any]:
    """With a generator of its own, as the loader would otherwise draw its seed from the global one."""
    return torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler, generator=torch.Generator())


def check_end(model: nn.Module, optimizer: Any) -> None:
    """The ranks' global models are the same, and finite."""
    agreed = global_model(optimizer, model.parameters())
    assert all(bool(parameter.isfinite().all()) for parameter in agreed)
    assert identical_on_all_ranks(agreed)


# Synthetic benchmark --------------------------------------------------------------------------------------------------


def test_synthetic_benchmark() -> None:
    """Warm-up batches, then timed iterations; the mean rate is a print-out away."""
    torch.manual_seed(hvd.rank())
    model = Net()
    lr_scaler = hvd.size()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
    compression = SLIM
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data, target = torch.randn(8, 1, 12, 12), torch.randint(10, (8,))

    def benchmark_step() -> None:
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()

    import timeit

    timeit.timeit(benchmark_step, number=2)
    rates = [8 * 3 / timeit.timeit(benchmark_step, number=3) for _ in range(3)]
    assert all(rate > 0 for rate in rates)
    assert optimizer.stats()["steps"] == 11
    check_end(model, optimizer)


# The MNIST script -----------------------------------------------------------------------------------------------------


def metric_average(value: float, name: str) -> float:
    """As in the documentation."""
    return float(hvd.allreduce(torch.tensor(value), name=name).item())


def test_mnist_script() -> None:
    """Sampler, scaled learning rate, broadcasts, three epochs, metrics averaged over ranks; it learns."""
    torch.manual_seed(42 + hvd.rank())
    train_dataset, test_dataset = Blobs(40 * 6 * hvd.size()), Blobs(40)
    train_sampler: Any = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    train_loader = loader(train_dataset, train_sampler, 8)
    test_sampler: Any = torch.utils.data.distributed.DistributedSampler(
        test_dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    test_loader = loader(test_dataset, test_sampler, 20)
    model = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=SLIM, gradient_predivide_factor=1.0
    )
    accuracies = []
    for epoch in range(3):
        model.train()
        train_sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            F.nll_loss(model(data), target).backward()
            optimizer.step()
        model.eval()
        right, loss = 0.0, 0.0
        with optimizer.global_parameters(), torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                loss += F.nll_loss(output, target, reduction="sum").item()
                right += output.argmax(1).eq(target).float().sum().item()
        loss = metric_average(loss / len(test_sampler), "avg_loss")
        accuracies.append(metric_average(right / len(test_sampler), "avg_accuracy"))
        assert math.isfinite(loss)
    assert len(set(hvd.allgather_object(accuracies[-1]))) == 1
    assert accuracies[-1] > 0.6, accuracies  # one in ten by chance
    check_end(model, optimizer)


# Gradient accumulation ------------------------------------------------------------------------------------------------


def test_gradient_accumulation() -> None:
    """CASES 12 and 21: four backward passes a step, and a last window of two. A window is one round."""
    torch.manual_seed(hvd.rank())
    batches_per_allreduce = 4
    model = Net()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=SLIM,
        backward_passes_per_step=batches_per_allreduce,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    data, target = torch.randn(10 * 3, 1, 12, 12), torch.randint(10, (10 * 3,))
    for images, labels in zip(data.split(12), target.split(12)):
        optimizer.zero_grad()
        windows = list(zip(images.split(3), labels.split(3)))
        if len(windows) < batches_per_allreduce:
            optimizer.set_backward_passes_per_step(len(windows))
        for image, label in windows:
            (F.nll_loss(model(image), label) / len(windows)).backward()
        optimizer.step()
    assert optimizer.stats()["steps"] == 3
    assert optimizer.stats()["rounds"] == (0 if hvd.size() == 1 else 3)
    check_end(model, optimizer)


# Clipping -------------------------------------------------------------------------------------------------------------


def test_clipping() -> None:
    """CASES 13: synchronize, clip, skip_synchronize, step is one round, and ends like plain clip and step."""
    ends = []
    for recipe in ("synchronize", "plain"):
        torch.manual_seed(0)
        model = Net()
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), compression=SLIM
        )
        torch.manual_seed(1 + hvd.rank())
        for _ in range(6):
            data, target = torch.randn(8, 1, 12, 12), torch.randint(10, (8,))
            optimizer.zero_grad()
            (10.0 * F.nll_loss(model(data), target)).backward()
            if recipe == "synchronize":
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        assert optimizer.stats()["rounds"] == (0 if hvd.size() == 1 else 6)
        check_end(model, optimizer)
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends))


# AMP ------------------------------------------------------------------------------------------------------------------


OVERFLOW_EVERY = 20  # steps; a GradScaler whose scale has no time to grow again ends at 0, in plain torch too


def amp_batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Batches, and whether this rank's loss overflows: in turn on the first rank, the last, all, the middle one."""
    who = [{0}, {hvd.size() - 1}, set(range(hvd.size())), {hvd.size() // 2}]
    for step in range(count):
        overflows = step % OVERFLOW_EVERY == 10 and hvd.rank() in who[step // OVERFLOW_EVERY % 4]
        yield torch.randn(4, 6), torch.randint(3, (4,)), overflows


@pytest.mark.parametrize(("recipe", "steps"), [("plain", 200), ("unscale and clip", 1000)])
def test_amp(recipe: str, steps: int) -> None:
    """CASES 22: 1,000 steps with injected overflows stay finite; all ranks skip the same steps."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(70 + hvd.rank())
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=SLIM,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=15)
    skipped = []
    for data, target, overflows in amp_batches(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(data), target)
        scaler.scale(loss * (math.inf if overflows else 1.0)).backward()
        before = optimizer.stats()["steps"]
        if recipe == "plain":
            scaler.step(optimizer)
        else:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        scaler.update()
        skipped.append(optimizer.stats()["steps"] == before)
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert [step for step, skips in enumerate(skipped) if skips] == list(range(10, steps, OVERFLOW_EVERY))
    assert scaler.get_scale() > 1.0
    check_end(model, optimizer)
