"""Charts of plans and runs: matplotlib, without a display. Axes have units, and colours are told apart by everybody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_slim.cli.errors import UsageError
from hvd_slim.cli.options import described
from hvd_slim.records import replacing

if TYPE_CHECKING:
    from hvd_slim.cli.plan import Plan

#: Okabe and Ito's
BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#7F7F7F"
)  # fmt: skip
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "#000000")
FORMATS = ("png", "svg", "pdf")

Draw = Callable[[Any, str], None]


def require() -> Any:
    """matplotlib's pyplot.

    Raises:
        UsageError: there is none.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise UsageError(f"charts need matplotlib ({error}); run `pip install matplotlib`") from None
    return plt


def write(draw: Draw, path: str | Path) -> None:
    """Have ``draw(file, format)`` draw a chart into ``path``, whose ending is the format; whole or not at all."""
    path = Path(path)
    form = path.suffix[1:].lower()
    if form not in FORMATS:
        raise UsageError(f"{path} does not end in .{', .'.join(FORMATS)}")
    try:
        with replacing(path) as temporary:
            draw(temporary, form)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from None


def draw_plan(plan: Plan, file: Any, form: str) -> None:
    """Milliseconds a round on the left, megabytes on the right, one bar a setting, plain Horovod as a line.

    What ``overlap`` hides is shown where the plan knows how long a step is.
    """
    plt = require()
    rows = plan.rows[::-1]
    figure, (times, traffic) = plt.subplots(
        1, 2, figsize=(11, 1.6 + 0.34 * len(rows)), sharey=True, layout="constrained"
    )
    names = [", ".join(part for part in described(row.config) if part != "-") for row in rows]
    work = [1e3 * row.prediction.work_seconds for row in rows]
    hidden = [1e3 * min(row.prediction.hideable_seconds, plan.step_time) for row in rows]
    waited = [1e3 * row.prediction.seconds - own - other for row, own, other in zip(rows, work, hidden)]
    times.barh(names, work, color=ORANGE, label="own work")
    times.barh(names, waited, left=work, color=BLUE, label="collectives")
    if plan.step_time:
        left = [own + other for own, other in zip(work, waited)]
        times.barh(names, hidden, left=left, color=SKY, label="hidden by overlap=True")
    times.axvline(1e3 * plan.horovod_seconds, color="black", linestyle="--", label="plain Horovod's exchange")
    times.set_xlabel("time of a round (ms)")
    traffic.barh(names, [row.prediction.bytes_sent / 1e6 for row in rows], color=GREEN, label="sent by each rank")
    traffic.axvline(plan.horovod_bytes / 1e6, color="black", linestyle="--", label="plain Horovod")
    traffic.set_xlabel("traffic of a round (MB)")
    for axes in (times, traffic):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=4)
        # A setting that is far worse than all others would squeeze these into nothing.
        longest = sorted(bar.get_x() + bar.get_width() for bar in axes.patches)
        if longest[-1] > 8 * longest[len(longest) // 2]:
            axes.set_xscale("symlog", linthresh=longest[len(longest) // 2])
    figure.suptitle(f"{plan.parameters:,} parameters on {plan.ranks} ranks, predicted", fontsize=11)
    figure.savefig(file, format=form, dpi=130)
    plt.close(figure)
