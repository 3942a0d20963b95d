"""A small Slim-DP training job whose last rank comes to a bad end: ``train.py killed`` or ``train.py raises``."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time

import torch

import hvd_slim as hvd

STEPS = 1_000_000  # no job reaches them
LAST_STEP = 12


def come_to_a_bad_end(how: str) -> None:
    """End this rank, after saying when."""
    sys.stdout.write(f"bad end at {time.time()}\n")  # in one piece
    sys.stdout.flush()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("this rank has had enough")


def main(how: str) -> None:
    """Train until the job ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(64, 8)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.slim(reselect_every=7, resync_every=10),
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        if step == LAST_STEP and hvd.rank() == hvd.size() - 1:
            come_to_a_bad_end(how)


if __name__ == "__main__":
    main(sys.argv[1])
