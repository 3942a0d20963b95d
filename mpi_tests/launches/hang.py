"""A job that hangs: rank 0 waits in a collective that the others never enter."""

from __future__ import annotations

import faulthandler
import signal
import time

import horovod.torch as hvd
import torch


def wait_for_the_others() -> None:
    """Rank 0's way of hanging."""
    hvd.allreduce(torch.ones(1), name="never answered")


def sleep_for_ever() -> None:
    """Every other rank's."""
    while True:
        time.sleep(1)


faulthandler.register(signal.SIGUSR1, all_threads=True)
hvd.init()
print("hangs from here on", flush=True)
if hvd.rank() == 0:
    wait_for_the_others()
else:
    sleep_for_ever()
