"""Random models, options and gradients for as long as one likes, each against the oracle or against the laws.

    mpirun -np 3 python mpi_tests/soak.py --seconds 600
    mpirun -np 3 python mpi_tests/soak.py --seed 5 --first 17 --cases 1    # case 17 of seed 5 again

Two kinds of cases alternate. ``oracle``: float32 models; every round is compared, coordinate by coordinate, with the
simulation of K ranks. ``laws``: several dtypes in one model; every round must move the mean of what the ranks hold by
the mean of what they learned and by nothing else, touch no coordinate that was not sent, and leave w̄ with the same bits
everywhere.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from oracle_paths import PathOracle
from ranks.against_oracle import check_rounds
from ranks.support import (
    Case,
    Named,
    Options,
    core_of,
    explored_by,
    flatten,
    gather,
    identical_on_all_ranks,
    random_parameters,
    set_gradients,
)
from torch.nn import Parameter

import hvd_slim as hvd
from hvd_slim.config import VALUE_DTYPES

PATHS = [
    *((explorer, exchange) for explorer in ("random", "cyclic", "greedy") for exchange in ("allgather", "alltoall")),
    ("shared", "allreduce"),
    ("leader", "allreduce"),
    ("random", "dense"),
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "momentum": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=0.01),
    "Nesterov": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


@dataclasses.dataclass(frozen=True)
class SoakCase:
    """Everything about one case, a function of seed and number: the same on all ranks."""

    seed: int
    number: int
    kind: str
    most: int
    steps: int
    optimizer: str
    groups: int
    frozen: bool
    gaps: bool
    options: Options

    @property
    def gradients(self) -> Case:
        """Where its gradients come from."""
        return Case("soak", self.seed * 2**20 + self.number, {})

    def rng(self, what: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.number, what])


def draw(seed: int, number: int) -> SoakCase:
    """Case ``number`` of ``seed``."""
    rng = np.random.default_rng([seed, number, 0])
    explorer, exchange = PATHS[rng.integers(len(PATHS))]
    comm = float(rng.choice([0.05, 0.1, 0.3, 0.5, 1.0, rng.uniform(0.01, 1.0)]))
    value_dtype = str(rng.choice(["float32", *VALUE_DTYPES]))
    transports = ["horovod", "mpi"] if hvd.mpi_enabled() else ["horovod"]
    options: Options = {
        "explorer": explorer,
        "exchange": exchange,
        "comm_fraction": comm,
        "core_fraction": comm * float(rng.choice([0.1, 0.5, 1.0, rng.uniform(0.1, 1.0)])),
        "value_dtype": value_dtype,
        "rounding": str(rng.choice(["nearest", "stochastic"])) if value_dtype in ("int8", "int4") else "nearest",
        "reselect_every": int(rng.integers(1, 7)),
        "resync_every": int(rng.choice([0, 0, 3, 5])),
        "local_steps": int(rng.choice([1, 1, 2, 3])),
        "gradient_weight": float(rng.choice([0.0, 0.3, 1.0, 3.0])),
        "normalize": bool(rng.random() < 0.7),
        "restore_norm": bool(rng.integers(2)),
        "warmup_rounds": int(rng.choice([0, 0, 2, 4])),
        "warmup": str(rng.choice(["dense", "linear"])),
        "on_nonfinite": str(rng.choice(["raise", "skip", "ignore"])),
        "checksum_every": int(rng.choice([0, 1, 3])),
        "max_message_bytes": int(rng.choice([2**31 - 1, 4096, 512])),
        "transport": str(rng.choice(transports)),
        "seed": int(rng.integers(2**63)),
    }
    return SoakCase(
        seed=seed,
        number=number,
        kind="laws" if number % 2 else "oracle",
        most=int(rng.choice([30, 200, 600, 1500])),
        steps=int(rng.integers(3, 10)) * options["local_steps"],
        optimizer=str(rng.choice(list(OPTIMIZERS))),
        groups=int(rng.integers(1, 4)),
        frozen=bool(rng.random() < 0.3),
        gaps=bool(rng.random() < 0.3),
        options=options,
    )


def run(case: SoakCase) -> int:
    """The case, on all ranks. Collective.

    Returns:
        How many rounds were checked.

    Raises:
        AssertionError: something is not as it should be.
    """
    named = random_parameters(case.rng(1), case.most)
    if case.kind == "laws":
        rng = case.rng(2)
        # An adaptive optimizer's squared gradients do not fit into float16.
        able = [t for t in DTYPES if t != torch.float16 or case.optimizer in ("SGD", "momentum", "Nesterov")]
        dtypes = [able[i] for i in rng.permutation(len(able))[: rng.integers(1, 4)]]
        named = {name: other_dtype(p, dtypes[rng.integers(len(dtypes))], rng) for name, p in named.items()}
    frozen = [parameter for parameter in list(named.values())[:1] if case.frozen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in frozen]
    optimizer = wrap(case, named)
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    (check_by_oracle if case.kind == "oracle" else check_by_laws)(case, trained, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, frozen)), "a frozen parameter moved"
    rounds = int(optimizer.stats()["rounds"])
    optimizer._slim.renew()
    return rounds


def other_dtype(parameter: Parameter, dtype: torch.dtype, rng: np.random.Generator) -> Parameter:
    """The parameter in another dtype, its strides kept."""
    values = parameter.detach().to(dtype)
    if dtype.is_complex:
        values = values + 1j * torch.from_numpy(rng.normal(size=tuple(values.shape))).to(dtype)
    return Parameter(values)


def wrap(case: SoakCase, named: Named) -> Any:
    """The case's slim optimizer, with groups of their own learning rates."""
    parameters = list(named.values())
    cuts = [len(parameters) * g // case.groups for g in range(case.groups + 1)]
    lrs = [2.0**-6, 2.0**-7, 2.0**-5]
    groups = [{"params": parameters[a:b], "lr": lr} for a, b, lr in zip(cuts, cuts[1:], lrs)]
    return hvd.DistributedOptimizer(
        OPTIMIZERS[case.optimizer](groups, lr=2.0**-6),
        named_parameters=named.items(),
        compression=hvd.Compression.slim(**case.options),
    )


def give_gradients(case: SoakCase, parameters: list[Parameter], step: int) -> list[np.ndarray]:
    """This rank's gradients, with gaps where the case has them; returns every rank's, 0 in gaps."""
    sizes = [len(flatten([parameter])) for parameter in parameters]
    starts = np.cumsum([0, *sizes])
    of_rank = []
    for rank in range(hvd.size()):
        gradient = case.gradients.gradient(rank, step, int(starts[-1]))
        drawn = np.random.default_rng([case.seed, case.number, 3, step, rank]).random(len(sizes))
        gaps = [i for i in range(len(sizes)) if case.gaps and drawn[i] < 0.3]
        for i in gaps:
            gradient[starts[i] : starts[i + 1]] = 0.0
        of_rank.append(gradient)
        if rank == hvd.rank():
            set_gradients(parameters, gradient)
            for i in gaps:
                parameters[i].grad = None
    return of_rank


# Against the oracle ---------------------------------------------------------------------------------------------------

_NOT_THE_ORACLES = ("transport", "on_nonfinite", "checksum_every", "max_message_bytes")


def check_by_oracle(case: SoakCase, parameters: list[Parameter], optimizer: Any) -> None:
    """Every round is the oracle's."""
    options = {name: value for name, value in case.options.items() if name not in _NOT_THE_ORACLES}
    oracle = PathOracle([flatten(parameters).astype(np.float32)] * hvd.size(), **options)
    check_rounds(
        parameters, optimizer, oracle, case.steps, lambda step: give_gradients(case, parameters, step),
        gamma_may_differ=case.options["restore_norm"],
    )  # fmt: skip


# Against the laws -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A rank's vectors in the order of coordinates, float64: w_k, what it has seen of w̄, and w̄."""

    live: np.ndarray
    seen: np.ndarray
    w_bar: np.ndarray

    def total(self) -> np.ndarray:
        """w̄ + mean of u: what all ranks know together. Collective."""
        return self.w_bar + gather(self.live - self.seen).mean(axis=0)


def look(optimizer: Any) -> Snapshot:
    """At this rank. Collective."""
    exchange = optimizer._slim.synchronizer()._exchange
    live = np.concatenate([segment.read_all().double().numpy() for segment in exchange.arena.segments()])
    seen, w_bar = (
        np.concatenate([flat.double().numpy() for flat in model.flat])
        for model in (exchange.model, exchange.whole_model())
    )
    return Snapshot(live, seen, w_bar)


def check_by_laws(case: SoakCase, parameters: list[Parameter], optimizer: Any) -> None:
    """Every round conserves, keeps its hands off what was not sent, and leaves the same w̄ everywhere."""
    stepped: list[Snapshot] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(look(optimizer)) if hvd.size() > 1 else None)
    for step in range(case.steps):
        give_gradients(case, parameters, step)
        counted = optimizer.stats()
        optimizer.step()
        if hvd.size() == 1:
            assert optimizer.stats()["total_bytes_sent"] == 0
            continue
        if optimizer.stats()["rounds"] > counted["rounds"]:
            check_round(case, optimizer, stepped[-1], counted)
    if hvd.size() > 1:
        optimizer.resync()
        assert identical_on_all_ranks(parameters), "replicas differ after a resync"
        assert all(bool(torch.isfinite(torch.view_as_real(p) if p.is_complex() else p).all()) for p in parameters)


