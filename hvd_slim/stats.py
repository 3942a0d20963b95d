"""Counters: bytes as they were handed to the network, seconds as they were spent."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

#: what a collective was for
PHASES = ("core", "explorer", "dense", "select", "resync", "start", "vote", "probe", "roll_call")


@dataclasses.dataclass
class Stats:
    """What one optimizer has sent, received and spent since it was wrapped.

    Bytes are this rank's share of each collective's payload under the usual bandwidth-optimal algorithm, K ranks:
    ring allreduce of B bytes 2(K−1)/K·B each way; allgather of B bytes from every rank (K−1)·B each way; broadcast
    of B bytes (K−1)/K·B each way, the mean over ranks. Framing below the collective is not included.

    Attributes:
        rounds, steps, reselections, resyncs: how many so far.
        collectives: how many were launched, by phase.
        bytes_sent, bytes_received: by phase.
        seconds: by activity (``select``, ``pack``, ``wait``, ``merge``).
        dense_bytes: what a ring allreduce of every gradient in the parameters' own dtype would have sent, for the
            same number of optimizer steps.
    """

    steps: int = 0
    rounds: int = 0
    reselections: int = 0
    resyncs: int = 0
    dense_bytes: float = 0.0
    collectives: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    bytes_sent: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    bytes_received: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("select", "pack", "wait", "merge"), 0.0)
    )

    def count(self, phase: str, sent: float, received: float) -> None:
        """Record one collective of ``phase``; bytes."""
        self.collectives[phase] += 1
        self.bytes_sent[phase] += sent
        self.bytes_received[phase] += received

    @contextlib.contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Add the wall-clock seconds of the block to ``activity``, and name it in the torch profiler."""
        begin = time.perf_counter()
        with torch.profiler.record_function(f"hvd_slim::{activity}"):
            yield
        self.seconds[activity] += time.perf_counter() - begin

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with totals and the ratio to dense added (``ratio`` is None before the first step)."""
        values = dataclasses.asdict(self)
        values["total_bytes_sent"] = sum(self.bytes_sent.values())
        values["total_bytes_received"] = sum(self.bytes_received.values())
        values["ratio"] = values["total_bytes_sent"] / self.dense_bytes if self.dense_bytes else None
        return values
