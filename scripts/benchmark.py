"""Steps of a real training loop, each system beside its peers and beside no communication at all.

    python scripts/benchmark.py table                     4 hosts at 1 Gbit/s, the VGG-style model; needs root
    python scripts/benchmark.py table --hosts 2 4 --rates 100mbit 1gbit --models cnn vgg gpt --repeats 3
    python scripts/benchmark.py show out/benchmark.jsonl  tables and chart of runs that are there
    mpirun -np 2 python scripts/benchmark.py run --system leader --model vgg     one measurement, one JSON line

``table`` makes hosts out of network namespaces (scripts/netlab.sh), runs every system in turn, as often as --repeats
says, and prints medians with their spread; JSON lines and a chart go to --out. Times are only comparable within one run
of it. Every rank computes with one thread, Open MPI yields when idle.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

Step = Callable[[], Any]

ROOT = Path(__file__).parent.parent
CEILING = "no communication"
SPARSE = {"comm_fraction": 0.02, "core_fraction": 0.01, "exchange": "allreduce"}
SLIM: dict[str, dict[str, Any]] = {
    "slim reference": {},
    "slim reference, overlap": {"overlap": True},
    "shared 0.3": {"explorer": "shared", "exchange": "allreduce"},
    "shared 0.3, overlap": {"explorer": "shared", "exchange": "allreduce", "overlap": True},
    "leader 0.02": {**SPARSE, "explorer": "leader"},
    "leader 0.02, overlap": {**SPARSE, "explorer": "leader", "overlap": True},
    "leader 0.02, overlap, mpi4py": {**SPARSE, "explorer": "leader", "overlap": True, "transport": "mpi"},
    "leader 0.02, overlap, bfloat16": {**SPARSE, "explorer": "leader", "overlap": True, "value_dtype": "bfloat16"},
    "leader 0.02, overlap, int8": {**SPARSE, "explorer": "leader", "overlap": True, "value_dtype": "int8"},
    "shared 0.02": {**SPARSE, "explorer": "shared"},
    "shared 0.02, overlap": {**SPARSE, "explorer": "shared", "overlap": True},
    "shared 0.02, overlap, mpi4py": {**SPARSE, "explorer": "shared", "overlap": True, "transport": "mpi"},
    "shared 0.02, overlap, bfloat16": {**SPARSE, "explorer": "shared", "overlap": True, "value_dtype": "bfloat16"},
    "shared 0.02, overlap, int8": {**SPARSE, "explorer": "shared", "overlap": True, "value_dtype": "int8"},
}
HOROVOD = ("Horovod float32", "Horovod float16")
DDP = ("DDP float32", "DDP float16", "DDP PowerSGD rank 2")
BASES = ("Horovod float32", "DDP float32")
SYSTEMS = [CEILING, *HOROVOD, *DDP, *SLIM]


# One measurement -----------------------------------------------------------------------------------------------------


def model_and_batch(name: str, seed: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A network, and a batch of made-up data with its answers."""
    from models import SmallCNN, SmallGPT, VggStyle

    torch.manual_seed(0)
    model = {"cnn": SmallCNN, "vgg": VggStyle, "gpt": SmallGPT}[name]()
    generator = torch.Generator().manual_seed(seed)
    if name == "gpt":
        text = torch.randint(0, 96, (8, 65), generator=generator)
        return model, text[:, :-1], text[:, 1:].reshape(-1)
    return model, torch.randn(32, 1, 28, 28, generator=generator), torch.randint(0, 10, (32,), generator=generator)


