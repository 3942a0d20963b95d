"""A run in which nothing goes wrong: every path over every transport, a checkpoint, an evaluation. It says one word.

Warnings are errors (``python -W error``); what Horovod or MPI print would show beside the word.
"""

from __future__ import annotations

import io
import random
import threading
from typing import Any

import horovod.torch
import numpy as np
import torch

import hvd_slim as hvd

PATHS = [("random", "allgather"), ("greedy", "alltoall"), ("leader", "allreduce"), ("shared", "auto")]


def generators() -> list[bytes]:
    """The state of every global generator."""
    states = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    return [states[0].numpy().tobytes(), str(states[1]).encode(), str(states[2]).encode()]


def train(explorer: str, exchange: str, transport: str) -> None:
    """All that a script does, with momentum, buffers and a scheduler."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    options: dict[str, Any] = {"explorer": explorer, "exchange": exchange, "transport": transport, "reselect_every": 3}
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.slim(**options, resync_every=5, checksum_every=4),
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.Generator().manual_seed(hvd.rank())
    before = generators()
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=data)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    with optimizer.global_parameters():
        model(torch.randn(4, 6, generator=data))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    optimizer.zero_grad()
    model(torch.randn(4, 6, generator=data)).square().mean().backward()
    optimizer.step()
    optimizer.resync(model)
    assert generators() == before, "a global generator has moved"


def main() -> None:
    """All of them, then the word."""
    hvd.init()
    torch.set_num_threads(1)
    transports = ["horovod", "mpi"] if hvd.mpi_enabled() else ["horovod"]
    for transport in transports:
        for explorer, exchange in PATHS:
            train(explorer, exchange, transport)
    assert not horovod.torch.mpi_ops._handle_map, "an operation of Horovod's is in flight"
    hvd.barrier()
    hvd.shutdown()
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    assert not left, left
    print("clean", flush=True)


if __name__ == "__main__":
    main()
