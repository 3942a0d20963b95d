"""The report's charts: loss against bytes and time, where the time of a step went, traffic against dense."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hvd_slim.cli import charts
from hvd_slim.cli.runs import ACTIVITIES, Point, Run

_ACTIVITY_COLOURS = dict(zip(ACTIVITIES, (charts.PURPLE, charts.ORANGE, charts.VERMILION, charts.GREEN)))
_ACTIVITY_WORDS = {
    "select": "choosing a core", "pack": "packing", "wait": "waiting for the exchange", "merge": "merging",
}  # fmt: skip
_REST = "computation and the rest"
_MOST_PANELS = 4


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of the report: ``draw(file, format)`` draws it."""

    name: str
    title: str
    caption: str
    draw: charts.Draw


def all_charts(runs: Sequence[Run], values: Sequence[str]) -> list[Chart]:
    """What there is to draw of these runs."""
    found = [
        Chart(f"{value.replace('/', '_')}", f"{_words(value).capitalize()} against bytes and time",
              "Left: what each rank had sent by then; right: wall-clock time on the runs' own machines.",
              _drawer(_draw_value, runs, value))
        for value in values
    ]  # fmt: skip
    timed = [run for run in runs if run.last.seconds and run.last.step]
    if timed:
        found.append(Chart(
            "time", "Where the time of a step went",
            "Means over the run. Horovod's own optimizer does not say how long it waits: all of a dense run's time is "
            "in the first part.", _drawer(_draw_time, timed),
        ))  # fmt: skip
    slim = [run for run in runs if sum(bool(point.activities) for point in run.points) >= 3][:_MOST_PANELS]
    if slim:
        found.append(Chart(
            "time_course", "The same, step by step", "Between two lines of the log.", _drawer(_draw_time_course, slim)
        ))  # fmt: skip
    found.append(Chart(
        "traffic", "Traffic against dense",
        "What each rank sent in the whole run, by purpose; the mark is what a ring allreduce of every gradient would "
        "have sent in as many steps.", _drawer(_draw_traffic, runs),
    ))  # fmt: skip
    return found


def _drawer(draw: Callable[..., Any], *what: Any) -> charts.Draw:
    def drawn(file: Any, form: str) -> None:
        plt = charts.require()
        figure = draw(plt, *what)
        figure.savefig(file, format=form, dpi=130, metadata={"Date": None} if form == "svg" else None)
        plt.close(figure)

    return drawn


def _tidy(axes: Any, grid: str = "both") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, axis=grid)
    axes.set_axisbelow(True)


