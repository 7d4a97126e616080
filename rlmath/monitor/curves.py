"""``curves.png``: a run in one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rlmath.monitor.files import replacing
from rlmath.monitor.run_settings import resume_steps
from rlmath.monitor.writer import STEP, read_metrics

CURVES_FILE = "curves.png"


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    # Tag and its name in the legend; those that a run lacks are left out.
    series: tuple[tuple[str, str], ...]
    limits: tuple[float, float] | None = None
    # Minimum range of the vertical axis, in its unit: noise must not look like a signal.
    least_range: float = 0.0
    least_share: float = 0.0  # The same as a share of the largest value.
    # By tag, the tag of its standard error, drawn as a band.
    error: Mapping[str, str] = field(default_factory=dict)
    level: float | None = None
    # Tag, name and unit of a series with its own axis on the right.
    right: tuple[str, str, str] | None = None


PANELS = (
    Panel(
        "Reward",
        "mean, ± standard error",
        (("rollout/rewards", "rollout"),),
        least_range=0.1,
        least_share=0.1,
        error={"rollout/rewards": "rollout/rewards_standard_error"},
    ),
    Panel(
        "Accuracy",
        "share of right answers",
        (("rollout/accuracy", "rollout"), ("eval/accuracy", "held-out problems")),
        limits=(0, 1.02),
        error={"eval/accuracy": "eval/accuracy_standard_error"},
    ),
    Panel(
        "Response length",
        "tokens, mean",
        (("rollout/response_length", "length"),),
        least_range=4,
        least_share=0.2,
        right=("rollout/truncated_share", "truncated", "share of responses truncated"),
    ),
    Panel("Entropy", "nats per token", (("train/entropy_loss", "entropy"),), least_range=0.1),
    Panel(
        "Importance ratio",
        "ratio, mean over tokens",
        (("train/importance_ratio", "ratio"),),
        least_range=0.01,
        level=1.0,
        right=("train/clip_fraction", "clipped", "share of tokens clipped"),
    ),
    Panel(
        "Gradient norm", "L2 norm before clipping", (("train/grad_norm", "norm"),), least_share=0.5
    ),
    Panel(
        "Alignment of engine and actor",
        "mean exp|Δ log-prob|  (1 is equal)",
        (("alignment/mean_exp_abs_diff", "mean exp|Δ|"),),
        least_range=0.001,
        level=1.0,
    ),
)
# A curve of more points than this is drawn pale, behind its moving mean.
MANY = 300
# Phases of a step by name, so that a color means the same phase in every run and in its report.
PHASES = (
    "generate",
    "update",
    "log_probs",
    "grade",
    "evaluate",
    "weight_sync",
    "save",
    "advantage",
    "teacher",
    "values",
)
_OTHER = "other"
COLORS = (
    "#1f5fa8",
    "#c8501e",
    "#3a8a4d",
    "#7b4fa3",
    "#8a6d1f",
    "#2b8c92",
    "#a83a5e",
    "#6b7280",
    "#b98a1a",
    "#20304f",
)


def plot_curves(run_dir: str | Path) -> Path:
    """Draw ``<run_dir>/curves.png`` from its ``metrics.jsonl``; resumes are marked.

    Panels are those of ``PANELS`` for which there are values, each reward where there are several,
    and the split of a step's seconds. Raises ValueError: no metric of any panel has been written
    yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    run_dir = Path(run_dir)
    lines, resumes = read_metrics(run_dir), resume_steps(run_dir)
    panels = [
        panel for panel in panels_of(lines) if any(_points(lines, tag) for tag, _ in panel.series)
    ]
    phases = _phases(lines)
    count = len(panels) + bool(phases)
    if not count:
        raise ValueError(f"{run_dir}: there are no metrics to draw in its metrics.jsonl")
    columns = min(count, 2)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(6.4 * columns, 3.1 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(run_dir.resolve().name, fontsize=13, fontweight="bold")
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
        for step in resumes:
            ax.axvline(step + 0.5, color="#555555", linewidth=0.9, linestyle=":")
        ax.spines["top"].set_visible(False)
    if resumes:
        figure.text(0.995, 0.995, "dotted: resumed", fontsize=8, ha="right", va="top")
    path = run_dir / CURVES_FILE
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)
    return path


def panels_of(lines: Sequence[dict[str, Any]]) -> list[Panel]:
    """``PANELS``, and after the first one each reward separately where there are several."""
    tags = dict.fromkeys(tag for line in lines for tag in line)
    labels = [
        tag.removeprefix("rewards/").removesuffix("/mean")
        for tag in tags
        if tag.startswith("rewards/") and tag.endswith("/mean")
    ]
    labels = [label for label in labels if label != "total"]
    if len(labels) < 2:
        return list(PANELS)
    each = Panel(
        "Rewards",
        "mean of each, before weighting",
        tuple((f"rewards/{label}/mean", label) for label in labels),
        least_range=0.1,
        least_share=0.1,
    )
    return [PANELS[0], each, *PANELS[1:]]


