"""What the facts of all ranks mean: findings, each with a remedy unless all is well. Looks at nothing but the facts."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from hvd_slim import native
from hvd_slim.cli.facts import Facts

OK, WARNING, ERROR = "ok", "warning", "error"
LEVELS = (OK, WARNING, ERROR)

_BUILD = (
    "run `bash scripts/setup.sh`, or `HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 pip install --no-cache-dir horovod`"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: "ok", "warning" (works, but not as well as it could) or "error".
        remedy: what to do; empty if the level is "ok".
    """

    subject: str
    level: str
    text: str
    remedy: str = ""


def findings(ranks: Sequence[Facts]) -> list[Finding]:
    """All of them, from the facts of all ranks in rank order."""
    return [finding for check in _CHECKS for finding in check(ranks)]


def _horovod(ranks: Sequence[Facts]) -> Iterator[Finding]:
    bad = [(rank, facts["horovod"]["problem"]) for rank, facts in enumerate(ranks) if facts["horovod"]["problem"]]
    if bad:
        problem, _, remedy = bad[0][1].partition("; ")
        yield Finding("horovod", ERROR, problem + _on(bad, ranks), remedy or _BUILD)
        return
    first = ranks[0]["horovod"]
    built = first["built"]
    names = ", ".join(name for name, yes in built.items() if yes) or "nothing"
    text = f"{ranks[0]['versions']['horovod'] or 'of unknown version'}, built with {names}; runs on {first['runs_on']}"
    if built["MPI"]:
        yield Finding("horovod", OK, text)
    else:
        yield Finding(
            "horovod", WARNING,
            f"{text}. Without MPI, srun and mpirun start ranks that do not find each other, and transport='mpi' cannot "
            f"be used",
            f"start jobs with `horovodrun --gloo`; or, with mpicc on PATH, {_BUILD}",
        )  # fmt: skip


def _ranks(ranks: Sequence[Facts]) -> Iterator[Finding]:
    first = ranks[0]
    launcher, horovod = first["launcher"], first["horovod"]
    if horovod["problem"]:
        return
    hosts = len({facts["host"] for facts in ranks})
    text = f"{_count(horovod['size'], 'rank')} on {_count(hosts, 'host')}, started by {launcher['name']}"
    if first["lonely"]:
        yield lonely(first["lonely"])
    elif launcher["size"] > 1 and horovod["size"] == 1:
        remedy = "use the mpirun of the MPI that Horovod was built with" + (
            "" if horovod["built"]["MPI"] else ": this Horovod has none; use `horovodrun --gloo`, or build it with MPI"
        )
        yield Finding("ranks", ERROR, f"{launcher['name']} started {launcher['size']} ranks, Horovod sees one", remedy)
    elif launcher["size"] not in (1, horovod["size"]):
        yield Finding(
            "ranks", ERROR, f"{launcher['name']} started {launcher['size']} ranks, Horovod sees {horovod['size']}",
            "use the launcher of the MPI that Horovod was built with",
        )  # fmt: skip
    else:
        yield Finding("ranks", OK, text)


def lonely(problem: str) -> Finding:
    """What ``launchers.lonely_task`` says, of which all but the first sentence is the remedy."""
    what, _, remedy = problem.partition(". ")
    return Finding("ranks", ERROR, what, remedy[0].lower() + remedy[1:])


def _mpi(ranks: Sequence[Facts]) -> Iterator[Finding]:
    first = ranks[0]["mpi"]
    if first is None:
        return
    text = f"{first['library'] or 'library unknown'}, thread level {first['threads'] or 'unknown'}"
    low = [(rank, facts["mpi"]["threads"]) for rank, facts in enumerate(ranks)
           if facts["mpi"] and facts["mpi"]["threads"] not in (None, "multiple")]  # fmt: skip
    if low:
        yield Finding(
            "mpi", WARNING,
            f"{text}{_on(low, ranks)}: below multiple, so transport='mpi' and mpi4py beside Horovod cannot be used",
            "unset HOROVOD_MPI_THREADS_DISABLE; do not initialise MPI with less before hvd.init(); or use an MPI built "
            "with MPI_THREAD_MULTIPLE",
        )  # fmt: skip
    else:
        yield Finding("mpi", OK, text)


