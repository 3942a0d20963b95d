"""The ``hvd-slim`` command: doctor, plan, bench, kernels and report. ``python -m hvd_slim`` is the same.

Exit statuses: 0 done; 1 a problem was found, or the work failed; 2 the command cannot be carried out as it was given.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from hvd_slim import launchers
from hvd_slim.cli.errors import FAILED, MISUSED, OK, UsageError

_COMMANDS = ("doctor", "plan", "bench", "kernels", "report")
_EPILOG = """examples:
  hvd-slim doctor                                        what is installed and how it fits together
  mpirun -np 4 hvd-slim doctor                           the same as a job would find it, on every rank
  hvd-slim plan 25.6M --ranks 8 --bandwidth 10gbit       what slim would save
  mpirun -np 4 hvd-slim bench 4M                         what a round takes here, beside what is predicted
  hvd-slim kernels 25.6M                                 what choosing, packing and merging take on one core
  hvd-slim report run.jsonl                              run.html: what a run sent, and where its time went
"""


def parser() -> argparse.ArgumentParser:
    """The command line of all verbs."""
    whole = argparse.ArgumentParser(
        "hvd-slim", description="Slim-DP for Horovod: checks, plans, measurements and reports.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    for name in _COMMANDS:
        _module(name).add_parser(verbs)
    return whole


def _module(name: str) -> Any:
    return importlib.import_module(f"hvd_slim.cli.{name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out ``arguments``, by default those of the process; the exit status."""
    try:
        args = _parse(arguments)
        try:
            status: int = _module(args.verb).run(args)
        except UsageError as error:
            print(f"hvd-slim {args.verb}: error: {error}", file=sys.stderr)
            return MISUSED
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has gone, as head does: nothing is wrong. Python must not find the pipe closed again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 130
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed arguments. Of many ranks only the launcher's first says what is wrong with them, or helps."""
    if launchers.detect().rank == 0:
        return parser().parse_args(arguments)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            return parser().parse_args(arguments)
        except SystemExit:
            time.sleep(1.0)  # launchers end the job when one rank fails: the first one speaks before
            raise


__all__ = ["FAILED", "MISUSED", "OK", "UsageError", "main", "parser"]
