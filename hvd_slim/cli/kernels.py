"""``hvd-slim kernels``: what choosing, packing and merging take on one core, beside one copy of the parameters."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from typing import Any

from hvd_slim.cli.errors import OK
from hvd_slim.cli.options import HelpFormatter, add_settings, described, settings, whole
from hvd_slim.records import table

_EPILOG = """examples:
  hvd-slim kernels 25.6M
  hvd-slim kernels 1M 25.6M 138M --fractions 0.3:0.15 0.02:0.01 --explorer shared leader
  hvd-slim kernels 25.6M --explorer random --ranks 8 --json

"copies" is the time in copies of as many parameters; "least" the bytes that must be moved, in those that a copy moves.
Re-selection comes once in --reselect-every rounds.
"""


def add_parser(verbs: Any) -> None:
    """``hvd-slim kernels``' command line."""
    parser = verbs.add_parser(
        "kernels", help="measure a rank's own work, alone", epilog=_EPILOG, description=__doc__,
        formatter_class=HelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("parameters", type=whole(1000), nargs="+", help="numbers of parameters, float32")
    add_settings(parser)
    parser.set_defaults(explorer=["shared", "leader"], fractions=[(0.3, 0.15), (0.02, 0.01)])
    parser.add_argument("--ranks", type=whole(2), default=4, help="made up, on paths where they count")
    parser.add_argument("--repeats", type=whole(1), default=7)
    parser.add_argument("--threads", type=whole(1), default=1, help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import torch

    from hvd_slim import native
    from hvd_slim.kernels import kernels

    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    for n in args.parameters:
        for config in settings(args):
            for kernel in kernels(n, config, config.exchange, args.ranks, args.repeats):
                rows.append({"config": config, **dataclasses.asdict(kernel)})
    if args.json:
        print(json.dumps([{**row, "config": row["config"].to_dict()} for row in rows]))
        return OK
    cells = []
    for row in rows:
        copies, config = row["copies"], row["config"]
        every = config.reselect_every if row["name"] == "re-selection" else 1
        cells.append((
            *described(config)[:3], row["name"], f"{row['n']:,}", f"{1e3 * row['seconds']:.3g}",
            f"{statistics.median(copies):.2f}", f"{min(copies):.2f} to {max(copies):.2f}", f"{row['least']:.2f}",
            f"{statistics.median(copies) / every:.2f}",
        ))  # fmt: skip
    header = ("path", "explorer", "fractions", "work", "parameters", "ms", "copies", "spread", "least", "a round")
    how = "compiled passes" if native.available() else "torch's operators, without compiled passes"
    print(f"{how}, {args.threads} thread(s)\n\n{table(header, cells, left=4)}")
    return OK