def _mpi4py(ranks: Sequence[Facts]) -> Iterator[Finding]:
    if ranks[0]["mpi4py"] is None:
        return
    bad = [(rank, facts["mpi4py"]["problem"]) for rank, facts in enumerate(ranks)
           if facts["mpi4py"] and facts["mpi4py"]["problem"]]  # fmt: skip
    if not bad:
        yield Finding("mpi4py", OK, f"{ranks[0]['versions']['mpi4py']}, on the MPI that Horovod runs on")
        return
    problem, _, remedy = bad[0][1].partition("; ")
    if "THREAD_MULTIPLE" in problem:
        return  # the finding above
    # Loading two MPIs into one process crashes it; a missing mpi4py is missed by transport="mpi" only.
    level = ERROR if "another MPI" in problem else WARNING
    yield Finding("mpi4py", level, problem + _on(bad, ranks), remedy)


def _torch(ranks: Sequence[Facts]) -> Iterator[Finding]:
    first = ranks[0]
    torch, horovod = first["torch"], first["horovod"]
    devices = torch["devices"]
    text = first["versions"]["torch"] + (f", CUDA {torch['cuda']}, {_count(devices, 'device')}" if devices else ", CPU")
    text += f", NCCL {torch['nccl']}" if torch["nccl"] else ""
    if devices and not horovod["problem"] and not horovod["built"]["NCCL"]:
        yield Finding(
            "torch", WARNING, f"{text}, but Horovod is built without NCCL: tensors on GPUs travel through the CPU",
            "build Horovod with HOROVOD_GPU_OPERATIONS=NCCL",
        )  # fmt: skip
        return
    crowded = [
        (rank, facts) for rank, facts in enumerate(ranks)
        if 0 < facts["torch"]["devices"] < facts["horovod"].get("local_size", 1)
    ]  # fmt: skip
    if crowded:
        rank, facts = crowded[0]
        yield Finding(
            "torch", WARNING,
            f"{text}; host {facts['host']} has {_count(facts['horovod']['local_size'], 'rank')} and rank {rank} sees "
            f"{_count(facts['torch']['devices'], 'device')}",
            "fine if each rank is given a device of its own; else start as many ranks a host as it has GPUs",
        )  # fmt: skip
    else:
        yield Finding("torch", OK, text)


def _native(ranks: Sequence[Facts]) -> Iterator[Finding]:
    bad = [(rank, facts["native"]["problem"]) for rank, facts in enumerate(ranks) if facts["native"]["problem"]]
    if bad:
        remedy = (
            "unset HVD_SLIM_NATIVE" if bad[0][1] == native.SWITCHED_OFF
            else "with a C compiler on PATH, `bash scripts/setup.sh`, or install hvd_slim again"
        )  # fmt: skip
        yield Finding(
            "native", WARNING, f"compiled passes are not in use, torch does their work, slower: {bad[0][1]}"
            + _on(bad, ranks), remedy,
        )  # fmt: skip
    elif all(facts["native"]["serves"] for facts in ranks):
        yield Finding("native", OK, "compiled passes are in use for tensors on the CPU")
    else:
        yield Finding("native", OK, "compiled passes are there, for ranks with one thread; with more, torch's are used")


