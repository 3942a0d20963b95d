"""``hvd-slim plan``: what slim would send, how long a round would take, and whether it is worth it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from hvd_slim.cli import charts
from hvd_slim.cli.errors import OK, UsageError
from hvd_slim.cli.options import (
    MODEL_HELP,
    HelpFormatter,
    add_settings,
    bandwidth,
    described,
    parameters_of,
    seconds,
    settings,
    size_and_dtype,
    whole,
)
from hvd_slim.config import SlimConfig
from hvd_slim.planner import Network, Prediction, predict
from hvd_slim.records import table

_EPILOG = """examples:
  hvd-slim plan 25.6M --ranks 8 --bandwidth 1gbit
  hvd-slim plan 25.6M --ranks 8 --bandwidth 10gbit --step-time 200ms --chart plan.png
  hvd-slim plan torchvision.models:resnet50 --ranks 16 --bandwidth 10gbit --step-time 0.2
  hvd-slim plan 25.6M --ranks 8 --bandwidth 1gbit --fractions 0.3:0.15 0.02:0.01 --explorer leader

The network is one on paper: every rank sends at --bandwidth, and each collective takes --latency. What a rank's own
work takes is that of one CPU core. `hvd-slim bench`, under your launcher, measures both.
"""
#: a speed-up below this is not worth replicas that drift apart
_WORTH = 1.05


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting: seconds of a step with it, and how many times as fast it is as plain Horovod.

    Attributes:
        step_seconds: as the setting is.
        overlap_seconds: with ``overlap=True``.
        speedup: if Horovod's exchange hides behind nothing.
        speedup_hidden: if it hides behind the whole computation of a step, which is the best it can do.
        speedup_overlap: likewise, of the setting with ``overlap=True``.
    """

    config: SlimConfig
    prediction: Prediction
    step_seconds: float
    overlap_seconds: float
    speedup: float
    speedup_hidden: float
    speedup_overlap: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every setting's row, fastest first, beside plain Horovod; bytes and seconds a round or step."""

    parameters: int
    ranks: int
    step_time: float
    local_steps: int
    horovod_bytes: float
    horovod_seconds: float
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row:
        """The fastest slim setting."""
        return next(row for row in self.rows if row.config.exchange != "dense")

    def verdict(self) -> str:
        """Whether slim is worth it, in one line."""
        best = self.best
        name = " ".join(described(best.config))
        exchange = f"plain Horovod exchanges for {_ms(self.horovod_seconds)} ms a step"
        if best.speedup_hidden >= _WORTH and self.step_time:
            return (
                f"worth it: {name} is predicted {best.speedup_hidden:.2f} times as fast as plain Horovod, even where "
                f"Horovod hides its exchange behind the whole computation; {best.speedup:.2f} times where it hides none"
            )
        overlapped = min(self.rows, key=lambda row: (row.overlap_seconds, row.config.exchange == "dense"))
        if overlapped.speedup_overlap >= _WORTH and self.step_time:
            return (
                f"worth it with overlap=True: {' '.join(described(overlapped.config))} is then predicted "
                f"{overlapped.speedup_overlap:.2f} times as fast as plain Horovod, even where Horovod hides its "
                f"exchange behind the whole computation; without overlap {overlapped.speedup_hidden:.2f} times"
            )
        if best.speedup >= _WORTH:
            unless = (
                f"if Horovod hides its exchange, {best.speedup_hidden:.2f} times, with overlap=True "
                f"{best.speedup_overlap:.2f}"
                if self.step_time
                else "how much of a step that is, --step-time would say"
            )
            return f"perhaps: {exchange}; with {name} exchanging is {best.speedup:.2f} times as fast; {unless}"
        return (
            f"not worth it: {exchange}, and the fastest slim setting, {name}, would take "
            f"{_ms(best.prediction.seconds / self.local_steps)} ms; keep Compression.none"
        )


