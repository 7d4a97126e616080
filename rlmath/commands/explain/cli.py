"""``rlmath explain RUN --steps 400:450 [--against 350:400]``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmath.commands.explain.outcomes import read_window
from rlmath.commands.explain.shares import METRICS, Cause, Explanation, explain
from rlmath.commands.report.run_files import read_run
from rlmath.errors import UserError
from rlmath.monitor.files import to_json

_UNITS = {"reward": "", "accuracy": "", "length": " tokens"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``rlmath explain``."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, runner.run_dir")
    parser.add_argument(
        "--steps", type=_steps, required=True, metavar="A:B", help="from step A up to B, B excluded"
    )
    parser.add_argument(
        "--against", type=_steps, metavar="C:D", help="default: as many steps right before A"
    )
    parser.add_argument("--metric", choices=METRICS, default="reward", help="the mean of what")
    parser.add_argument(
        "--trained",
        action="store_true",
        help="of the groups that the filter kept, not of all that were sampled",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not text")


def run(options: argparse.Namespace) -> int:
    """Print what the change is made of. Returns the exit code.

    Raises:
        UserError: There is no run, or a window has no samples.
    """
    later: range = options.steps
    earlier: range = options.against or range(max(0, later.start - len(later)), later.start)
    if set(earlier) & set(later):
        raise UserError(
            f"--against {_text(earlier)} and --steps {_text(later)} share steps; the second number "
            "of a window is not included"
        )
    files = read_run(options.run_dir)
    found = explain(
        read_window(files, earlier),
        read_window(files, later),
        options.metric,
        trained_only=options.trained,
    )
    if options.json:
        print(json.dumps(json.loads(to_json(as_json(found, earlier, later))), indent=2))
    else:
        print("\n".join(lines(found, earlier, later)))
    return 0


def as_json(found: Explanation, earlier: range, later: range) -> dict[str, Any]:
    """An explanation as JSON values."""
    return {
        "steps": [later.start, later.stop],
        "against": [earlier.start, earlier.stop],
        **dataclasses.asdict(found),
        "change": found.change,
    }


def lines(found: Explanation, earlier: range, later: range) -> Iterator[str]:
    """An explanation for the terminal."""
    unit = _UNITS[found.metric]
    yield (
        f"mean {found.metric}: {found.before:.4g}{unit} in steps {_text(earlier)} "
        f"({found.samples[0]:,} samples), {found.after:.4g}{unit} in steps {_text(later)} "
        f"({found.samples[1]:,})"
    )
    yield f"change: {found.change:+.4g} ± {found.standard_error:.2g}{unit} (standard error)"
    yield ""
    width = max(len(cause.name) for cause in found.causes)
    for cause in found.causes:
        if _matters(cause):
            part = f"{cause.share / found.change:7.1%}" if found.change else ""
            yield (
                f"  {cause.name:<{width}}  {cause.share:+10.4g} ± {cause.standard_error:<8.2g}"
                f"{part}"
            )
    nothing = [c.name for c in found.causes if not _matters(c)]
    if nothing:
        yield f"  no part in it: {', '.join(nothing)}"
    yield ""
    yield (
        f"{found.shared_problems:,} problems were sampled in both windows, with "
        f"{found.shared_samples:.0%} of the samples; on others, skill and difficulty cannot be "
        "told apart."
    )
    if found.moved:
        yield "Groups that moved it most (samples as STEP/PROBLEM/INDEX):"
    for one in found.moved:
        yield (
            f"  {one.part:+.4g}  mean {one.before:.4g} before, {one.now:.4g} now: "
            f"{', '.join(one.addresses[:4])}{' …' if len(one.addresses) > 4 else ''}"
        )


def _matters(cause: Cause) -> bool:
    """More than rounding."""
    return abs(cause.share) > 1e-9 or cause.standard_error > 1e-9


def _text(steps: range) -> str:
    return f"{steps.start}:{steps.stop}"


def _steps(text: str) -> range:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text} is not A:B with A < B, such as 400:450")
    return range(int(match[1]), int(match[2]))