def check_round(case: SoakCase, optimizer: Any, before: Snapshot, counted: dict[str, Any]) -> None:
    """The laws of one round, from just before it to now. Collective."""
    exchange = optimizer._slim.synchronizer()._exchange
    after, size = look(optimizer), hvd.size()
    assert identical_on_all_ranks(exchange.replicated_values()), "w̄ differs between ranks"
    if not case.options["restore_norm"]:
        # Each merge rounds to the parameter's dtype, each sum over ranks to the value dtype.
        unit = np.concatenate(
            [np.full(g.stop - g.start, max(torch.finfo(g.dtype).eps, torch.finfo(exchange.arena.value_dtype).eps))
             for g in exchange.arena.groups]
        )  # fmt: skip
        size_of_numbers = gather(np.maximum.reduce([np.abs(before.live), np.abs(before.seen), np.abs(after.live)]))
        bound = (2 * size + 8) * unit * (size_of_numbers.max(axis=0) + np.abs(before.w_bar) + np.abs(after.w_bar))
        wrong = np.abs(after.total() - before.total()) > bound
        assert not wrong.any(), f"coordinates {np.flatnonzero(wrong)[:10]} gained or lost something"
    now = optimizer.stats()
    dense = any(now["collectives"][phase] > counted["collectives"][phase] for phase in ("dense", "resync"))
    if not dense and case.options["explorer"] in ("random", "cyclic", "shared"):
        number = now["rounds"] - 1
        untouched = np.ones(len(after.live), dtype=bool)
        untouched[core_of(optimizer)] = False
        for rank in range(size) if exchange.replicated else [hvd.rank()]:
            if exchange.explorer.count:
                untouched[explored_by(optimizer, number, rank)] = False
        np.testing.assert_array_equal(after.live[untouched], before.live[untouched])
        np.testing.assert_array_equal(after.seen[untouched], before.seen[untouched])


