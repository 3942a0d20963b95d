"""Saving a run so that it can go on: one file a rank, complete or not there at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import hvd_slim as hvd


class Checkpoints:
    """One file a rank and step, and the file ``latest``, which names the step and is written when all are complete."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._latest = folder, folder / "latest"

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Each rank its own state. Whatever happens on the way, a complete checkpoint stays. Collective."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write(self._file(step, hvd.rank(), hvd.size()), state)
        hvd.barrier()
        if hvd.rank() == 0:
            write(self._latest, {"step": step, "ranks": hvd.size()})
        hvd.barrier()
        for old in self._folder.glob(f"step*.rank{hvd.rank()}of*.pt"):
            if old != self._file(step, hvd.rank(), hvd.size()):
                old.unlink()

    def load(self) -> dict[str, Any] | None:
        """This rank's state in the latest checkpoint, rank 0's if that was written by another number of ranks.

        Raises:
            OSError: a file is missing or damaged; the message names it and the remedy.
        """
        if not self._latest.exists():
            return None
        latest = _read(self._latest)
        rank = hvd.rank() if latest["ranks"] == hvd.size() else 0
        return _read(self._file(latest["step"], rank, latest["ranks"]))

    def _file(self, step: int, rank: int, ranks: int) -> Path:
        return self._folder / f"step{step}.rank{rank}of{ranks}.pt"


def _read(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:  # noqa: BLE001  (torch raises whatever the damage leads to)
        raise OSError(f"{file} cannot be read ({error}); restore it, or remove its folder to begin anew") from None
    return state


def write(file: Path, state: dict[str, Any]) -> None:
    """Under another name first: a file that has its name is complete."""
    unfinished = file.with_name(file.name + ".unfinished")
    with open(unfinished, "wb") as output:
        torch.save(state, output)
        output.flush()
        os.fsync(output.fileno())
    unfinished.replace(file)
