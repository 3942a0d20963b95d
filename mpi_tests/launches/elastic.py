"""A worker of an elastic job: ``elastic.py plain|slim kill|join|leave FOLDER``.

``plain`` is Horovod's own optimizer and state, ``slim`` hvd_slim's. In ``kill`` the last rank ends itself by SIGKILL
half-way. ``FOLDER/hosts`` is what the job's discovery script prints: in ``join`` rank 0 adds the host that is in
``FOLDER/more``, in ``leave`` it takes away the last one. Every worker says what it sees, and at the end whether all
replicas are equal, in a line of ``FOLDER/story``.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

STEPS, COMMIT_EVERY, EVENT_AT = 60, 5, 22
WAIT_AT = 40  # so many steps later Horovod has to have noticed
SIZE_AFTER = {"join": 3, "leave": 2}


def say(text: str, folder: Path) -> None:
    """One line of the story, in one piece."""
    story = os.open(folder / "story", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(story, f"[{os.environ.get('HOROVOD_HOSTNAME')} pid {os.getpid()}] {text}\n".encode())
    os.close(story)


def main(kind: str, event: str, folder: Path) -> None:
    """Train, through the event, to the end."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    hvd: Any = importlib.import_module("horovod.torch" if kind == "plain" else "hvd_slim")
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compression = hvd.Compression.none if kind == "plain" else hvd.Compression.slim(reselect_every=7, resync_every=10)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    state.register_reset_callbacks([lambda: say(f"reset: rank {hvd.rank()} of {hvd.size()}", folder)])

    @hvd.elastic.run
    def train(state: Any) -> None:
        say(f"training from batch {state.batch} as rank {hvd.rank()} of {hvd.size()}{rounds(optimizer)}", folder)
        while state.batch < STEPS:
            optimizer.zero_grad()
            model(torch.randn(12, 16)).square().mean().backward()
            optimizer.step()
            state.batch += 1
            if state.batch == EVENT_AT and not (folder / "happened").exists():
                happen(event, hvd, folder)
            if state.batch % COMMIT_EVERY == 0:
                state.commit()
            while state.batch == WAIT_AT and hvd.size() != SIZE_AFTER.get(event, hvd.size()):
                time.sleep(0.1)
                state.commit()  # raises when the hosts are others

    train(state)
    if kind == "slim":
        optimizer.resync()
    sums = hvd.allgather_object([float(parameter.detach().double().sum()) for parameter in model.parameters()])
    say(f"done: {hvd.size()} ranks, replicas {'equal' if sums.count(sums[0]) == len(sums) else 'differ'}"
        f"{rounds(optimizer)}", folder)  # fmt: skip


def rounds(optimizer: Any) -> str:
    """The slim optimizer's round, as text."""
    slim = optimizer.state_dict().get("hvd_slim")
    return f", round {slim['rounds']}" if slim else ""


def happen(event: str, hvd: Any, folder: Path) -> None:
    """What this rank does half-way."""
    if event == "kill" and hvd.rank() == hvd.size() - 1:
        (folder / "happened").touch()
        say(f"killed at {time.time():.1f}", folder)
        os.kill(os.getpid(), signal.SIGKILL)
    if event == "join" and hvd.rank() == 0:
        (folder / "happened").touch()
        hosts = folder / "hosts"
        hosts.write_text(hosts.read_text() + (folder / "more").read_text())
        say("a host was added", folder)
    if event == "leave" and hvd.rank() == 0:
        (folder / "happened").touch()
        hosts = folder / "hosts"
        hosts.write_text("".join(hosts.read_text().splitlines(keepends=True)[:-1]))
        say("a host was taken away", folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
