"""``rlmath watch RUN``: the terminal of a run that was started elsewhere."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlmath.commands.report.answers import answers
from rlmath.commands.report.events import events_of
from rlmath.errors import printable
from rlmath.monitor.progress import duration, step_line
from rlmath.monitor.run_folder import RunFolder
from rlmath.monitor.writer import STEP, TIME

POLL_S = 2.0
SHOWN_STEPS = 10  # of those before the command began


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, runner.run_dir")


def run(options: argparse.Namespace) -> int:
    """Show the last steps and how the run stands, then each step and event as it comes, and at the
    end again how it stands.

    Returns:
        The exit code: 0, however the run ended.

    Raises:
        UserError: There is no run.
    """
    console = Console(highlight=False, soft_wrap=True)
    files = RunFolder(options.run_dir)
    steps = [line[STEP] for line in files.metrics]
    shown = steps[-SHOWN_STEPS - 1] if len(steps) > SHOWN_STEPS else -1
    told = {(event.step, event.kind, event.text) for event in events_of(files)}
    if files.is_running():
        console.print(*map(Text, summary(files)), sep="\n")
    with console.status("") as status:
        while True:
            lasts = files.is_running()  # Before the files are read: the last lines are not missed.
            for line in lines_after(files, shown):
                console.print(Text(line))
            # A run that resumed makes steps again.
            shown = files.last_step if files.metrics else -1
            for event in events_of(files):
                key = (event.step, event.kind, event.text)
                if key not in told:
                    told.add(key)
                    console.print(Text(printable(f"step {event.step}: {event.text}")))
            if not lasts:
                break
            status.update(Text(in_progress(files, time.time())))
            time.sleep(POLL_S)
            files = RunFolder(options.run_dir)
    console.print(*map(Text, summary(files)), sep="\n")
    return 0


def summary(files: RunFolder) -> Iterator[str]:
    """How the run stands: is it learning, is it healthy, how long still."""
    for one in answers(files, events_of(files)):
        yield printable(f"{one.question:<8} {'; '.join(filter(None, (one.verdict, one.detail)))}")


def lines_after(files: RunFolder, step: int) -> Iterator[str]:
    """The line of each step after this one, as the run itself prints it."""
    total = files.total_steps
    for at, line in enumerate(files.metrics):
        if line[STEP] > step:
            pace = files.pace_s(at + 1)
            left = float("nan") if pace is None else pace * (total - line[STEP])
            numbers = {k: v for k, v in line.items() if isinstance(v, int | float)}
            yield step_line(line[STEP], total, numbers, numbers.get("timing/step", 0.0), left)


def in_progress(files: RunFolder, now: float) -> str:
    """The step in progress at the Unix time ``now``, its usual duration, and the time left."""
    pace = files.pace_s()
    since = f" for {duration(now - files.metrics[-1][TIME])}" if files.metrics else ""
    usual = "" if pace is None else f"; the last steps took {duration(pace)} each"
    if pace is not None and files.total_steps:
        usual += f"; {duration(pace * (files.total_steps - files.last_step))} left"
    return f"step {files.last_step + 1}{since}{usual}"