def _legend(figure: Any, axes: Any) -> None:
    """Above everything, in rows."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=6, loc="outside upper center", fontsize=9, markerscale=0.5)


def _words(value: str) -> str:
    return value.replace("_", " ")


# Values --------------------------------------------------------------------------------------------------------------


def _draw_value(plt: Any, runs: Sequence[Run], value: str) -> Any:
    figure, (by_bytes, by_time) = plt.subplots(1, 2, figsize=(10, 3.9), sharey=True, layout="constrained")
    for number, run in enumerate(runs):
        points = [point for point in run.points if value in point.values and point.step > 0]
        style = {"color": charts.SERIES[number % len(charts.SERIES)], "label": run.name, "linewidth": 1.5}
        if len(points) <= 40:
            style |= {"marker": "os^Dv"[number % 5], "markersize": 4}
        losses = [point.values[value] for point in points]
        by_bytes.plot([point.bytes_sent / 1e6 for point in points], losses, **style)
        timed = [point for point in points if point.seconds is not None]
        by_time.plot([point.seconds for point in timed], [point.values[value] for point in timed], **style)
    by_bytes.set_ylabel(_words(value))
    by_bytes.set_xlabel("sent by each rank (MB)")
    by_time.set_xlabel("time since the start (s)")
    for axes in (by_bytes, by_time):
        axes.set_xlim(left=0)
        _tidy(axes)
    by_bytes.legend(frameon=False)
    return figure


# Time ----------------------------------------------------------------------------------------------------------------


def step_milliseconds(begin: Point, end: Point) -> dict[str, float]:
    """Mean milliseconds of a step between two points, by activity; the rest is under its own name."""
    steps = end.step - begin.step
    parts = {
        what: 1e3 * (end.activities.get(what, 0.0) - begin.activities.get(what, 0.0)) / steps for what in ACTIVITIES
    }
    whole = 1e3 * ((end.seconds or 0.0) - (begin.seconds or 0.0)) / steps
    return {**parts, _REST: max(whole - sum(parts.values()), 0.0)}


def _draw_time(plt: Any, runs: Sequence[Run]) -> Any:
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.45 * len(runs)), layout="constrained")
    names = [run.name for run in runs][::-1]
    of_run = [step_milliseconds(Point(run.first_step, 0.0, {}, 0.0, 0.0), run.last) for run in runs][::-1]
    left = [0.0] * len(runs)
    for what in (_REST, *ACTIVITIES):
        widths = [parts[what] for parts in of_run]
        colour = _ACTIVITY_COLOURS.get(what, charts.SKY)
        axes.barh(names, widths, left=left, color=colour, label=_ACTIVITY_WORDS.get(what, what), height=0.6)
        left = [a + b for a, b in zip(left, widths)]
    axes.set_xlabel("time of a step (ms)")
    _tidy(axes, "x")
    _legend(figure, axes)
    return figure


def _draw_time_course(plt: Any, runs: Sequence[Run]) -> Any:
    figure, grid = plt.subplots(
        len(runs), 1, figsize=(10, 0.6 + 2.6 * len(runs)), layout="constrained", squeeze=False, sharey=True
    )
    for axes, run in zip(grid[:, 0], runs):
        points = [point for point in run.points if point.activities and point.seconds is not None]
        pairs = [(a, b) for a, b in zip(points, points[1:]) if b.step > a.step]
        steps = [b.step for _, b in pairs]
        of_pair = [step_milliseconds(a, b) for a, b in pairs]
        kinds = (_REST, *ACTIVITIES)
        axes.stackplot(
            steps, *([parts[what] for parts in of_pair] for what in kinds),
            colors=[_ACTIVITY_COLOURS.get(what, charts.SKY) for what in kinds],
            labels=[_ACTIVITY_WORDS.get(what, what) for what in kinds],
        )  # fmt: skip
        axes.set_ylabel("time of a step (ms)")
        axes.set_title(run.name, fontsize=10, loc="left")
        axes.margins(x=0)
        _tidy(axes)
    grid[-1, 0].set_xlabel("step")
    _legend(figure, grid[0, 0])
    return figure


# Traffic -------------------------------------------------------------------------------------------------------------


def _draw_traffic(plt: Any, runs: Sequence[Run]) -> Any:
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.45 * len(runs)), layout="constrained")
    shown = runs[::-1]
    places = range(len(shown))
    left = [0.0] * len(shown)
    phases = list(dict.fromkeys(phase for run in runs for phase, sent in run.last.bytes_by_phase.items() if sent))
    for number, phase in enumerate(phases):
        widths = [run.last.bytes_by_phase.get(phase, 0.0) / 1e6 for run in shown]
        colour = charts.SERIES[number % len(charts.SERIES)]
        axes.barh(places, widths, left=left, color=colour, label=phase, height=0.6)
        left = [a + b for a, b in zip(left, widths)]
    dense = [run.last.dense_bytes / 1e6 for run in shown]
    axes.scatter(
        dense, places, marker="|", s=500, linewidths=2.5, color="black", label="ring allreduce of all", zorder=3
    )
    axes.set_yticks(places, [run.name for run in shown])
    axes.set_xlabel("sent by each rank (MB)")
    axes.set_xlim(left=0, right=1.08 * max([*dense, *left]) or None)
    _tidy(axes, "x")
    _legend(figure, axes)
    return figure
