"""The lab of hosts on one machine: ranks reach each other by its network only, it is counted, and nothing is left."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

NETLAB = os.path.join(os.path.dirname(__file__), "..", "..", "scripts", "netlab.sh")
NAME = f"t{os.getpid()}"
HOSTS, REPEATS, VALUES = 2, 10, 500_000
# What each of the two hosts sends when the reduction is bandwidth-optimal: 2(K−1)/K of the float32 values.
EXPECTED_BYTES = REPEATS * 2 * (HOSTS - 1) / HOSTS * VALUES * 4

ALLREDUCE = f"""
import socket, sys, torch, horovod.torch as hvd
hvd.init()
for _ in range({REPEATS}):
    total = hvd.allreduce(torch.full(({VALUES},), float(hvd.rank() + 1)), op=hvd.Sum, name="total")
assert (total == 3).all() and hvd.size() == 2 and hvd.local_size() == 1
assert socket.gethostbyname(socket.gethostname()) == f"10.77.0.{{hvd.rank() + 1}}"
sys.stdout.write(f"<right on {{socket.gethostname()}}>")  # in one piece, whatever the other rank writes
sys.stdout.flush()
hvd.shutdown()
"""


def netlab(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One verb of this test's own lab."""
    command = ["bash", NETLAB, "--name", NAME, "--limit", "60", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=100)


def traces() -> list[str]:
    """What there is of the lab on this machine: namespaces, files, processes."""
    patterns = ("/run/netns/hvd-netlab-{}-*", "/etc/netns/hvd-netlab-{}-*", "/run/hvd-netlab-{}")
    files = [path for pattern in patterns for path in glob.glob(pattern.format(NAME))]
    # The daemons of a job that has ended may wait as zombies, without a command line, for the first process.
    commands = subprocess.run(["ps", "-e", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return files + [line for line in commands.splitlines() if f"hvd-netlab-{NAME}" in line]


@pytest.fixture
def lab() -> Iterator[None]:
    """The hosts, up."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool in ("ip", "tc", "mpirun"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not in PATH")
    done = netlab("up", str(HOSTS), "1gbit")
    if done.returncode == 2 and "does not let us make the network" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        netlab("down")


def counters() -> list[dict[str, int]]:
    done = netlab("counters")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.usefixtures("lab")
def test_the_kernel_counts_what_an_allreduce_sends() -> None:
    before = counters()
    done = netlab("run", "--", sys.executable, "-c", ALLREDUCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"<(.*?)>", done.stdout)) == ["right on host0", "right on host1"]
    for old, new in zip(before, counters()):
        for direction in ("sent_bytes", "received_bytes"):
            # Headers, and Horovod's coordination, come on top.
            assert EXPECTED_BYTES < new[direction] - old[direction] < 1.2 * EXPECTED_BYTES, (old, new)

    assert netlab("up", "2", "1gbit").returncode == 2  # not twice
    assert netlab("down").returncode == 0
    assert traces() == []


@pytest.mark.usefixtures("lab")
def test_nothing_outlives_a_command_that_fails_or_takes_too_long() -> None:
    daemon = f"setsid sh -c 'sleep 60; : hvd-netlab-{NAME}' >/dev/null 2>&1 &"
    assert netlab("run", "sh", "-c", f"{daemon} exit 3").returncode == 3
    assert not [line for line in traces() if "sleep" in line]
    assert netlab("run", "--limit", "1", "sh", "-c", f"{daemon} sleep 60").returncode == 124
    assert netlab("down").returncode == 0
    assert traces() == []


@pytest.mark.usefixtures("lab")
def test_arguments_are_checked_before_anything_is_made() -> None:
    netlab("down")
    for arguments in (["up", "0", "1gbit"], ["up", "2", "1gb"], ["up", "2"], ["run", "true"], ["counters"], ["fly"]):
        done = netlab(*arguments)
        assert done.returncode == 2, arguments
        assert len(done.stderr.splitlines()) == 1, done.stderr
    assert traces() == []
