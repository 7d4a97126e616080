"""``curves.png``: a run in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.monitor.files import replacing
from rlmath.monitor.writer import STEP, read_metrics

CURVES_FILE = "curves.png"


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: What it shows.
        unit: Label of the vertical axis.
        series: Tag and its name in the legend; those that a run lacks are left out.
        limits: Least and largest value of the vertical axis; ``None``: as the values have it.
        level: A horizontal line to compare with.
        right: Tag, name and unit of a series with its own axis on the right.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    limits: tuple[float, float] | None = None
    level: float | None = None
    right: tuple[str, str, str] | None = None


PANELS = (
    Panel("Reward", "mean reward of a sample", (("rollout/rewards", "rollout"),)),
    Panel(
        "Accuracy",
        "share of right answers",
        (("rollout/accuracy", "rollout"), ("eval/accuracy", "held-out problems")),
        limits=(0, 1.02),
    ),
    Panel(
        "Response length",
        "tokens, mean",
        (("rollout/response_length", "length"),),
        right=("rollout/truncated_share", "cut off", "share cut off at the limit"),
    ),
    Panel("Entropy", "nats per token", (("train/entropy_loss", "entropy"),)),
    Panel(
        "Importance ratio",
        "ratio, mean over tokens",
        (("train/importance_ratio", "ratio"),),
        level=1.0,
        right=("train/clip_fraction", "clipped", "share of tokens clipped"),
    ),
    Panel("Gradient norm", "L2 norm before clipping", (("train/grad_norm", "norm"),)),
    Panel(
        "Alignment of engine and actor",
        "mean exp|Δ log-prob|  (1 is equal)",
        (("alignment/mean_exp_abs_diff", "mean exp|Δ|"),),
        level=1.0,
    ),
)
_COLOURS = (
    "#1f5fa8",
    "#c8501e",
    "#3a8a4d",
    "#7b4fa3",
    "#8a6d1f",
    "#4aa3a8",
    "#a83a5e",
    "#777777",
    "#d9a441",
    "#20304f",
)


def plot_curves(run_dir: str | Path, title: str | None = None) -> Path:
    """Draw ``<run_dir>/curves.png`` from its ``metrics.jsonl``.

    Panels are those of ``PANELS`` for which there are values, and the split of a step's seconds.

    Args:
        run_dir: The run's folder.
        title: Above the panels; ``None``: the folder's name.

    Raises:
        ValueError: No metric of any panel has been written yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    run_dir = Path(run_dir)
    lines = read_metrics(run_dir)
    panels = [panel for panel in PANELS if any(_points(lines, tag) for tag, _ in panel.series)]
    phases = _phases(lines)
    count = len(panels) + bool(phases)
    if not count:
        raise ValueError(f"{run_dir}: there are no metrics to draw in its metrics.jsonl")
    columns = min(count, 2)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(6.4 * columns, 3.1 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title or run_dir.resolve().name, fontsize=13, fontweight="bold")
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    for ax, panel in zip(axes, panels, strict=False):
        _draw_panel(ax, panel, lines)
    if phases:
        _draw_timing(axes[-1], phases, lines)
    for ax in axes:
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(True, color="#e4e4e4", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines["top"].set_visible(False)
    path = run_dir / CURVES_FILE
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)
    return path


def _draw_panel(ax: Any, panel: Panel, lines: Sequence[dict[str, Any]]) -> None:
    handles = []
    for colour, (tag, name) in zip(_COLOURS, panel.series, strict=False):
        points = _points(lines, tag)
        if points:
            handles += _draw_series(ax, points, name, colour)
    ax.set_title(panel.title, fontsize=11, loc="left")
    ax.set_ylabel(panel.unit)
    if panel.limits:
        ax.set_ylim(*panel.limits)
    if panel.level is not None:
        ax.axhline(panel.level, color="#999999", linewidth=0.9, linestyle="--")
    # An offset such as "1e-7 + 1" beside the axis is easily overlooked.
    ax.ticklabel_format(axis="y", useOffset=False)
    points = _points(lines, panel.right[0]) if panel.right else []
    if panel.right and points:
        _, name, unit = panel.right
        beside = ax.twinx()
        handles += _draw_series(beside, points, f"{name} (right)", _COLOURS[1], faint=True)
        beside.set_ylabel(unit)
        beside.set_ylim(bottom=0)
        beside.spines["top"].set_visible(False)
    if len(handles) > 1:
        ax.legend(handles=handles, fontsize=8, frameon=False, loc="best")


def _draw_series(
    ax: Any, points: Sequence[tuple[int, float]], name: str, colour: str, faint: bool = False
) -> list[Any]:
    steps, values = zip(*points, strict=True)
    # Few points, as of an evaluation every ten steps, are marked one by one.
    marker = "o" if len(points) <= 25 else None
    return list(
        ax.plot(
            steps,
            values,
            color=colour,
            linewidth=1.1 if faint else 1.6,
            alpha=0.6 if faint else 1.0,
            marker=marker,
            markersize=3.5,
            label=name,
        )
    )


def _draw_timing(ax: Any, phases: Sequence[str], lines: Sequence[dict[str, Any]]) -> None:
    timed = [line for line in lines if any(phase in line for phase in phases)]
    steps = [line[STEP] for line in timed]
    values = [[line.get(phase) or 0.0 for line in timed] for phase in phases]
    names = [phase.removeprefix("timing/") for phase in phases]
    colours = [_COLOURS[index % len(_COLOURS)] for index in range(len(phases))]
    if len(steps) == 1:
        bottom = 0.0
        for name, colour, (seconds,) in zip(names, colours, values, strict=True):
            ax.bar(steps, [seconds], bottom=bottom, color=colour, label=name, width=0.4)
            bottom += seconds
    else:
        ax.stackplot(steps, values, labels=names, colors=colours, alpha=0.85)
    ax.set_title("Time of a step", fontsize=11, loc="left")
    ax.set_ylabel("seconds")
    highest = max(sum(seconds) for seconds in zip(*values, strict=True))
    ax.set_ylim(0, 1.35 * highest or 1.0)  # The upper part is for the legend.
    ax.legend(fontsize=8, ncols=min(len(names), 4), frameon=False, loc="upper left")


def _phases(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Tags of phases in the order of their share, ``timing/other`` last."""
    total: dict[str, float] = {}
    for line in lines:
        for tag, value in line.items():
            if tag.startswith("timing/") and tag != "timing/step" and value is not None:
                total[tag] = total.get(tag, 0.0) + value
    return sorted(total, key=lambda tag: (tag == "timing/other", -total[tag]))


def _points(lines: Sequence[dict[str, Any]], tag: str) -> list[tuple[int, float]]:
    return [(line[STEP], line[tag]) for line in lines if line.get(tag) is not None]
