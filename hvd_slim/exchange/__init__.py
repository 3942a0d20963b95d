"""How a round moves: one file a path."""

from __future__ import annotations

from hvd_slim.exchange.allgather import AllgatherExchange
from hvd_slim.exchange.allreduce import AllreduceExchange
from hvd_slim.exchange.alltoall import AlltoallExchange
from hvd_slim.exchange.base import Exchange
from hvd_slim.exchange.dense import DenseExchange

PATHS: dict[str, type[Exchange]] = {
    "allgather": AllgatherExchange,
    "alltoall": AlltoallExchange,
    "allreduce": AllreduceExchange,
    "dense": DenseExchange,
}
