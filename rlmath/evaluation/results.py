"""Results of ``rlmath evaluate``: ``results.json``, a table and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmath.monitor.curves import COLORS
from rlmath.monitor.files import finite, replacing

RESULTS_FILE = "results.json"
TABLE_FILE = "results.md"
PLOT_FILE = "results.png"
_HEAD = "benchmark, problems, n, avg@n, pass@n, maj@n, truncated, no answer, ungraded, tokens"


def read_results(folder: Path) -> dict[str, Any]:
    """The entries of finished benchmarks, by name."""
    path = folder / RESULTS_FILE
    return json.loads(path.read_bytes())["benchmarks"] if path.is_file() else {}


def write_results(folder: Path, model: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Rewrite the three files of results. ``entries``: by benchmark: ``metrics``, ``settings``,
    ``problems``, ``about``."""
    with replacing(folder / RESULTS_FILE) as file:
        content = finite({"model": model, "benchmarks": entries})
        file.write((json.dumps(content, indent=2) + "\n").encode())
    with replacing(folder / TABLE_FILE) as file:
        file.write(f"{table(entries)}\n".encode())
    plot(folder / PLOT_FILE, model, entries)


def table(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table with a row per benchmark; shares in percent, with one standard error."""
    head = _HEAD.split(", ")
    rows = [_row(name, entry) for name, entry in entries.items()]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in others)])} |"

    rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), f"|{'|'.join(rule)}|", *map(line, rows)])


def _row(name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    metrics, samples = entry["metrics"], entry["settings"]["samples"]
    error = metrics["accuracy_standard_error"]
    accuracy = _percent(metrics["accuracy"])
    if error is not None and math.isfinite(error):
        accuracy += f" ± {100 * error:.1f}"
    unjudged = sum(metrics[f"{s}_share"] for s in ("bad_gold", "timeout", "error", "ungraded"))
    return (
        name,
        str(entry["problems"]),
        str(samples),
        accuracy,
        _percent(metrics.get(f"pass_at_{samples}", metrics["accuracy"])),
        _percent(metrics.get(f"maj_at_{samples}", metrics["accuracy"])),
        _percent(metrics["truncated_share"]),
        _percent(metrics["no_answer_share"]),
        _percent(unjudged),
        f"{metrics['response_length']:,.0f}",
    )


def plot(path: Path, model: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Plot each benchmark's accuracy, and pass@k and maj@k over k if it has several samples."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = {name: e for name, e in entries.items() if e["settings"]["samples"] > 1}
    figure = Figure(
        figsize=(max(4.0, 1.1 * len(entries) + 2.0) + 5.2 * bool(curves), 4.2), layout="constrained"
    )
    FigureCanvasAgg(figure)
    figure.suptitle(model, fontsize=11)
    panels = 1 + bool(curves)
    axes: list[Any] = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    names = list(entries)
    values = [100 * entries[name]["metrics"]["accuracy"] for name in names]
    errors = [100 * (entries[n]["metrics"]["accuracy_standard_error"] or 0.0) for n in names]
    errors = [e if math.isfinite(e) else 0.0 for e in errors]
    bars = axes[0].bar(names, values, yerr=errors, capsize=4, color=COLORS[0], alpha=0.85)
    labels = [
        f"{v:.1f}\nn={entries[n]['settings']['samples']}"
        for n, v in zip(names, values, strict=True)
    ]
    axes[0].bar_label(bars, labels, fontsize=8, padding=2)
    axes[0].set_title("avg@n, one standard error", fontsize=10, loc="left")
    highest = max(v + e for v, e in zip(values, errors, strict=True))
    axes[0].set_ylim(0, min(112.0, 1.25 * highest + 2.0))
    axes[0].set_ylabel("%")
    axes[0].tick_params(axis="x", labelrotation=30)
    for color, (name, entry) in enumerate(curves.items()):
        for kind, style in (("pass", "-"), ("maj", "--")):
            points = _curve(entry["metrics"], kind)
            axes[1].plot(
                [k for k, _ in points],
                [100 * v for _, v in points],
                style,
                color=COLORS[color % len(COLORS)],
                marker="o",
                markersize=3,
                label=f"{name} {kind}@k",
            )
    if curves:
        axes[1].set_xscale("log", base=2)
        axes[1].set_title("pass@k and maj@k", fontsize=10, loc="left")
        axes[1].set_xlabel("k samples")
        axes[1].set_ylabel("%")
        axes[1].set_ylim(bottom=0)
        axes[1].legend(fontsize=7, frameon=False)
    for axis in axes:
        axis.grid(True, color="#e4e4e4", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)


def _curve(metrics: Mapping[str, float], kind: str) -> list[tuple[int, float]]:
    points = {1: metrics["accuracy"]}
    for name, value in metrics.items():
        if name.startswith(f"{kind}_at_"):
            points[int(name.rpartition("_")[2])] = value
    return sorted(points.items())


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
