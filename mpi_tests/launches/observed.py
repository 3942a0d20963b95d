"""Rounds with cores, explorers and resyncs, for whoever watches: ``observed.py FOLDER`` says what the profiler saw."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

import hvd_slim as hvd


def main(folder: Path) -> None:
    """Twelve steps."""
    logging.basicConfig(level=logging.INFO, format="LOG %(name)s %(message)s")
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.slim(exchange="allgather", reselect_every=4, resync_every=6),
    )
    with torch.profiler.profile() as profile, hvd.TrainingLog(folder / "run.jsonl", optimizer) as log:
        for _ in range(12):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            log.step(loss=loss)
    names = sorted({event.key for event in profile.key_averages() if event.key.startswith("hvd_slim::")})
    (folder / f"profile.{hvd.rank()}").write_text("\n".join(names))
    measured = torch.nn.Linear(8, 8)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(measured.parameters(), lr=0.01), compression=hvd.Compression.slim()
    )
    measured(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
