"""``rlmath explain RUN --steps 400:450 [--against 350:400]``."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from rlmath.commands.explain.outcomes import read_window
from rlmath.commands.explain.shares import METRICS, explain
from rlmath.commands.explain.text import as_json, lines, steps_text
from rlmath.errors import UserError
from rlmath.monitor.files import to_json
from rlmath.monitor.run_folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, runner.run_dir")
    parser.add_argument(
        "--steps", type=steps, required=True, metavar="A:B", help="from step A up to B, B excluded"
    )
    parser.add_argument(
        "--against", type=steps, metavar="C:D", help="default: as many steps right before A"
    )
    parser.add_argument(
        "--metric", choices=METRICS, default="reward", help="metric to explain (default: reward)"
    )
    parser.add_argument(
        "--trained",
        action="store_true",
        help="only groups that the filter kept, not all that were sampled",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Print the causes of the change. Returns the exit code. Raises UserError: there is no run, or
    a window has no samples."""
    later: range = options.steps
    earlier: range = options.against or range(max(0, later.start - len(later)), later.start)
    if options.against is None and earlier.stop <= 1:
        raise UserError(
            f"--steps {steps_text(later)}: there is no step before it to compare with; begin the "
            "window later, or give --against C:D"
        )
    if set(earlier) & set(later):
        raise UserError(
            f"--against {steps_text(earlier)} and --steps {steps_text(later)} share steps; the "
            "second number of a window is not included"
        )
    files = RunFolder(options.run_dir)
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


def steps(text: str) -> range:
    """A window of steps, as an option gives it."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text} is not A:B with A < B, such as 400:450")
    return range(int(match[1]), int(match[2]))