def horovod_optimizer(system: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer of the systems that Horovod carries."""
    import hvd_slim as hvd

    if system in SLIM:
        compression: Any = hvd.Compression.slim(**SLIM[system])
    else:
        compression = hvd.Compression.fp16 if system == "Horovod float16" else hvd.Compression.none
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)


def ddp_model(system: str, model: torch.nn.Module, rank: int, size: int, address: str) -> torch.nn.Module:
    """PyTorch's own data parallelism on Gloo."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    if system != "DDP PowerSGD rank 2":
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        if system == "DDP float16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return ddp
    # With several buckets, collectives of this hook meet the wrong partners on Gloo.
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=10_000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def run(args: argparse.Namespace) -> None:
    """Train for a few steps; rank 0 prints seconds a step. Collective."""
    from mpi4py import MPI

    import hvd_slim as hvd

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    of_horovod = args.system not in DDP
    if of_horovod:
        hvd.init()
    model, inputs, answers = model_and_batch(args.model, world.rank)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    network = model
    if of_horovod and args.system != CEILING:
        optimizer = horovod_optimizer(args.system, model, optimizer)
    elif not of_horovod:
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"tcp://{socket.gethostbyname(socket.gethostname())}:{free.getsockname()[1]}"
        network = ddp_model(args.system, model, world.rank, world.size, world.bcast(address))

    def steps(number: int) -> float:
        """Seconds that the slowest rank took for each."""
        begin = time.perf_counter()
        for _ in range(number):
            optimizer.zero_grad()
            F.cross_entropy(network(inputs).view(answers.numel(), -1), answers).backward()
            optimizer.step()
        return world.allreduce(time.perf_counter() - begin, op=MPI.MAX) / number

    warm = steps(args.warmup)
    # Of slim, a whole re-selection period: a core is chosen in as many steps as in a long run. Others' steps are alike.
    number = args.steps if args.system in SLIM else max(3, min(args.steps, int(args.seconds / warm)))
    slowest = steps(number)
    if args.system in SLIM:
        optimizer.synchronize()
    if world.rank == 0:
        record = {
            "system": args.system, "model": args.model, "ranks": world.size, "network": args.network,
            "parameters": sum(p.numel() for p in model.parameters()), "steps": number, "seconds": slowest,
            "path": optimizer._slim.state_dict().get("path") if args.system in SLIM else None,
            "stats": optimizer.stats() if args.system in SLIM else None,
        }  # fmt: skip
        sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()
    if of_horovod:
        hvd.shutdown()
    else:
        # A thread of Gloo may not yet have let go of the last gradient, and aborts in an interpreter that is ending.
        MPI.Finalize()
        os._exit(0)


# The table -----------------------------------------------------------------------------------------------------------


def table(args: argparse.Namespace) -> int:
    """Every cell in turn, and again; then the table and the chart."""
    args.out.mkdir(parents=True, exist_ok=True)
    lines = args.out / "benchmark.jsonl"
    cells = [(k, rate, model, s) for k in args.hosts for rate in args.rates for model in args.models
             for s in args.systems]  # fmt: skip
    with lines.open("w") as file:
        for repeat in range(args.repeats):
            for hosts, rate, model, system in cells:
                print(f"[benchmark] {repeat + 1}/{args.repeats}: {hosts} hosts, {rate}, {model}, {system}",
                      file=sys.stderr)  # fmt: skip
                command = [
                    "bash", str(ROOT / "scripts/netlab.sh"), "--limit", "300", "with", str(hosts), rate, "--",
                    sys.executable, str(Path(__file__)), "run", "--system", system, "--model", model,
                    "--network", rate, "--steps", str(args.steps), "--warmup", str(args.warmup),
                    "--seconds", str(args.seconds),
                ]  # fmt: skip
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment())
                found = [line for line in done.stdout.splitlines() if line.startswith("{")]
                if done.returncode or not found:
                    print(f"[benchmark] failed with status {done.returncode}: {' '.join(command)}", file=sys.stderr)
                    continue
                file.write(found[0] + "\n")
                file.flush()
    return 0 if show([lines], args.out) == len(cells) * args.repeats else 1


def show(lines: list[Path], out: Path) -> int:
    """Print the tables of some files, each file for itself, and draw the chart; how many records there are."""
    records = [{**json.loads(line), "run": file.stem} for file in lines for line in file.read_text().splitlines()]
    print(markdown(records))
    draw(records, out / "benchmark.png")
    return len(records)