def _draw_panel(ax: Any, panel: Panel, lines: Sequence[dict[str, Any]]) -> None:
    handles = []
    for color, (tag, name) in zip(COLORS, panel.series, strict=False):
        points = _points(lines, tag)
        if points:
            handles += _draw_series(ax, points, name, color)
            _draw_band(ax, lines, tag, panel.error.get(tag), color)
    ax.set_title(panel.title, fontsize=11, loc="left")
    ax.set_ylabel(panel.unit)
    if panel.limits:
        ax.set_ylim(*panel.limits)
    else:
        _widen(ax, panel)
    if panel.level is not None:
        ax.axhline(panel.level, color="#999999", linewidth=0.9, linestyle="--")
    # An offset such as "1e-7 + 1" beside the axis is easily overlooked.
    ax.ticklabel_format(axis="y", useOffset=False)
    points = _points(lines, panel.right[0]) if panel.right else []
    if panel.right and points:
        _, name, unit = panel.right
        beside = ax.twinx()
        handles += _draw_series(beside, points, f"{name} (right)", COLORS[1], faint=True)
        beside.set_ylabel(unit)
        beside.set_ylim(0, 1.3 * beside.get_ylim()[1])  # The upper part is for the legend.
        beside.spines["top"].set_visible(False)
    if len(handles) > 1:
        ax.legend(handles=handles, fontsize=8, frameon=False, loc="best")


def _draw_band(
    ax: Any, lines: Sequence[dict[str, Any]], tag: str, error: str | None, color: str
) -> None:
    both = [line for line in lines if line.get(tag) is not None and line.get(error or "")]
    if both and error:
        steps = [line[STEP] for line in both]
        low, high = ([line[tag] + sign * line[error] for line in both] for sign in (-1, 1))
        ax.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)


def _widen(ax: Any, panel: Panel) -> None:
    """Give the vertical axis its least range, around the curve."""
    low, high = ax.get_ylim()
    least = max(panel.least_range, panel.least_share * max(abs(low), abs(high)))
    missing = max(0.0, least - (high - low))
    floor = 0.0 if ax.dataLim.y0 >= 0 else -math.inf  # Nothing is below it, so neither is the axis.
    ax.set_ylim(max(floor, low - missing / 2), high + missing / 2)


def _draw_series(
    ax: Any, points: Sequence[tuple[int, float]], name: str, color: str, faint: bool = False
) -> list[Any]:
    if len(points) > MANY and not faint:
        ax.plot(*zip(*points, strict=True), color=color, linewidth=0.6, alpha=0.25)
    steps, values = zip(*_smooth(points), strict=True)
    # Few points, as of an evaluation every ten steps, are marked one by one.
    marker = "o" if len(points) <= 25 else None
    return list(
        ax.plot(
            steps,
            values,
            color=color,
            linewidth=1.1 if faint else 1.6,
            alpha=0.6 if faint else 1.0,
            marker=marker,
            markersize=3.5,
            label=name,
        )
    )


def _smooth(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The moving mean of many points, at a thousand of them; few points are left as they are."""
    if len(points) <= MANY:
        return list(points)
    reach, last = round(len(points) / 100), len(points) - 1
    drawn = [*range(0, last, math.ceil(len(points) / 1000)), last]
    near = [points[max(0, at - reach) : at + reach + 1] for at in drawn]
    return [
        (points[at][0], fmean(value for _, value in some))
        for at, some in zip(drawn, near, strict=True)
    ]


def _draw_timing(ax: Any, phases: Sequence[str], lines: Sequence[dict[str, Any]]) -> None:
    timed = [line for line in lines if any(phase in line for phase in phases)]
    curves = [_smooth([(line[STEP], line.get(phase) or 0.0) for line in timed]) for phase in phases]
    steps = [step for step, _ in curves[0]]
    values = [[value for _, value in curve] for curve in curves]
    names = [phase.removeprefix("timing/") for phase in phases]
    colors = [_phase_color(name) for name in names]
    labels = [name.replace("_", " ") for name in names]
    if len(steps) == 1:
        bottom = 0.0
        for name, color, (seconds,) in zip(labels, colors, values, strict=True):
            ax.bar(steps, [seconds], bottom=bottom, color=color, label=name, width=0.4)
            bottom += seconds
    else:
        ax.stackplot(steps, values, labels=labels, colors=colors, alpha=0.85)
    ax.set_title("Time of a step", fontsize=11, loc="left")
    ax.set_ylabel("seconds")
    highest = max(sum(seconds) for seconds in zip(*values, strict=True))
    ax.set_ylim(0, 1.35 * highest or 1.0)  # The upper part is for the legend.
    ax.legend(fontsize=8, ncols=min(len(names), 4), frameon=False, loc="upper left")


def _phase_color(name: str) -> str:
    if name in PHASES:
        return COLORS[PHASES.index(name)]
    return "#bbbbbb" if name == _OTHER else "#9aa1aa"


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