def _threads(ranks: Sequence[Facts]) -> Iterator[Finding]:
    crowded = []
    for host, members in _by_host(ranks).items():
        cores = {core for facts in members for core in facts["cores"]}
        threads = sum(facts["threads"] for facts in members)
        if threads > len(cores):
            crowded.append((host, f"{_count(threads, 'thread')} of {_count(len(members), 'rank')} on host {host} share "
                                  f"{_count(len(cores), 'core')}", max(1, len(cores) // len(members))))  # fmt: skip
    for rank, facts in enumerate(ranks):
        if not crowded and facts["threads"] > len(facts["cores"]):
            crowded.append((facts["host"], f"rank {rank} has {_count(facts['threads'], 'thread')} but is bound to "
                            f"{_count(len(facts['cores']), 'core')}", len(facts["cores"])))  # fmt: skip
    if crowded:
        _, text, each = crowded[0]
        yield Finding(
            "threads", WARNING, f"more threads than cores: {text}",
            f"set OMP_NUM_THREADS={each}, or start fewer ranks a host; with mpirun, `--bind-to none` or "
            f"`--map-by slot:PE=N` gives a rank more cores; with srun, `--cpus-per-task=N`",
        )  # fmt: skip
        return
    first = ranks[0]
    bound = "not bound" if len(first["cores"]) == first["cores_of_host"] else f"bound to {_ranges(first['cores'])}"
    yield Finding("threads", OK, f"{_count(first['threads'], 'thread')} a rank; rank 0 {bound} of "
                                 f"{_count(first['cores_of_host'], 'core')}")  # fmt: skip


def _busy_waiting(ranks: Sequence[Facts]) -> Iterator[Finding]:
    first = ranks[0]
    if len(ranks) == 1 or first["mpi"] is None or "Open MPI" not in (first["mpi"]["library"] or ""):
        return
    for host, members in _by_host(ranks).items():
        cores = {core for facts in members for core in facts["cores"]}
        yields = all(facts["environment"].get("OMPI_MCA_mpi_yield_when_idle", "0") != "0" for facts in members)
        if 2 * len(members) > len(cores) and not yields:
            yield Finding(
                "busy waiting", WARNING,
                f"{_count(len(members), 'rank')} and their Horovod threads on host {host} outnumber "
                f"{_count(len(cores), 'core')}, and Open MPI's waiting threads spin, at the cost of those that compute",
                "with mpirun, `--mca mpi_yield_when_idle 1`; with srun, `export OMPI_MCA_mpi_yield_when_idle=1`",
            )  # fmt: skip
            return
    yield Finding("busy waiting", OK, "waiting ranks leave the cores to those that compute")


def _slurm(ranks: Sequence[Facts]) -> Iterator[Finding]:
    variables = ranks[0]["environment"]
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        return
    text = f"job {job}: {variables.get('SLURM_NTASKS', '?')} tasks on {variables.get('SLURM_JOB_NUM_NODES', '?')} nodes"
    tasks, size = variables.get("SLURM_NTASKS", ""), ranks[0]["horovod"].get("size")
    if size and ranks[0]["launcher"]["size"] > 1 and tasks.isdigit() and int(tasks) > size > 1:
        yield Finding(
            "slurm", WARNING, f"{text}, but {_count(size, 'rank')} train: the others are paid for and idle",
            f"start {tasks} ranks, or ask for fewer tasks",
        )  # fmt: skip
        return
    cores, each = variables.get("SLURM_CPUS_PER_TASK", ""), len(ranks[0]["cores"])
    if ranks[0]["launcher"]["name"] == "srun" and cores.isdigit() and int(cores) > each:
        yield Finding(
            "slurm", WARNING, f"{text}, {cores} cores a task, but rank 0 may use {each}",
            "srun no longer takes --cpus-per-task over from sbatch: export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
        )  # fmt: skip
        return
    yield Finding("slurm", OK, text)


def _agreement(ranks: Sequence[Facts]) -> Iterator[Finding]:
    if len(ranks) == 1:
        return
    same = [(what, [facts["versions"][what] for facts in ranks]) for what in ranks[0]["versions"]]
    same += [("what Horovod was built with", [str(facts["horovod"].get("built")) for facts in ranks])]
    same += [("the MPI library", [str((facts["mpi"] or {}).get("library")) for facts in ranks])]
    same += [(name, [facts["environment"].get(name) for facts in ranks]) for name in _common_variables(ranks)]
    for what, values in same:
        for rank, value in enumerate(values):
            if value != values[0]:
                yield Finding(
                    "agreement", ERROR if what in ranks[0]["versions"] or " " in what else WARNING,
                    f"ranks 0 and {rank} (host {ranks[rank]['host']}) differ in {what}: {values[0]} and {value}",
                    "start every rank in the same environment",
                )  # fmt: skip
                return
    yield Finding("agreement", OK, f"{len(ranks)} ranks answered, with the same versions, builds and variables")


def _common_variables(ranks: Sequence[Facts]) -> list[str]:
    """Variables that all ranks should have alike."""
    own = ("HOROVOD_RANK", "HOROVOD_LOCAL", "HOROVOD_CROSS", "HOROVOD_HOSTNAME", "HOROVOD_GLOO", "CUDA", "SLURM")
    names = {name for facts in ranks for name in facts["environment"]}
    return sorted(name for name in names if not name.startswith(own))


_CHECKS: tuple[Callable[[Sequence[Facts]], Iterator[Finding]], ...] = (
    _horovod, _ranks, _mpi, _mpi4py, _torch, _native, _threads, _busy_waiting, _slurm, _agreement
)  # fmt: skip


# Words ---------------------------------------------------------------------------------------------------------------


def _by_host(ranks: Sequence[Facts]) -> dict[str, list[Facts]]:
    hosts = defaultdict(list)
    for facts in ranks:
        hosts[facts["host"]].append(facts)
    return hosts


def _on(bad: list[tuple[int, str]], ranks: Sequence[Facts]) -> str:
    if len(ranks) == 1 or len(bad) == len(ranks):
        return ""
    return f" (on rank {bad[0][0]}, host {ranks[bad[0][0]]['host']})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _ranges(cores: Sequence[int]) -> str:
    """Cores as text: "core 3", "cores 0-3"."""
    if len(cores) == 1:
        return f"core {cores[0]}"
    gapless = cores[-1] - cores[0] + 1 == len(cores)
    return f"cores {cores[0]}-{cores[-1]}" if gapless else "cores " + ",".join(map(str, cores))