def environment() -> dict[str, str]:
    """One thread a rank; root may start mpirun, since only root can make network namespaces."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **root, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def grouped(records: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, list[float]]]:
    """Milliseconds a step of every system, by (run, hosts, network, model)."""
    groups: dict[tuple[Any, ...], dict[str, list[float]]] = collections.defaultdict(dict)
    for record in records:
        of_group = groups[record["run"], record["ranks"], record["network"], record["model"]]
        of_group.setdefault(record["system"], []).append(1e3 * record["seconds"])
    return groups


def markdown(records: list[dict[str, Any]]) -> str:
    """A table for each group: medians, spread, and ratios to the ceiling and to dense peers."""
    parts = []
    for (run, ranks, network, model), systems in grouped(records).items():
        bases = [statistics.median(systems[name]) if name in systems else None for name in (CEILING, *BASES)]
        rows = [
            f"### {run}: {model}, {ranks} hosts, {network}\n",
            f"| system | ms a step, median | least to most | of the ceiling | times {' | times '.join(BASES)} |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for name, times in systems.items():
            middle = statistics.median(times)
            ratios = [f"{base / middle:.2f}" if base else "" for base in bases]
            rows.append(f"| {name} | {middle:.0f} | {min(times):.0f} to {max(times):.0f} | {' | '.join(ratios)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Bars of the median, the spread as a line; one panel for each group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = grouped(records)
    if not groups:
        return
    rows = sum(len(systems) + 3 for systems in groups.values())
    heights = {"height_ratios": [len(systems) + 1 for systems in groups.values()]}
    figure, axes = pyplot.subplots(len(groups), 1, gridspec_kw=heights, figsize=(9, 1 + 0.32 * rows), squeeze=False)
    for axis, ((run, ranks, network, model), systems) in zip(axes[:, 0], groups.items()):
        middles = [statistics.median(times) for times in systems.values()]
        spread = [[m - min(t) for m, t in zip(middles, systems.values())],
                  [max(t) - m for m, t in zip(middles, systems.values())]]  # fmt: skip
        colours = ["tab:blue" if name in SLIM else "tab:green" if name == CEILING else "tab:gray" for name in systems]
        axis.barh(list(systems), middles, xerr=spread, color=colours)
        axis.invert_yaxis()
        axis.set_xlabel("milliseconds a step")
        title = f"{run}: {model}, {ranks} hosts, {network}; slim blue, peers gray, no communication green"
        axis.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="one measurement, under a launcher")
    runs.add_argument("--system", choices=SYSTEMS, required=True)
    runs.add_argument("--model", choices=("cnn", "vgg", "gpt"), default="vgg")
    runs.add_argument("--network", default="as it is", help="name of the network, for the record")
    tables = verbs.add_parser("table", help="every system in turn, on hosts of its own making")
    tables.add_argument("--hosts", type=int, nargs="+", default=[4])
    tables.add_argument("--rates", nargs="+", default=["1gbit"])
    tables.add_argument("--models", nargs="+", choices=("cnn", "vgg", "gpt"), default=["vgg"])
    tables.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    tables.add_argument("--repeats", type=int, default=3)
    tables.add_argument("--out", type=Path, default=ROOT / "out")
    shows = verbs.add_parser("show", help="tables and chart of runs that are there")
    shows.add_argument("lines", type=Path, nargs="+", help="files of JSON lines that table wrote")
    shows.add_argument("--out", type=Path, default=ROOT / "out", help="where the chart goes")
    for verb in (runs, tables):
        verb.add_argument("--steps", type=int, default=20, help="that are timed; a re-selection period by default")
        verb.add_argument("--warmup", type=int, default=5, help="steps before")
        verb.add_argument("--seconds", type=float, default=15.0, help="enough for systems with equal steps")
    args = parser.parse_args()
    if args.verb == "table":
        return table(args)
    if args.verb == "show":
        args.out.mkdir(parents=True, exist_ok=True)
        return 0 if show(args.lines, args.out) else 1
    run(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
