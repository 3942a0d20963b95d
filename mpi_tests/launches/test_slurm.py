"""The batch scripts on a real SLURM, which runs on this machine for as long as these tests do."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launcher import has_signal, launch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"
TRAIN = str(ROOT / "mpi_tests" / "launches" / "train.py")
PREEMPTIBLE = str(ROOT / "examples" / "resume_and_preempt.py")
CLUSTER = ["bash", str(SCRIPTS / "testcluster.sh"), "--dir", f"/tmp/hvd_slim.slurm.{os.getpid()}"]
LIMIT = 120.0  # seconds for a job, on a busy machine
SECONDS_TO_END = 60.0  # from the bad end of one rank to the end of the job

sys.path.insert(0, str(ROOT / "examples"))
from datasets import default_folder  # noqa: E402

every_launcher = pytest.mark.parametrize("script", ["srun", "mpirun", "horovodrun"])


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    for first in range(17100, 30000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as trial:
                    trial.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError("no free ports")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment to submit from, while the cluster is up."""
    missing = [tool for tool in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"a SLURM of our own needs root, and {' '.join(missing) or 'nothing else'} (slurm-wlm, munge)")
    up = subprocess.run([*CLUSTER, "--port", str(free_ports(4)), "up"], capture_output=True, text=True, timeout=60)
    if up.returncode == 2 and "does not let root make namespaces" in up.stderr:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stderr
    try:
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        # Nodes of the test cluster reach each other over loopback, which Open MPI leaves out by itself.
        networks = {f"OMPI_MCA_{layer}_tcp_if_include": "lo" for layer in ("btl", "oob")}
        yield {**os.environ, **networks, "PATH": path, "SLURM_CONF": up.stdout.strip().partition("=")[2]}
    finally:
        down = subprocess.run([*CLUSTER, "down"], capture_output=True, text=True, timeout=60)
        assert down.returncode == 0, down.stderr
        assert not Path(CLUSTER[3]).exists()
        commands = subprocess.run(["ps", "-e", "-o", "args"], capture_output=True, text=True, check=True).stdout
        assert CLUSTER[3] not in commands


