"""A few seconds of the soak; ``mpi_tests/soak.py`` runs for as long as one likes."""

from __future__ import annotations

import logging

import pytest
import soak

import hvd_slim as hvd

SEED = 20170929


@pytest.mark.parametrize("number", range(24))
def test_random_case(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """Every rank draws the same case."""
    case = soak.draw(SEED, number)
    print(case)
    with caplog.at_level(logging.ERROR, "hvd_slim"):
        rounds = soak.run(case)
    assert rounds == (0 if hvd.size() == 1 else case.steps // case.options["local_steps"])
