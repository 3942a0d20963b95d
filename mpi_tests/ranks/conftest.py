"""Tests that every rank of a job runs together: ``mpirun -np 3 python -m pytest mpi_tests/ranks``, at any rank count.

They run unchanged on one rank without a launcher, and under ``horovodrun`` with MPI or Gloo.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Generator

import numpy as np
import pytest
import torch

import hvd_slim as hvd

_TEST_SECONDS = 120  # a test that takes longer hangs
_VOTE_SECONDS = 20  # ranks that are this late with their outcome wait for something else


def pytest_configure(config: pytest.Config) -> None:
    # Asked by SIGUSR1, a rank shows what all its threads are doing: past pytest's capture, on the real standard error.
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(os.dup(2), "w"), all_threads=True)
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")


def pytest_report_header(config: pytest.Config) -> list[str]:
    if hvd.rank() != 0:
        return []
    import horovod

    network = "MPI" if hvd.mpi_enabled() else "Gloo" if hvd.gloo_enabled() else "none"
    versions = f"torch {torch.__version__}, horovod {horovod.__version__}, numpy {np.__version__}"
    return [f"ranks: {hvd.size()}, this is rank {hvd.rank()}; network: {network}; {versions}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS, method="thread"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Ranks go on to the next test together, also after a failure on some of them.

    A rank that failed half-way through may have left the others inside a collective that it will never join. Then it
    says so and ends the job.
    """
    report = yield
    if report.when == "call" and hvd.size() > 1:
        handle = hvd.allreduce_async(torch.tensor([float(report.failed)]), op=hvd.Sum, name=f"outcome.{item.nodeid}")
        deadline = time.monotonic() + _VOTE_SECONDS
        while report.failed and not hvd.poll(handle):
            if time.monotonic() > deadline:
                message = f"rank {hvd.rank()} failed {item.nodeid} and the others wait\n{report.longreprtext}\n"
                print(message, file=sys.__stderr__, flush=True)
                os._exit(1)
            time.sleep(0.01)
        hvd.synchronize(handle)
    return report