class Job:
    """A job, submitted."""

    def __init__(self, slurm: dict[str, str], folder: Path, *arguments: str) -> None:
        self._slurm, self._output = slurm, folder / f"output.{time.monotonic_ns()}"
        self.number = self._run("sbatch", "--parsable", f"--output={self._output}", *arguments).strip()

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._slurm, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def facts(self) -> dict[str, str]:
        """What SLURM says of it."""
        words = self._run("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.partition("=")[::2] for word in words)

    def wait_for(self, text: str) -> None:
        """Until it has printed ``text``."""
        deadline = time.monotonic() + LIMIT
        while text not in self.output:
            assert time.monotonic() < deadline, f"no {text!r} in: {self.output}"
            time.sleep(0.1)

    def ended(self) -> tuple[str, int]:
        """(its state, its exit status) once it has come to its end."""
        deadline = time.monotonic() + LIMIT
        while (facts := self.facts())["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
            assert time.monotonic() < deadline, f"{facts} {self.output}"
            time.sleep(0.3)
        return facts["JobState"], int(facts["ExitCode"].split(":")[0])

    def signal(self) -> None:
        """Tell the batch script to stop, as SLURM does before the time limit."""
        self._run("scancel", "--batch", "--signal=USR1", self.number)


def script(name: str) -> str:
    return str(SCRIPTS / f"{name}.sbatch")


# Every script --------------------------------------------------------------------------------------------------------


@every_launcher
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_find_each_other(script: str, nodes: int, slurm: dict[str, str], tmp_path: Path) -> None:
    """As many as tasks, on as many hosts as nodes, with the threads that were asked for."""
    doctor = ["--threads", "1", "--", sys.executable, "-m", "hvd_slim", "doctor"]
    job = Job(slurm, tmp_path, f"--nodes={nodes}", "--ntasks=2", str(SCRIPTS / f"{script}.sbatch"), *doctor)
    assert job.ended() == ("COMPLETED", 0), job.output
    starter = "srun" if script == "srun" else "mpirun (Open MPI)"
    assert f"2 ranks on {nodes} host{'s' * (nodes > 1)}, started by {starter}" in job.output
    assert "1 thread a rank" in job.output
    assert f"job {job.number}: 2 tasks on {nodes} nodes" in job.output
    assert re.search(r"\b0 errors", job.output), job.output


@every_launcher
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_fails_fails_the_job(script: str, how: str, slurm: dict[str, str], tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "--ntasks=2", str(SCRIPTS / f"{script}.sbatch"), sys.executable, TRAIN, how)
    state, status = job.ended()
    ended = time.time()
    assert state == "FAILED", job.output
    assert status != 0
    happened = re.search(r"bad end at ([\d.]+)", job.output)
    assert happened, job.output
    assert ended - float(happened[1]) < SECONDS_TO_END
    assert "queued again" not in job.output


# Preemption ----------------------------------------------------------------------------------------------------------


def training(folder: Path) -> list[str]:
    options = ["--epochs", "2", "--steps-per-epoch", "150", "--batch-size", "4", "--vote-every", "5"]
    return [sys.executable, PREEMPTIBLE, "--folder", str(folder), *options, "--reselect-every", "7"]


def sums(output: str) -> str:
    found: list[str] = re.findall(r"checksums of the ranks' parameters: ([0-9a-f ]+)", output)
    assert len(found) == 1, output
    return found[0].strip()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Stops the ranks that train in ``folder`` for the time of the block, and until one of them has been signalled.

    SLURM takes its time, and the training might come to its end before.
    """
    training = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command[1:2] == [PREEMPTIBLE] and str(folder) in command:
            training.append(process)
    assert len(training) == 2
    for process in training:
        process.suspend()
    try:
        yield
        deadline = time.monotonic() + LIMIT
        while not any(has_signal("ShdPnd", process.pid, signal.SIGUSR1) for process in training):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for process in training:
            process.resume()


@pytest.mark.skipif(
    not Path(default_folder(), "train-images-idx3-ubyte.gz").exists(), reason="Fashion-MNIST is not on this machine"
)
@every_launcher
def test_a_preempted_job_resumes_to_the_same_bits(script: str, slurm: dict[str, str], tmp_path: Path) -> None:
    """Under srun a job of a higher partition takes the nodes; the others are told as before a time limit."""
    job = Job(slurm, tmp_path, "--ntasks=2", str(SCRIPTS / f"{script}.sbatch"), *training(tmp_path / "checkpoints"))
    job.wait_for("training: process")
    with held(tmp_path / "checkpoints"):
        if script == "srun":
            urgent = Job(slurm, tmp_path, "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1")
        else:
            job.signal()
    if script == "srun":
        assert urgent.ended() == ("COMPLETED", 0)
    assert job.ended() == ("COMPLETED", 0), job.output
    assert job.facts()["Restarts"] == "1"
    assert "asked to stop" in job.output
    step = re.findall(r"stopped and saved after step (\d+)", job.output)
    assert len(step) == 1, job.output
    assert f"resumed after step {step[0]}" in job.output

    uninterrupted = [*training(tmp_path / "none"), "--resync-at", step[0]]
    whole = launch(["mpirun", "-np", "2", *uninterrupted], LIMIT)
    assert whole.status == 0, whole.output
    assert sums(job.output) == sums(whole.output)


def test_ranks_that_stop_one_after_the_other_are_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    """srun ends the last ones, and says so by another status; the job's second start ends well."""
    stops = '[ "$SLURM_PROCID" = 0 ] && trap "exit 75" USR1 || trap "" USR1'
    trains = f'[ "$SLURM_RESTART_COUNT" = 1 ] && exit; {stops}; echo training; while :; do sleep 0.1; done'
    job = Job(slurm, tmp_path, "--ntasks=2", script("srun"), "sh", "-c", trains)
    deadline = time.monotonic() + LIMIT
    while job.output.count("training\n") < 2:
        assert time.monotonic() < deadline, job.output
        time.sleep(0.1)
    job.signal()
    assert job.ended() == ("COMPLETED", 0), job.output
    assert job.facts()["Restarts"] == "1", job.output


def test_a_job_that_is_told_not_to_is_not_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "--ntasks=2", script("srun"), "--no-requeue", "sh", "-c", "exit 75")
    assert job.ended() == ("FAILED", 75)
    assert job.facts()["Restarts"] == "0"


# A study -------------------------------------------------------------------------------------------------------------


def test_a_study_is_one_job_a_line(slurm: dict[str, str], tmp_path: Path) -> None:
    settings = tmp_path / "settings.txt"
    settings.write_text("--comm-fraction 0.1\n--explorer shared\n")
    tell = ["sh", "-c", 'echo "$SLURM_PROCID has $*"', "sh", "--out", "{line}.jsonl"]
    command = ["sbatch", "--wait", "--array=1-3", "--ntasks=2", f"--output={tmp_path}/%a", script("study")]
    done = subprocess.run(
        [*command, str(settings), "--", *tell], env=slurm, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode != 0  # there is no third line
    for line, options in ((1, "--comm-fraction 0.1"), (2, "--explorer shared")):
        said = (tmp_path / str(line)).read_text()
        assert {f"{rank} has --out {line}.jsonl {options}" for rank in (0, 1)} <= set(said.splitlines()), said
    assert "has lines 1 to 2, not 3" in (tmp_path / "3").read_text()


# srun without PMIx ---------------------------------------------------------------------------------------------------


def test_tasks_that_do_not_find_each_other_are_refused(slurm: dict[str, str], tmp_path: Path) -> None:
    """Training raises at its first step, and the doctor says the same."""
    gloo = "env HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo "  # Open MPI aborts by itself
    for command in (f"{gloo}{sys.executable} {TRAIN} killed", f"{sys.executable} -m hvd_slim doctor"):
        job = Job(slurm, tmp_path, "--ntasks=2", f"--wrap=srun --mpi=none {command}")
        state, _ = job.ended()
        assert state == "FAILED", job.output
        assert "SLURM started 2 tasks, but Horovod sees one rank" in job.output
        assert "srun --mpi=pmix" in job.output
        assert "bad end" not in job.output


def test_a_batch_script_may_train_alone(slurm: dict[str, str], tmp_path: Path) -> None:
    """SLURM_NTASKS is 2 there, too, but nothing was started beside it."""
    job = Job(slurm, tmp_path, "--ntasks=2", f"--wrap={sys.executable} {TRAIN} raises")
    job.ended()
    assert "bad end at" in job.output
    assert "SLURM started" not in job.output


# Without a cluster ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["srun", "mpirun", "horovodrun", "study"])
def test_outside_a_job_a_script_says_how_it_is_used(name: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    (tmp_path / "settings").write_text("--a 1\n")
    first = [str(tmp_path / "settings")] if name == "study" else []

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", script(name), *first, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)

    told = run("--help")
    assert told.returncode == 0, told.stderr
    assert f"{name}.sbatch" in told.stdout
    assert "--no-requeue" in told.stdout
    for mistake, said in (
        ([], "no training command"),
        (["--fly", "x"], "unknown option --fly"),
        (["--threads", "0", "x"], "--threads 0"),
        (["python", "x"], "this is a batch script"),
    ):
        done = run(*mistake)
        assert done.returncode == 2, mistake
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_the_cluster_checks_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for arguments in (["fly"], [], ["--nodes", "0", "up"], ["--dir", "here", "up"], ["--dir", str(tmp_path), "down"]):
        done = subprocess.run(["bash", CLUSTER[1], *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode == 2, arguments
        assert len(done.stderr.splitlines()) == 1, done.stderr
    assert (tmp_path / "a file").exists()
