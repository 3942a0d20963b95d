"""CASES 34: ``hvd.elastic.TorchState`` with a slim optimizer: save, restore, sync and reset at changing world sizes.

Workers that really come and go are in ``launches/test_elastic_jobs.py``. Here a smaller world is a process set of some
ranks that stands for all.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.torch
import pytest
import torch
from horovod.common.exceptions import HostsUpdatedInterrupt

import hvd_slim as hvd
from ranks.support import identical_on_all_ranks

PATHS: dict[str, dict[str, Any]] = {
    "allgather": {"exchange": "allgather"},
    "alltoall": {"exchange": "alltoall"},
    "leader": {"exchange": "allreduce", "explorer": "leader"},
    "dense": {"exchange": "dense"},
}
every_path = pytest.mark.parametrize("path", PATHS)


def network(seed: int) -> torch.nn.Module:
    """A small model with buffers."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))


class Worker:
    """One rank's model, optimizer, scheduler and elastic state, as a script makes them."""

    def __init__(self, path: str = "allgather", seed: int = 1, **options: Any) -> None:
        self.model = network(seed)
        bare = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        compression = hvd.Compression.slim(**{"reselect_every": 4, "warn_after": 60.0, **PATHS[path], **options})
        self.optimizer: Any = hvd.DistributedOptimizer(bare, self.model.named_parameters(), compression)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.9)
        self.state = hvd.elastic.TorchState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, batch=0, history=[]
        )

    def train(self, steps: int) -> None:
        """Batches of this rank's own."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.state.batch + hvd.rank())
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 6, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.state.batch += 1
            self.state.history.append(self.state.batch)

    def tensors(self) -> list[torch.Tensor]:
        """Copies of parameters, buffers and momentum."""
        moments = [value for of in self.optimizer.state.values() for value in of.values() if value is not None]
        return [tensor.detach().clone() for tensor in [*self.model.state_dict().values(), *moments]]

    def counters(self) -> tuple[int, int, int]:
        """(steps, rounds, selections)."""
        slim = self.optimizer.state_dict()["hvd_slim"]
        return slim["steps"], slim["rounds"], slim["selections"]

    def global_model_is_the_same_everywhere(self) -> bool:
        with self.optimizer.global_parameters():
            return identical_on_all_ranks(list(self.model.parameters()))


def all_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others))


# Save and restore -----------------------------------------------------------------------------------------------------


@every_path
def test_restore_goes_back_to_the_last_commit(path: str) -> None:
    """Everything, to the bit; and from there the run goes on as it went before."""
    worker = Worker(path)
    worker.train(5)
    worker.state.commit()
    at_commit, counters = worker.tensors(), worker.counters()
    worker.train(4)
    once = worker.tensors()
    for _ in range(2):  # what was saved is not used up
        worker.state.restore()
        assert all_equal(worker.tensors(), at_commit)
        assert worker.counters() == counters
        assert (worker.state.batch, worker.state.history) == (5, [1, 2, 3, 4, 5])
        assert worker.scheduler.last_epoch == 5
        assert worker.optimizer.param_groups[0]["lr"] == pytest.approx(0.09)
        worker.train(4)
        assert all_equal(worker.tensors(), once)


def test_before_any_commit_restore_goes_back_to_the_start() -> None:
    worker = Worker()
    start = worker.tensors()
    worker.train(3)
    worker.state.restore()
    assert all_equal(worker.tensors()[: len(start)], start)
    assert worker.counters() == (0, 0, 0)
    worker.train(3)
    assert worker.global_model_is_the_same_everywhere()


def test_restore_asks_nothing_of_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs just when Horovod has failed."""
    worker = Worker()
    worker.train(3)
    worker.state.commit()
    worker.train(2)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Horovod was asked")

    with monkeypatch.context() as patch:
        for name in ("size", "rank", "allreduce_async_", "allgather_async", "broadcast_async_", "alltoall_async"):
            patch.setattr(horovod.torch, name, broken)
        for name in ("size", "rank", "included"):
            patch.setattr(horovod.torch.ProcessSet, name, broken)
        worker.state.restore()
    worker.train(1)
    assert worker.state.batch == 4


