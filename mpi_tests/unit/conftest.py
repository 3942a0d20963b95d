"""Single-process tests: no launcher. Horovod is started, on this one process, only for tests that ask for ``alone``."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from launcher import forget_settings

forget_settings()

# Reproducible runs that leave no file behind. Deadlines would only measure how busy the machine is.
hypothesis.settings.register_profile(
    "hvd_slim",
    database=None,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("hvd_slim")


@pytest.fixture(autouse=True)
def same_numbers_every_run() -> None:
    """One thread, one seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def alone() -> None:
    """Horovod on one process."""
    import horovod.torch as hvd

    hvd.init()
    assert hvd.size() == 1