# A run ----------------------------------------------------------------------------------------------------------------


def go_on(cases_left: float, deadline: float) -> bool:
    """Rank 0 decides for all. Collective."""
    return bool(hvd.broadcast_object(cases_left > 0 and time.monotonic() < deadline, root_rank=0, name="go_on"))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=None, help="default: until the time is over")
    parser.add_argument("--seconds", type=float, default=None, help="default: until the cases are done")
    arguments = parser.parse_args()
    if arguments.cases is None and arguments.seconds is None:
        parser.error("give --cases, --seconds or both")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    logging.getLogger("hvd_slim").setLevel(logging.ERROR)
    hvd.init()
    seed = hvd.broadcast_object(
        int(time.time()) if arguments.seed is None else arguments.seed, root_rank=0, name="seed"
    )
    begin = time.monotonic()
    deadline = begin + (math.inf if arguments.seconds is None else arguments.seconds)
    left = math.inf if arguments.cases is None else arguments.cases
    kinds: collections.Counter[str] = collections.Counter()
    rounds, number = 0, arguments.first
    if hvd.rank() == 0:
        print(f"soak: seed {seed}, {hvd.size()} ranks", flush=True)
    while go_on(left, deadline):
        case = draw(seed, number)
        try:
            rounds += run(case)
        except BaseException:  # noqa: BLE001  (the others may wait for this rank: the whole job has to end)
            again = f"--seed {seed} --first {number} --cases 1"
            text = f"rank {hvd.rank()}: {again} with {hvd.size()} ranks failed: {case}\n{traceback.format_exc()}"
            print(text, file=sys.stderr, flush=True)
            os._exit(1)
        kinds[case.kind] += 1
        number, left = number + 1, left - 1
    if hvd.rank() == 0:
        print(
            f"soak: seed {seed}, {hvd.size()} ranks: {sum(kinds.values())} cases ({dict(kinds)}), {rounds} rounds, "
            f"{time.monotonic() - begin:.0f} s, all as they should be",
            flush=True,
        )


if __name__ == "__main__":
    main()
