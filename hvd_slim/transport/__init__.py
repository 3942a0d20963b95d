"""Who carries the bytes."""

from __future__ import annotations

from typing import Any

from hvd_slim.config import SlimConfig
from hvd_slim.stats import Stats
from hvd_slim.transport.base import Transport


def make_transport(config: SlimConfig, name: str, process_set: Any) -> Transport:
    """The transport that the settings name, over a Horovod process set (None for all ranks). Collective for "mpi"."""
    if config.transport == "mpi":
        from hvd_slim.transport.mpi import MpiTransport

        return MpiTransport(name, process_set, Stats(), config.max_message_bytes)
    from hvd_slim.transport.horovod import HorovodTransport

    return HorovodTransport(name, process_set, Stats(), config.max_message_bytes, config.warn_after, config.stall_limit)
