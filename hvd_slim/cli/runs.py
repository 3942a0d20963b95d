"""Reading runs for the report: the lines of ``hvd.TrainingLog``, and the examples' one line a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_slim.cli.errors import UsageError
from hvd_slim.records import Record, read_records

#: of a rank's own activities, in the order in which a round has them; the rest of a step is the user's computation
ACTIVITIES = ("select", "pack", "wait", "merge")


@dataclasses.dataclass(frozen=True)
class Point:
    """One line of a run: counters are since the run began, also if it was resumed in between.

    Attributes:
        seconds: since the start; None if the line does not say.
        values: what the user gave: losses, accuracies.
        activities: seconds that the add-on spent, by activity; empty if not told.
    """

    step: int
    seconds: float | None
    values: dict[str, float]
    bytes_sent: float
    dense_bytes: float
    activities: dict[str, float] = dataclasses.field(default_factory=dict)
    bytes_by_phase: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Run:
    """One run, points in order.

    Attributes:
        counted: whether bytes were counted, or follow the ring allreduce's formula.
        first_step: steps done before its first process began, of which nothing is known.
    """

    name: str
    ranks: int
    parameters: int
    counted: bool
    config: dict[str, Any] | None
    first_step: int = 0
    points: list[Point] = dataclasses.field(default_factory=list)

    @property
    def last(self) -> Point:
        """Where it ended."""
        return self.points[-1]


def read_runs(paths: Sequence[str]) -> list[Run]:
    """All runs in these files, in order; names that several have are told apart.

    Raises:
        UsageError: a file is missing, is not JSON lines, or holds no run.
    """
    runs: list[Run] = []
    for path in paths:
        if not Path(path).is_file():
            raise UsageError(f"there is no file {path}; give the JSON lines that hvd.TrainingLog or --json-out wrote")
        try:
            found = _runs(read_records(path))
        except (ValueError, UnicodeDecodeError) as error:
            raise UsageError(str(error)) from None
        except (LookupError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} holds lines that are no run: {type(error).__name__} {error}") from None
        if not found:
            raise UsageError(f"{path} holds no run with a step in it")
        runs += found
    names = [run.name for run in runs]
    for number, run in enumerate(runs):
        if names.count(run.name) > 1:
            run.name = f"{run.name}, {run.ranks} ranks ({names[: number + 1].count(run.name)})"
    return runs


def _runs(records: Sequence[Record]) -> list[Run]:
    runs: list[Run] = []
    base = Point(0, 0.0, {}, 0.0, 0.0)
    for record in records:
        event = record.get("event")
        if event == "start":
            runs, base = _begin(runs, record)
        elif event == "step":
            runs[-1].points.append(_point(record, base))
        elif event is None and "curve" in record:
            runs.append(_example(record))
    return [run for run in runs if run.points]


def _begin(runs: list[Run], record: Record) -> tuple[list[Run], Point]:
    """The runs with one that begins, and the point that its counters start from: another's if it is resumed."""
    nothing = Point(0, 0.0, {}, 0.0, 0.0)
    first = record["first_step"]
    same = [run for run in runs if (run.name, run.ranks) == (record["name"], record["ranks"])]
    if first and same and same[-1].points:
        run = same[-1]
        # What was learned after the checkpoint is learned again.
        run.points = [point for point in run.points if point.step <= first]
        if run.points:
            return [other for other in runs if other is not run] + [run], run.points[-1]
        return [other for other in runs if other is not run] + [run], nothing
    counted = record["bytes_are"] == "counted"
    run = Run(record["name"], record["ranks"], record["parameters"], counted, record["config"], first)
    return [*runs, run], nothing


def _point(record: Record, base: Point) -> Point:
    return Point(
        record["step"], record["seconds"] + (base.seconds or 0.0),
        {name: value for name, value in record["values"].items() if value is not None},
        record["total_bytes_sent"] + base.bytes_sent, record["dense_bytes"] + base.dense_bytes,
        _added(record["activities"], base.activities), _added(record["bytes_sent"], base.bytes_by_phase),
    )  # fmt: skip


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**other, **one}}


def _example(record: Record) -> Run:
    """A run as the examples write it: the curve is there, the counters only of its end."""
    stats: dict[str, Any] = record["stats"] or {}
    run = Run(record["method"], record["ranks"], record["parameters"], record["stats"] is not None, record["config"])
    ratio = record["ratio_to_dense"]
    dense = record["bytes_sent"] / ratio if ratio else 0.0
    for point in record["curve"]:
        last = point is record["curve"][-1]
        names = ("test_loss", record.get("metric", "test_accuracy"))
        run.points.append(
            Point(
                point["step"], point.get("seconds"), {k: point[k] for k in names if point.get(k) is not None},
                point["bytes_sent"], dense * point["step"] / record["steps"],
                stats.get("seconds", {}) if last else {},
                stats.get("bytes_sent", {"dense": record["bytes_sent"]}) if last else {},
            )
        )  # fmt: skip
    if run.points and record.get("training_seconds") is not None and run.points[-1].seconds is None:
        run.points[-1] = dataclasses.replace(run.points[-1], seconds=record["training_seconds"])
    return run
