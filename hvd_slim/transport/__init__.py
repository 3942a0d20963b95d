"""Who carries the bytes."""

from __future__ import annotations

from typing import Any

from hvd_slim.config import MESSAGE_LIMIT, SlimConfig
from hvd_slim.stats import Stats
from hvd_slim.transport.base import Transport

#: of the latest transport that this rank has connected
_number = 0


def agree_on_name(config: SlimConfig, process_set: Any) -> str:
    """A name that no transport of the process set's ranks has had: for the next one. Collective.

    Ranks may have connected a different number before: one joined the job later, another is in several process sets.
    """
    from hvd_slim.transport.horovod import HorovodTransport

    global _number
    seconds = config.warn_after, config.stall_limit
    members = HorovodTransport("hvd_slim.name", process_set, Stats(), MESSAGE_LIMIT, *seconds)
    if members.size > 1:
        _number = max(int(number) for number in members.gather_texts(str(_number)))
    _number += 1
    return f"hvd_slim.{_number}"


def make_transport(config: SlimConfig, name: str, process_set: Any) -> Transport:
    """The transport that the settings name, over a Horovod process set (None for all ranks). Collective."""
    import horovod.torch as hvd

    from hvd_slim.transport.horovod import HorovodTransport
    from hvd_slim.transport.noticeboards import connect

    seconds = config.warn_after, config.stall_limit
    members = HorovodTransport(f"{name}.board", process_set, Stats(), MESSAGE_LIMIT, *seconds)
    ranks = None if process_set is None else process_set.ranks
    board = connect(hvd, members, ranks or range(members.size), name)
    if config.transport == "mpi":
        from hvd_slim.transport.mpi import MpiTransport

        return MpiTransport(name, process_set, Stats(), config.max_message_bytes, *seconds, board)
    return HorovodTransport(name, process_set, Stats(), config.max_message_bytes, *seconds, board)
