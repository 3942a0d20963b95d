"""Rounds of one setting, timed and counted on real ranks: what the planner's predictions are held against.

A setting's time is the mean over a re-selection period: medians of rounds with and without a new core, and of each
round the time of its slowest rank. Bytes are those that ``Stats`` counts, the mean over ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from hvd_slim import horovod_module
from hvd_slim.arena import Arena
from hvd_slim.config import SlimConfig
from hvd_slim.planner import Network
from hvd_slim.probe import measure

Named = list[tuple[str, torch.nn.Parameter]]

_TENSORS = 20
_PLAIN_ROUNDS = 2  # after each that chooses a core
_ALIKE_ROUNDS = 3  # where none differs from another


def stand_in(n: int) -> Named:
    """A model of ``n`` random float32 parameters in a few tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tensors = min(n, _TENSORS)
    sizes = [n * (i + 1) // tensors - n * i // tensors for i in range(tensors)]
    return [(f"{i}", torch.nn.Parameter(torch.randn(size, generator=generator))) for i, size in enumerate(sizes)]


class BenchedSetting:
    """Rounds of one setting on parameters of its own. Building one is collective, and so is all but ``config``.

    Args:
        config: names a path; with "auto" there would be nothing to predict.
        parameters: equal on all ranks; they are changed.
        name: of the operations, the same on all ranks and unlike any other's.
    """

    def __init__(self, config: SlimConfig, parameters: Named, name: str) -> None:
        from hvd_slim.synchronizer import Synchronizer
        from hvd_slim.transport import make_transport

        generator = torch.Generator().manual_seed(1)
        self.config, self.name, self._parameters = config, name, parameters
        for _, parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        self._transport = make_transport(config, name, None)
        self._synchronizer = Synchronizer(config, self._transport, restore_norm=False)
        self._synchronizer.before_step(parameters)
        # Dense rounds are all alike, and so are those of which each chooses a core.
        self._alike = config.exchange == "dense" or config.reselect_every == 1
        self._seconds: dict[str, list[float]] = {"selecting": [], "plain": []}
        self._bytes: dict[str, list[float]] = {"selecting": [], "plain": []}
        self.period(0)  # which does not count

    def period(self, number: int) -> None:
        """A few rounds from the beginning of re-selection period ``number``. Collective."""
        self._synchronizer.rounds = number * self.config.reselect_every
        for kind in ["selecting"] * _ALIKE_ROUNDS if self._alike else ["selecting"] + ["plain"] * _PLAIN_ROUNDS:
            seconds, sent = self._round()
            if number:
                self._seconds[kind].append(seconds)
                self._bytes[kind].append(sent)

    def _round(self) -> tuple[float, float]:
        """(seconds, bytes sent) of one round."""
        hvd = horovod_module.require()
        for _, parameter in self._parameters:
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=1e-4 * (1 + hvd.rank()))
        self._synchronizer.before_step(self._parameters)
        before = sum(self._synchronizer.stats.bytes_sent.values())
        hvd.barrier()
        begin = time.perf_counter()
        self._synchronizer.after_step()
        return time.perf_counter() - begin, sum(self._synchronizer.stats.bytes_sent.values()) - before

    def seconds(self) -> float:
        """Of one round, the mean over a re-selection period. Collective."""
        return self._mean(self._seconds, "seconds", max, statistics.median)

    def seconds_of_periods(self) -> list[float]:
        """Of one round, the mean over each of the periods so far. Collective."""
        hvd = horovod_module.require()
        of_kind = {}
        for kind, values in self._seconds.items():
            if values:
                rounds = zip(*hvd.allgather_object(values, name=f"{self.name}.periods.{kind}"))
                of_kind[kind] = [max(of_round) for of_round in rounds]
        if self._alike:
            return [statistics.median(period) for period in zip(*[iter(of_kind["selecting"])] * _ALIKE_ROUNDS)]
        q = self.config.reselect_every
        plain = zip(*[iter(of_kind["plain"])] * _PLAIN_ROUNDS)
        return [
            (selecting + (q - 1) * statistics.fmean(others)) / q
            for selecting, others in zip(of_kind["selecting"], plain)
        ]

    def bytes_sent(self) -> float:
        """Of one round by each rank, the mean over ranks and over a re-selection period. Collective."""
        return self._mean(self._bytes, "bytes", statistics.fmean, statistics.fmean)

    def _mean(
        self, of_kind: dict[str, list[float]], what: str, of_ranks: Callable[..., float],
        of_rounds: Callable[..., float],
    ) -> float:  # fmt: skip
        hvd = horovod_module.require()
        means = {}
        for kind, values in of_kind.items():
            if values:
                rounds = zip(*hvd.allgather_object(values, name=f"{self.name}.{what}.{kind}"))
                means[kind] = of_rounds([of_ranks(of_round) for of_round in rounds])
        q = self.config.reselect_every
        return (means["selecting"] + (q - 1) * means.get("plain", means["selecting"])) / q

    def network(self, config: SlimConfig | None = None) -> Network:
        """What collectives and a rank's own work cost here, as a run with this setting would find. Collective.

        Args:
            config: find it for these settings instead.
        """
        horovod_module.require().barrier()
        return measure(self._transport, Arena(self._parameters), config or self.config)

    def close(self) -> None:
        """Give back threads and communicators. Not collective."""
        self._transport.close()


def time_plain_horovod(parameters: Named, repeats: int) -> float:
    """Seconds that plain Horovod takes to sum every gradient: the median of the slowest rank's. Collective."""
    hvd = horovod_module.require()
    gradients = [torch.ones_like(parameter) for _, parameter in parameters]
    seconds = []
    for repeat in range(repeats + 1):
        hvd.barrier()
        begin = time.perf_counter()
        hvd.grouped_allreduce_(gradients, op=hvd.Average, name="bench.horovod")
        if repeat:  # the first makes buffers
            seconds.append(time.perf_counter() - begin)
    of_ranks = zip(*hvd.allgather_object(seconds, name="bench.horovod.seconds"))
    return statistics.median(max(of_repeat) for of_repeat in of_ranks)