def test_what_is_given_becomes_an_attribute() -> None:
    model, bare = network(1), torch.optim.Adam([torch.zeros(2, requires_grad=True)])
    dataset = torch.utils.data.TensorDataset(torch.arange(20.0))
    sampler = hvd.elastic.ElasticSampler(dataset, shuffle=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = hvd.elastic.TorchState(model, bare, sampler=sampler, scaler=scaler, epoch=3, best=torch.tensor(0.5))
    assert (state.model, state.optimizer, state.sampler, state.scaler, state.epoch) == (model, bare, sampler, scaler, 3)
    sampler.record_batch(0, 2)
    state.epoch, state.best = 4, torch.tensor(0.7)
    state.commit()
    sampler.record_batch(1, 2)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    state.epoch, state.best = 5, torch.tensor(0.9)
    state.restore()
    assert (state.epoch, float(state.best)) == (4, pytest.approx(0.7))
    assert sampler.processed_num == 2 * hvd.size()
    assert scaler.get_scale() == 8.0
    assert state.sampler is sampler
    assert hvd.elastic.TorchState(epoch=1).optimizer is None

    other: Any = network(2)
    state.model = other  # takes the old one's place, as it is
    with torch.no_grad():
        other[0].weight.zero_()
    state.restore()
    assert all_equal(list(other.state_dict().values()), list(network(2).state_dict().values()))
    with pytest.raises(TypeError, match="state.model is now a int"):
        state.model = 3


def test_what_horovod_itself_would_get_wrong() -> None:
    """bfloat16 and channels_last parameters, extra state of modules, another state_dict on the ranks that join."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = {"number": 1 + hvd.rank()}
            self.weight = torch.nn.Parameter(torch.full((2, 4, 3, 3), 1.0 + hvd.rank()).bfloat16())
            self.weight.data = self.weight.data.to(memory_format=torch.channels_last)

        def get_extra_state(self) -> Any:
            return self.calls

        def set_extra_state(self, state: Any) -> None:
            self.calls = state

    model = Counting()
    state = hvd.elastic.TorchState(model=model, best=torch.tensor(float(hvd.rank())))
    state.sync()
    assert model.calls == {"number": 1}
    assert bool((model.weight == 1).all())
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert state.best == 0


# Sync -----------------------------------------------------------------------------------------------------------------


@every_path
def test_sync_takes_over_rank_0s_state(path: str) -> None:
    """Whatever each rank did before: one trained alone, others have fresh models and have never stepped."""
    worker = Worker(path, seed=1 + hvd.rank())
    worker.state.sync()
    worker.train(6)
    if hvd.rank() > 0:
        worker = Worker(path, seed=50 + hvd.rank())
        worker.optimizer.param_groups[0]["lr"] = 5.0
    worker.state.sync()
    assert identical_on_all_ranks(worker.tensors())
    assert worker.counters()[:2] == (6, 6 if hvd.size() > 1 else 0)
    assert (worker.state.batch, worker.state.history) == (6, [1, 2, 3, 4, 5, 6])
    assert worker.scheduler.optimizer is worker.optimizer
    assert worker.optimizer.param_groups[0]["lr"] == pytest.approx(0.081)
    worker.train(5)
    assert worker.optimizer.param_groups[0]["lr"] == pytest.approx(0.0729)
    assert worker.global_model_is_the_same_everywhere()

    worker.state.restore()  # what was taken over was saved
    assert worker.state.batch == 6
    assert identical_on_all_ranks(worker.tensors())


# Changing worlds ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def world(ranks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Worker], None]]:
    """The first ``ranks`` ranks stand for all, as after Horovod's restart; yields what a worker goes through."""
    if ranks == hvd.size():
        process_set = horovod.torch.global_process_set
    else:
        process_set = hvd.add_process_set(list(range(ranks)))

    def enter(worker: Worker) -> None:
        worker.optimizer._slim.process_set = process_set
        worker.state.on_reset()

    with monkeypatch.context() as patch:
        patch.setattr(horovod.torch, "global_process_set", process_set)
        yield enter
    if ranks < hvd.size():
        hvd.remove_process_set(process_set)


def agree(worker: Worker, tensors: Sequence[torch.Tensor] | None = None) -> bool:
    """Whether all ranks of the world hold the same bits: of w̄, if no tensors are given. Collective."""
    if tensors is None:
        with worker.optimizer.global_parameters():
            return agree(worker, worker.tensors()[:2])
    file = io.BytesIO()
    torch.save([tensor.clone() for tensor in tensors], file)
    return len(set(hvd.allgather_object(file.getvalue()))) == 1


@every_path
@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_rank_goes_and_comes_back(path: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed: the others restore their commits and take over rank 0's. Left: they go on at once, each as it is."""
    smaller = max(1, hvd.size() - 1)
    worker = Worker(path)
    worker.train(6)
    worker.state.commit()
    counters = worker.counters()
    if how == "killed":
        worker.train(3)
    with world(smaller, monkeypatch) as enter:
        if hvd.rank() < smaller:
            if how == "killed":
                worker.state.restore()
            enter(worker)
            if how == "killed":
                worker.state.sync()
                assert agree(worker, worker.tensors())
            assert worker.counters() == counters
            worker.train(5)
            assert worker.counters()[:2] == (11, 11 if smaller > 1 else counters[1])
            assert agree(worker)
            worker.optimizer.resync()
            assert agree(worker, list(worker.model.parameters()))
            worker.train(2)
            counters = worker.counters()
        else:
            worker = Worker(path, seed=99)  # a process just started has made one
    with world(hvd.size(), monkeypatch) as enter:
        enter(worker)
        worker.state.sync()
        assert agree(worker, worker.tensors())
        assert worker.counters() == hvd.broadcast_object(counters)
        worker.train(5)
        assert agree(worker)
        assert worker.counters()[0] == 18
        worker.optimizer.resync()
    assert identical_on_all_ranks(list(worker.model.parameters()))


@every_path
def test_plain_sgd_loses_nothing_when_ranks_change_after_a_resync(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The survivors' run is the run that as many ranks start from there: same parameters, round and core."""
    smaller = max(1, hvd.size() - 1)
    worker = Worker(path, reselect_every=50)
    worker.train(6)
    worker.optimizer.resync()
    worker.state.commit()
    weights = [parameter.detach().clone() for parameter in worker.model.parameters()]
    core = worker.optimizer.state_dict()["hvd_slim"].get("core")
    with world(smaller, monkeypatch) as enter:
        if hvd.rank() < smaller:
            worker.state.restore()
            enter(worker)
            worker.state.sync()
            assert all_equal([parameter.detach() for parameter in worker.model.parameters()], weights)
            if smaller > 1:
                worker.train(1)
                after = worker.optimizer.state_dict()["hvd_slim"]["core"]
                assert core is after is None or torch.equal(core, after)


# The loop -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_restart(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Horovod stays as it is when the elastic loop would restart it; the list says how often."""
    restarts: list[str] = []
    monkeypatch.setattr(horovod.torch.elastic, "_reset", lambda: restarts.append("restart"))
    return restarts


def test_run_after_a_failure(without_restart: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective fails in the middle of a round: back to the commit, and on."""
    worker = Worker()
    resets: list[int] = []
    worker.state.register_reset_callbacks([lambda: resets.append(worker.state.batch)])
    begun: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        begun.append(state.batch)
        while state.batch < 12:
            worker.train(1)
            if state.batch == 7 and len(begun) == 1:
                raise hvd.HorovodInternalError("a rank is gone")
            if state.batch % 5 == 0:
                state.commit()
        return "done"

    assert train(worker.state) == "done"
    assert (begun, resets, without_restart) == ([0, 5], [5], ["restart"])
    assert worker.counters()[0] == 12
    assert worker.global_model_is_the_same_everywhere()


@pytest.mark.parametrize("skip_sync", [False, True])
def test_run_after_hosts_changed(without_restart: list[str], skip_sync: bool) -> None:
    """Nothing is restored; with ``skip_sync`` (ranks only left) each goes on as it is, connected anew."""
    worker = Worker()
    begun: list[int] = []
    before: list[torch.Tensor] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        begun.append(state.batch)
        if before and (skip_sync or hvd.rank() == 0):
            assert all_equal(worker.tensors(), before)
        while state.batch < 9:
            worker.train(1)
            if state.batch == 6:
                state.commit()
                before.extend(copy.deepcopy(worker.tensors()))
                raise HostsUpdatedInterrupt(skip_sync)

    train(worker.state)
    assert (begun, without_restart) == ([0, 6], ["restart"])
    assert worker.counters()[0] == 9
    assert worker.global_model_is_the_same_everywhere()
