"""``rlmath report RUN [RUN2]``: read, put together, write."""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.commands.explain.cli import steps
from rlmath.commands.grade import REASONS
from rlmath.commands.report.changes import changes_of
from rlmath.commands.report.compare import compare
from rlmath.commands.report.events import KINDS
from rlmath.commands.report.math_text import ATTRIBUTES, ELEMENTS
from rlmath.commands.report.page import page
from rlmath.commands.report.run_data import FACTS, SAMPLES_BYTES, TOKENS_BYTES, run_data
from rlmath.commands.report.sample_sets import read_samples_of
from rlmath.commands.report.traces import traces_of
from rlmath.config.command_line import count
from rlmath.errors import UserError
from rlmath.monitor.curves import PHASES
from rlmath.monitor.files import replacing
from rlmath.monitor.run_folder import RunFolder

FILE = "report.html"
FILE_OF_TWO = "report_against_NAME2.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, runner.run_dir")
    parser.add_argument(
        "other", type=Path, metavar="RUN2", nargs="?", help="another run, to compare with the first"
    )
    parser.add_argument(
        "--out", type=Path, help=f"the page; default: RUN/{FILE}, of two runs RUN/{FILE_OF_TWO}"
    )
    parser.add_argument(
        "--steps", type=steps, metavar="A:B", help="explain the change to these steps (B excluded)"
    )
    parser.add_argument("--against", type=steps, metavar="C:D", help="from these steps")
    parser.add_argument(
        "--every",
        type=count,
        metavar="N",
        help="write the page again every N seconds while the run lasts; an open page reloads",
    )


def run(options: argparse.Namespace) -> int:
    """Write the page. Returns the exit code. Raises UserError: there is no run."""
    if (options.steps is None) != (options.against is None):
        raise UserError("give both --steps and --against, or neither")
    folders = [options.run_dir, *([options.other] if options.other else [])]
    name = FILE if options.other is None else FILE_OF_TWO
    if options.other is not None:
        name = name.replace("NAME2", options.other.resolve().name)
    out = options.out or options.run_dir / name
    while True:
        runs = [RunFolder(folder) for folder in folders]
        lasts = options.every is not None and any(one.is_running() for one in runs)
        _write(runs, out, options.every if lasts else None, options)
        if not lasts:
            return 0
        time.sleep(options.every)


def _write(
    runs: Sequence[RunFolder], out: Path, refresh_s: int | None, options: argparse.Namespace
) -> None:
    share = 1 / len(runs)
    sizes = int(SAMPLES_BYTES * share), int(TOKENS_BYTES * share)
    samples = [read_samples_of(one, *sizes) for one in runs]
    changes = [changes_of(one, options.steps, options.against) for one in runs]
    data: dict[str, Any] = {
        "runs": [
            run_data(run, found, share)
            | {"changes": change, "traces": traces_of(run.folder, out.parent)}
            for run, found, change in zip(runs, samples, changes, strict=True)
        ],
        "comparison": compare([one.settings for one in runs], [one.grades for one in samples])
        if len(runs) == 2
        else None,
        "fact_names": [name for name, _ in FACTS],
        "event_kinds": KINDS,
        "phases": PHASES,
        "methods": REASONS,
        "mathml": {"elements": sorted(ELEMENTS), "attributes": sorted(ATTRIBUTES)},
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    title = " against ".join(one.name for one in runs)
    text = page(data, f"rlmath: {title}", refresh_s).encode()
    with replacing(out) as file:
        file.write(text)
    print(f"report   {out} ({len(text) / 1e6:.1f} MB)", flush=True)
