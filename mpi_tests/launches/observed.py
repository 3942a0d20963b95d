"""Rounds with cores, explorers and resyncs, for whoever watches: ``observed.py FOLDER`` says what the profiler saw."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

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
    give_cause_for_lines()
    hvd.shutdown()


def give_cause_for_lines() -> None:
    """A path is chosen; the ranks start from different parameters and rates; a checkpoint has other options."""
    stepped(torch.nn.Linear(8, 8), hvd.Compression.slim())
    unequal = torch.nn.Linear(8, 8)
    with torch.no_grad():
        unequal.weight.add_(hvd.rank())
    optimizer = stepped(unequal, hvd.Compression.slim(exchange="allgather"), 0.01 * (1 + hvd.rank()))
    optimizer.resync()
    stepped(unequal, hvd.Compression.slim(exchange="allgather", seed=1), state=optimizer.state_dict())


def stepped(
    model: torch.nn.Module, compression: hvd.SlimConfig, rate: float = 0.01, state: dict[str, Any] | None = None
) -> Any:
    """An optimizer that has done one step."""
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), compression=compression)
    if state is not None:
        optimizer.load_state_dict(state)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return optimizer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
