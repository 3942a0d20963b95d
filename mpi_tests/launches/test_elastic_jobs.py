"""CASES 34, for real: workers of an elastic job are killed, join and leave, all on one machine.

``elastic.py plain …`` is the same with Horovod's own optimizer. Hosts are names of this machine: Horovod never again
uses a host on which a worker has failed. It finds the network interface only if told, with hosts that are one.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest
from launcher import launch

ELASTIC = os.path.join(os.path.dirname(__file__), "elastic.py")
LIMIT = 240.0  # seconds for the whole job, on a busy machine
HOSTS = ["localhost", "127.0.0.1", socket.gethostname()]


def is_here(host: str) -> bool:
    """Whether the name is an address of this machine, so that no ssh is needed."""
    try:
        with socket.socket() as trial:
            trial.bind((socket.gethostbyname(host), 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not all(map(is_here, HOSTS)), reason="needs three names of this machine")


def run(event: str, workers: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The story of an elastic job that begins with ``workers`` workers, one on each host."""
    (folder / "hosts").write_text("".join(f"{host}:1\n" for host in HOSTS[:workers]))
    (folder / "more").write_text("".join(f"{host}:1\n" for host in HOSTS[workers:]))
    discovery = folder / "discovery.sh"
    discovery.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
    discovery.chmod(0o755)
    # Only then do the survivors of a killed worker notice; 30 by default.
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "15")
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "120")
    command = ["horovodrun", "--gloo", "--network-interfaces", "lo", "--disable-cache"]
    command += ["-np", str(workers), "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(discovery)]
    finished = launch([*command, sys.executable, ELASTIC, "slim", event, str(folder)], LIMIT)
    assert finished.status == 0, finished.output
    if event != "leave":  # a worker that is taken away is ended wherever it is
        assert "Traceback" not in finished.output
    return (folder / "story").read_text()


def trained_from(story: str) -> list[tuple[int, int, int]]:
    """(batch, ranks, round) of every start of the training function, in order of appearance."""
    found = re.findall(r"training from batch (\d+) as rank \d+ of (\d+), round (\d+)", story)
    return [(int(batch), int(ranks), int(number)) for batch, ranks, number in found]


def check_end(story: str, ranks: int) -> None:
    """All that are there at the end have run all rounds and hold equal replicas."""
    assert story.count(f"done: {ranks} ranks, replicas equal, round 60") == ranks, story


def test_a_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go back to the last commit, five steps apart, and on without it."""
    story = run("kill", 3, tmp_path, monkeypatch)
    assert trained_from(story) == [(0, 3, 0)] * 3 + [(20, 2, 20)] * 2, story
    check_end(story, 2)


def test_a_worker_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes over rank 0's state: batch, round and all."""
    story = run("join", 2, tmp_path, monkeypatch)
    started = trained_from(story)
    assert started[:2] == [(0, 2, 0)] * 2, story
    batch = started[2][0]
    assert started[2:] == [(batch, 3, batch)] * 3, story
    assert batch >= 25, story
    check_end(story, 3)


def test_a_worker_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on from where they are, without a sync: Horovod skips it when nobody joins."""
    story = run("leave", 3, tmp_path, monkeypatch)
    started = trained_from(story)
    batch = started[3][0]
    assert started == [(0, 3, 0)] * 3 + [(batch, 2, batch)] * 2, story
    assert batch >= 25, story
    assert story.count("replicas equal, round 60") == 2, story