def make_plan(
    n: int, dtype: Any, ranks: int, network: Network, configs: list[SlimConfig], step_time: float = 0.0,
    local_steps: int = 1,
) -> Plan:  # fmt: skip
    """Predict every setting of ``configs`` and dense."""
    (dense,) = predict(n, ranks, SlimConfig(exchange="dense"), network, dtype)
    # Plain Horovod sends what the dense path sends, and does none of its own work.
    plain = dense.seconds - dense.work_seconds
    rows = []
    for config in [*configs, SlimConfig(exchange="dense")]:
        (prediction,) = predict(n, ranks, config, network, dtype)
        if prediction.path == "dense" and config.exchange != "dense":
            continue  # so few parameters that all are in the core
        step = prediction.step_seconds(step_time, local_steps, config.overlap)
        overlapped = prediction.step_seconds(step_time, local_steps, overlap=True)
        hidden = max(step_time, plain)
        speedups = (step_time + plain) / step, hidden / step, hidden / overlapped
        rows.append(Row(config, prediction, step, overlapped, *speedups))
    rows.sort(key=lambda row: row.step_seconds)
    if all(row.config.exchange == "dense" for row in rows):
        raise UsageError(f"{n} parameters are too few: with these fractions all of them are in the core")
    return Plan(n, ranks, step_time, local_steps, dense.bytes_sent, plain, tuple(rows))


# The command ---------------------------------------------------------------------------------------------------------


def add_parser(verbs: Any) -> None:
    """``hvd-slim plan``'s command line."""
    parser = verbs.add_parser(
        "plan", help="predict bytes, time and speed-up of every path and setting", epilog=_EPILOG,
        description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--ranks", type=whole(2), required=True, help="processes that train together")
    parser.add_argument(
        "--bandwidth",
        type=bandwidth,
        required=True,
        help="what a rank can send a second: 10gbit (bits), 1.25GB (bytes)",
    )
    parser.add_argument("--latency", type=seconds, default=50e-6, help="of one collective: seconds, or 50us")
    parser.add_argument("--step-time", type=seconds, default=0.0, help="of one rank's computation: seconds, or 200ms")
    parser.add_argument("--local-steps", type=whole(1), default=1, help="optimizer steps a round")
    add_settings(parser)
    parser.add_argument("--chart", metavar="FILE", help="draw bytes and times into this file (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    if args.chart:
        charts.require()
    n, dtype = size_and_dtype(parameters_of(args.model))
    network = Network.uniform(args.bandwidth, args.latency)
    plan = make_plan(n, dtype, args.ranks, network, settings(args), args.step_time, args.local_steps)
    if args.chart:
        charts.write(lambda file, form: charts.draw_plan(plan, file, form), args.chart)
    print(json.dumps(as_json(plan)) if args.json else as_text(plan))
    if args.chart and not args.json:
        print(f"chart: {args.chart}")
    return OK


def as_text(plan: Plan) -> str:
    """The table and the verdict."""
    lines = [
        f"{plan.parameters:,} parameters, {plan.ranks} ranks. Plain Horovod sends {plan.horovod_bytes / 1e6:,.2f} MB a "
        f"step from each rank and takes {_ms(plan.horovod_seconds)} ms for it"
        + (f", beside {_ms(plan.step_time)} ms of computation." if plan.step_time else "."),
        "",
    ]
    header = ["path", "explorer", "fractions", "width", "MB a round", "of dense", "ms", "own work, ms"]
    if plan.step_time:
        header += ["step, ms", "speed-up", "if hidden", "overlap, ms", "if hidden"]
    else:
        header += ["speed-up"]
    rows = []
    for row in plan.rows:
        prediction = row.prediction
        cells = [*described(row.config), f"{prediction.bytes_sent / 1e6:,.2f}", f"{prediction.ratio:.3f}",
                 _ms(prediction.seconds), _ms(prediction.work_seconds)]  # fmt: skip
        cells += [_ms(row.step_seconds)] if plan.step_time else []
        cells += [f"{row.speedup:.2f}"]
        if plan.step_time:
            cells += [f"{row.speedup_hidden:.2f}", _ms(row.overlap_seconds), f"{row.speedup_overlap:.2f}"]
        rows.append(cells)
    lines += [table(header, rows, left=4), ""]
    if plan.step_time:
        lines += [
            "speed-up: against plain Horovod whose exchange hides behind no computation; if hidden: behind all of it",
            "overlap: a step with overlap=True, whose round travels while the next step is computed",
            "",
        ]
    lines.append(plan.verdict())
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    """The same as plain values; bytes and seconds."""
    return {
        **{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name != "rows"},
        "verdict": plan.verdict(),
        "settings": [
            {
                "config": row.config.to_dict(), **dataclasses.asdict(row.prediction), "step_seconds": row.step_seconds,
                "overlap_seconds": row.overlap_seconds, "speedup": row.speedup,
                "speedup_hidden": row.speedup_hidden, "speedup_overlap": row.speedup_overlap,
            }
            for row in plan.rows
        ],
    }  # fmt: skip


def _ms(value: float) -> str:
    milliseconds = value * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
