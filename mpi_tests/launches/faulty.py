"""A small training job of which one rank does something wrong: ``faulty.py FAULT FOLDER [--transport mpi]``.

All that rank k prints goes to the file FOLDER/k.
Faults after which a rank can go on are tried one after the other by ``faulty.py several``: each rank says what it was
told, and after how many seconds. All other faults end the job, except ``stopped``, which only holds it up.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

import hvd_slim as hvd
from hvd_slim.transport import noticeboards

STEPS, FAULTY_STEP, FAULTY_RANK = 10, 6, 1
#: (warn_after, stall_limit) in seconds; where nobody is to lose patience they are out of a busy machine's reach
LIMITS = {"several": (60.0, 100.0), "stopped": (4.0, 60.0)}
OTHER_LIMITS = 3.0, 8.0
SECONDS_TO_HEAR = 10.0  # for last words, which a busy machine may take long to deliver

Named = dict[str, Parameter]


def say(text: str) -> None:
    """One line of this rank's story, in one piece."""
    sys.stdout.write(f"rank {hvd.rank()} says: {text}\n")
    sys.stdout.flush()


def make_model() -> Named:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (4, 3), "second": (5,), "third": (2, 3, 2)}
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def wrap(named: Named, fault: str, transport: str, lr: float = 0.05, **options: Any) -> Any:
    """A slim optimizer whose patience fits the fault."""
    warn_after, stall_limit = LIMITS.get(fault, OTHER_LIMITS)
    limits = {"warn_after": warn_after, "stall_limit": stall_limit, "transport": transport, "exchange": "allgather"}
    return hvd.DistributedOptimizer(
        torch.optim.SGD(named.values(), lr=lr, momentum=0.9),
        named_parameters=named.items(),
        compression=hvd.Compression.slim(**{**limits, **options}),
    )


def step(named: Named, optimizer: Any, number: int, spoil: Callable[[Named], None] = lambda named: None) -> None:
    """One step, on gradients of this rank's own that ``spoil`` may change."""
    generator = torch.Generator().manual_seed(1000 * hvd.rank() + number)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    spoil(named)
    optimizer.step()


# Faults that end the job, or hold it up -------------------------------------------------------------------------------


def train(fault: str, folder: Path, transport: str) -> None:
    """Ten steps, of which the faulty rank does the seventh in its own way; then the ranks' means of a loss."""
    named = make_model()
    optimizer = wrap(named, fault, transport)
    for number in range(STEPS):
        if number == FAULTY_STEP and hvd.rank() == FAULTY_RANK:
            say(f"does it at {time.time()}")
            commit(fault, folder, optimizer)
            if fault == "skipped-step":
                continue
        step(named, optimizer, number)
    if fault == "extra-step" and hvd.rank() == FAULTY_RANK:
        step(named, optimizer, STEPS)
    if fault == "lone-resync" and hvd.rank() == FAULTY_RANK:
        optimizer.resync()
    if fault == "lone-resync":
        step(named, optimizer, STEPS)
    if fault != "early-end":
        hvd.allreduce(torch.tensor(float(hvd.rank())), name="loss")
    with optimizer.global_parameters():
        total = sum(float(parameter.detach().double().sum()) for parameter in named.values())
    say(f"done: round {optimizer.state_dict()['hvd_slim']['rounds']}, sum {total!r}")


def commit(fault: str, folder: Path, optimizer: Any) -> None:
    """What the faulty rank does before its step."""
    if fault == "exception":
        raise RuntimeError("this rank has had enough")
    if fault == "broken-thread":
        transport = optimizer._slim.synchronizer().transport
        transport._progress._go_on = broken
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        # Until all others have warned.
        others = [str(folder / str(rank)) for rank in range(hvd.size()) if rank != hvd.rank()]
        warned = 'for file; do until grep -q "waiting for" "$file"; do sleep 0.1; done; done'
        waker = ["sh", "-c", f"{warned}; kill -CONT {os.getpid()}", "sh", *others]
        subprocess.Popen(waker, start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "early-end":
        hvd.shutdown()
        raise SystemExit(0)


def broken() -> bool:
    """In the background thread's place."""
    raise ZeroDivisionError("the thread broke")


# Faults after which all can go on -------------------------------------------------------------------------------------


def other_shape(named: Named) -> Named:
    return {**named, "second": Parameter(torch.zeros(6))}


def other_dtype(named: Named) -> Named:
    return {**named, "second": Parameter(torch.zeros(5, dtype=torch.float64))}


def other_order(named: Named) -> Named:
    return {name: named[name] for name in ("second", "first", "third")}


MODELS = {"shape": other_shape, "dtype": other_dtype, "order": other_order}
OPTIONS: dict[str, dict[str, Any]] = {"option": {"comm_fraction": 0.4}, "seed": {"seed": 7}}


def put(value: float) -> Callable[[Named], None]:
    """Puts ``value`` into a gradient."""

    def spoil(named: Named) -> None:
        assert named["second"].grad is not None
        named["second"].grad[3] = value

    return spoil


def drop(named: Named) -> None:
    """Leaves a gradient out."""
    named["first"].grad = None


@contextlib.contextmanager
def heard(row: str) -> Any:
    """Says what the block was told, by an error or by a line in the log, and how long it took."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvd_slim").addHandler(handler)
    begin = time.monotonic()
    try:
        yield
    except (hvd.RankMismatchError, hvd.NonFiniteError) as error:
        lines.append(f"{type(error).__name__}: {error}")
    finally:
        logging.getLogger("hvd_slim").removeHandler(handler)
    say(f"<{row}> {time.monotonic() - begin:.2f} s: {' | '.join(lines) or 'nothing'}")


def try_several(transport: str) -> None:
    """Row by row; each begins afresh, on the same job."""
    faulty = hvd.rank() == FAULTY_RANK
    for row, change in MODELS.items():
        named = change(make_model()) if faulty else make_model()
        with heard(row):
            step(named, wrap(named, "several", transport), 0)
    for row, options in OPTIONS.items():
        named = make_model()
        with heard(row):
            step(named, wrap(named, "several", transport, **(options if faulty else {})), 0)
    named = make_model()
    optimizer = wrap(named, "several", transport, lr=0.01 if faulty else 0.05)
    step(named, optimizer, 0)
    with heard("learning rate"):
        optimizer.resync()
    for row, value in (("NaN", math.nan), ("Inf", math.inf)):
        named = make_model()
        optimizer = wrap(named, "several", transport)
        step(named, optimizer, 0)
        with heard(row):
            step(named, optimizer, 1, put(value) if faulty else lambda named: None)
    named = make_model()
    optimizer = wrap(named, "several", transport)
    with heard("missing gradient"):
        for number in range(3):
            step(named, optimizer, number, drop if faulty else lambda named: None)
    with optimizer.global_parameters():
        sums = hvd.allgather_object([float(parameter.detach().double().sum()) for parameter in named.values()])
    say(f"done: replicas {'equal' if sums.count(sums[0]) == len(sums) else 'differ'}")


def warm_up() -> None:
    """Let torch load what its first step needs, which takes seconds on a busy machine; then begin together."""
    named = make_model()
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(named.values(), lr=0.05, momentum=0.9).step()
    hvd.barrier()


def main() -> None:
    """The command line."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--transport", default="horovod")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    output = os.open(arguments.folder / str(hvd.rank()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    warm_up()
    noticeboards._SECONDS_TO_HEAR = SECONDS_TO_HEAR
    if arguments.fault == "several":
        try_several(arguments.transport)
    else:
        train(arguments.fault, arguments.folder, arguments.transport)


if __name__ == "__main__":
    main()
