"""``hvd-slim doctor``: what is installed, how a job was started, and what will not work or be slow, with remedies."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from hvd_slim import horovod_module, launchers
from hvd_slim.cli import checks, facts
from hvd_slim.cli.errors import FAILED, OK
from hvd_slim.cli.options import HelpFormatter, seconds

_EPILOG = """examples:
  hvd-slim doctor                                     this machine, without a launcher
  mpirun -np 4 hvd-slim doctor                        as a job would find it: rank 0 prints, for all ranks
  srun --mpi=pmix --ntasks=4 hvd-slim doctor --json
  horovodrun -np 4 --gloo hvd-slim doctor

Exit status 1 if there is an error; warnings alone leave it at 0.
"""


def add_parser(verbs: Any) -> None:
    """``hvd-slim doctor``'s command line."""
    parser = verbs.add_parser(
        "doctor", help="check installation, launcher, MPI, threads", epilog=_EPILOG, description=__doc__,
        formatter_class=HelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON: findings, and the facts of every rank")
    parser.add_argument("--timeout", type=seconds, default=60.0, help="seconds to wait for the other ranks")


def run(args: argparse.Namespace) -> int:
    """Look, compare with the other ranks, print on rank 0; the exit status is the same on all. Collective."""
    mine = facts.before_horovod()
    hvd = horovod_module.module
    if hvd is None:
        return _report_alone(checks.findings([mine]), mine, args.json)
    on_gloo = all(os.environ.get(f"HOROVOD_{what}") == "gloo" for what in ("CONTROLLER", "CPU_OPERATIONS"))
    if launchers.without_pmi() and hvd.mpi_built() and not on_gloo:
        # Open MPI would end this process in hvd.init().
        return _report_alone([checks.lonely(str(launchers.lonely_task(1)))], mine, args.json)
    waiting = threading.Timer(args.timeout, _give_up, (mine, args))
    waiting.daemon = True
    waiting.start()
    hvd.init()
    mine = facts.with_horovod(mine, hvd)
    ranks = _of_all_ranks(hvd, mine)
    waiting.cancel()
    found = checks.findings(ranks)
    if hvd.rank() == 0 and (mine["launcher"]["rank"] == 0 or hvd.size() > 1):
        _print(found, ranks, args.json)
    status = FAILED if _worst(found) == checks.ERROR else OK
    if hvd.size() > 1:
        hvd.barrier()  # a rank that fails first would have the launcher end rank 0 before it has printed
    hvd.shutdown()
    return status


def _of_all_ranks(hvd: Any, mine: facts.Facts) -> list[facts.Facts]:
    from hvd_slim.functions import allgather_object

    return allgather_object(mine) if hvd.size() > 1 else [mine]


def _report_alone(found: Sequence[checks.Finding], mine: facts.Facts, as_json: bool) -> int:
    """Where ranks cannot reach each other the launcher's rank 0 prints, and another one only what is wrong."""
    if mine["launcher"]["rank"] == 0:
        _print(found, [mine], as_json)
    else:
        worst = next(finding for finding in found if finding.level == checks.ERROR)
        sys.stderr.write(f"hvd-slim doctor: rank {mine['launcher']['rank']} on {mine['host']}: {worst.text}\n")
    return FAILED


def _give_up(mine: facts.Facts, args: argparse.Namespace) -> None:
    """End this rank, which waits inside Horovod for others that do not come."""
    launcher = mine["launcher"]
    text = f"rank {launcher['rank']} of {launcher['size']} on {mine['host']} waited {args.timeout:g} s for the others"
    remedy = (
        "see what the other ranks print; check that hosts reach each other (firewalls; the network interface that "
        "HOROVOD_GLOO_IFACE or --mca btl_tcp_if_include names)"
    )
    _print([checks.Finding("ranks", checks.ERROR, text, remedy)], [mine], args.json)
    sys.stdout.flush()
    os._exit(FAILED)


def _print(found: Sequence[checks.Finding], ranks: Sequence[facts.Facts], as_json: bool) -> None:
    """One write, so that the launcher does not cut it."""
    worst = _worst(found)
    if as_json:
        answer = {"status": worst, "findings": [dataclasses.asdict(finding) for finding in found], "ranks": list(ranks)}
        sys.stdout.write(json.dumps(answer) + "\n")
        return
    width = max(len(finding.subject) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{finding.level:<8} {finding.subject:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    counts = {level: sum(finding.level == level for finding in found) for level in checks.LEVELS}
    lines.append(f"\n{counts[checks.ERROR]} errors, {counts[checks.WARNING]} warnings, {counts[checks.OK]} ok")
    sys.stdout.write("\n".join(lines) + "\n")


def _worst(found: Sequence[checks.Finding]) -> str:
    return max((finding.level for finding in found), key=checks.LEVELS.index)
