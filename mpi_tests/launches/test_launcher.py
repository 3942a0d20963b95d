"""The launcher itself: a hang becomes a failure with every rank's stacks, and nothing outlives a launch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import launcher
import psutil
import pytest
from launcher import EXPIRED, LEFT_RUNNING, launch

HANG = os.path.join(os.path.dirname(__file__), "hang.py")
PYTHON = [sys.executable, "-c"]
SHOWS_STACKS = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); "


def running(mark: str) -> list[int]:
    """Processes that have ``mark`` in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in " ".join(process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.parametrize("command", [["mpirun"], ["horovodrun", "--disable-cache", "--gloo"]], ids=["MPI", "Gloo"])
def test_a_job_that_hangs(command: list[str]) -> None:
    """It is ended at its limit, with the place where each rank was."""
    for limit in (12, 60):
        finished = launch([*command, "-np", "2", sys.executable, HANG], limit)
        if finished.output.count("hangs from here on") == 2:
            break  # else it takes longer on this machine even to start
    assert finished.status == EXPIRED, finished.output
    assert f"not finished after {limit} seconds" in finished.output
    assert "(rank 0)" in finished.output
    assert "in wait_for_the_others" in finished.output
    assert "(rank 1)" in finished.output
    assert "in sleep_for_ever" in finished.output
    assert finished.seconds < limit + 60
    assert running(HANG) == []


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("raise SystemExit(3)", 3)])
def test_status_and_output_are_the_commands(code: str, status: int) -> None:
    finished = launch([*PYTHON, f"print('said'); {code}"], 60.0)
    assert (finished.status, finished.output) == (status, "said\n")


def test_a_command_that_a_signal_ends() -> None:
    finished = launch([*PYTHON, "import os; os.kill(os.getpid(), 9)"], 60.0)
    assert finished.status == 128 + signal.SIGKILL


def test_what_the_command_left_running_is_a_failure_and_is_ended() -> None:
    """Also in another session, ignoring SIGTERM, with its parent gone."""
    orphan = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(9871)"
    start = f"subprocess.Popen([sys.executable, '-c', {orphan!r}], start_new_session=True)"
    finished = launch([*PYTHON, f"import subprocess, sys; {start}"], 60.0, grace=2.0)
    assert finished.status == LEFT_RUNNING, finished.output
    assert "still running after the command had ended" in finished.output
    assert "time.sleep(9871)" in finished.output
    assert running("time.sleep(9871)") == []


def test_a_process_without_a_handler_is_not_signalled() -> None:
    """SIGUSR1 would end it before it is asked to: here its SIGTERM handler has the last word."""
    handler = "lambda *_: sys.exit(print('asked', flush=True))"
    ready = f"signal.signal(signal.SIGTERM, {handler}); print('ready', flush=True)"
    code = f"import signal, sys, time; {ready}; time.sleep(99)"
    for limit in (2.0, 30.0):
        finished = launch([*PYTHON, code], limit)
        if "ready" in finished.output:
            break  # else it takes longer on this machine even to start
    assert finished.status == EXPIRED
    assert "stacks of" not in finished.output
    assert "asked" in finished.output


def test_a_launcher_that_is_ended_takes_its_job_with_it() -> None:
    code = f"{SHOWS_STACKS} print('ready', flush=True); time.sleep(9872)"
    command = [sys.executable, launcher.__file__, "--limit", "120", "--", *PYTHON, code]
    started = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stdout.readline() == b"ready\n"
    started.terminate()
    assert started.wait(60) == 128 + signal.SIGTERM
    started.stdout.close()
    assert running("time.sleep(9872)") == []


def test_temporary_files_are_removed() -> None:
    finished = launch([*PYTHON, "import tempfile; print(tempfile.mkdtemp())"], 60.0)
    folder = finished.output.strip()
    assert os.path.basename(os.path.dirname(folder)).startswith("hvd_slim.")
    assert not os.path.exists(os.path.dirname(folder))


def test_the_command_line() -> None:
    no_command = subprocess.run([sys.executable, launcher.__file__, "--limit", "1"], capture_output=True, text=True)
    assert no_command.returncode == 2
    assert "no command given" in no_command.stderr
    missing = launch(["no-such-command-anywhere"], 60.0)
    assert missing.status not in (0, EXPIRED)
    assert "no-such-command-anywhere" in missing.output
