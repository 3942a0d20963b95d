"""The global model never differs between ranks: hundreds of rounds on every path, a checksum of it after each."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch

import hvd_slim as hvd
from ranks.support import slim

ROUNDS = 500 if hvd.size() == 3 else 200  # three are the fewest whose sums depend on the order
WAYS: list[dict[str, Any]] = [
    {"exchange": "dense"},
    {"exchange": "dense", "value_dtype": "int8", "transport": "mpi"},
    {"exchange": "allgather"},
    {"exchange": "allgather", "explorer": "cyclic", "value_dtype": "bfloat16", "transport": "mpi"},
    {"exchange": "allgather", "explorer": "greedy", "transport": "mpi", "resync_every": 77},
    {"exchange": "alltoall", "transport": "mpi"},
    {"exchange": "alltoall", "explorer": "greedy", "value_dtype": "int8", "transport": "mpi"},
    {"exchange": "allreduce", "explorer": "shared", "value_dtype": "int4", "transport": "mpi"},
    {"exchange": "allreduce", "explorer": "leader", "transport": "mpi"},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_the_global_model_never_differs(options: dict[str, Any]) -> None:
    """Parameters in float32 and bfloat16; what every rank holds of w̄, and at the end w̄ entire."""
    if options.get("transport") == "mpi" and not hvd.mpi_enabled():
        pytest.skip("this Horovod runs without MPI")
    generator = torch.Generator().manual_seed(0)
    named = {
        "wide": torch.nn.Parameter(torch.randn(40, 5, generator=generator)),
        "narrow": torch.nn.Parameter(torch.randn(77, generator=generator).bfloat16()),
    }
    generator.manual_seed(1 + hvd.rank())
    optimizer = slim(named, **options)
    checksums = []
    for _ in range(ROUNDS):
        for parameter in named.values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (0.1 * parameter.detach() + noise).to(parameter.dtype)
        optimizer.step()
        if hvd.size() > 1:
            of_round = [tensor.view(torch.uint8) for tensor in optimizer._slim.started._exchange.replicated_values()]
            checksums.append(zlib.crc32(torch.cat(of_round).numpy().data))
    with optimizer.global_parameters():
        whole = torch.cat([parameter.detach().float().view(-1) for parameter in named.values()])
    checksums.append(zlib.crc32(whole.numpy().data))
    rows = hvd.allgather(torch.tensor([checksums]), name="checksums")
    assert (rows == rows[0]).all(), f"from round {int((rows != rows[0]).any(0).nonzero()[0])} on"
    if hvd.size() > 1:
        assert optimizer.stats()["rounds"] == ROUNDS
        assert float((rows[0][:-1].diff() != 0).float().mean()) > 0.9
