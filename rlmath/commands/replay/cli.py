"""``rlmath replay RUN STEP [key=value ...]``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlmath.checks.machine import Machine
from rlmath.checks.made_with import software_versions
from rlmath.commands.replay.choices import check_ranks, other_config, read_choices, run_config
from rlmath.commands.replay.source import Source, read_source
from rlmath.config.arithmetic import RunLayout
from rlmath.config.command_line import count
from rlmath.errors import printable
from rlmath.monitor.files import to_json
from rlmath.monitor.run_settings import attempt_of

# Exit code of a comparison that found a difference, as of bisect, diff and cmp.
EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, runner.run_dir")
    parser.add_argument("step", type=count, metavar="STEP", help="the step to redo, from 1")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="another layout to redo it in (actor.tensor_parallel=1), or another choice to compare "
        "with (algorithm.loss=gspo)",
    )
    parser.add_argument(
        "--from",
        dest="begin",
        type=int,
        metavar="STEP",
        help="begin at this step's checkpoint (0: the initial weights), not at the nearest one",
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=10,
        metavar="N",
        help="with another choice: show N tokens that gain most and N that lose most",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Redo a step and print how it compares. Returns the exit code: 0 if it equals the run. Raises
    UserError: the step cannot be redone, or not with these choices."""
    choices = read_choices(options.overrides)
    source = read_source(options.run_dir, options.step, options.begin)
    with tempfile.TemporaryDirectory(prefix="rlmath_replay_") as folder:
        config = run_config(source, source.step, choices, Path(folder))
        sequences = min(len(one["keys"]) for one in source.headers.values())
        other = other_config(source, config, choices) if choices.update else None
        layout = check_ranks(config, Machine.here(), sequences, other)
        # Progress lines are no part of the result.
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            print("\n".join(printable(line) for line in _begin(source, layout)), flush=True)
            from rlmath.commands.replay import alternative as comparing
            from rlmath.commands.replay import compare
            from rlmath.commands.replay.redo import redo

            done, both = redo(source, choices, other, Path(folder))
        verdicts = [compare.verdict(source, one, config.model.dtype) for one in done]
        found = None
        if both is not None:
            found = comparing.alternative(done[-1], both, config.model.path, options.tokens)
    is_right = all(one.is_right for one in verdicts)
    if options.json:
        result = {
            "start": source.start.step,
            "steps": compare.as_json(verdicts),
            "alternative": found,
        }
        print(json.dumps(json.loads(to_json(result)), indent=2))
    else:
        said = [*compare.lines(verdicts), *([] if is_right else _why(source))]
        if found is not None:
            said += ["", *comparing.lines(found, source.step)]
        print("\n".join(printable(line) for line in said))
    return 0 if is_right else EXIT_DIFFERENT


def _begin(source: Source, layout: RunLayout) -> Iterator[str]:
    actor = layout.actor
    steps = f"step {source.step}"
    if len(source.steps) > 1:
        steps = f"{len(source.steps)} steps, {source.steps[0]} to {source.step},"
    yield (
        f"redoing {steps} from {source.start}, on {layout.device.value}: tensor "
        f"{actor.tensor_parallel} x pipeline {actor.pipeline_parallel} x context "
        f"{actor.context_parallel} x data {actor.data_parallel}"
    )
    for one in source.broken:
        yield f"skipped {one}"


def _why(source: Source) -> Iterator[str]:
    then, now = attempt_of(source.run.attempts, source.step).made_with, software_versions()
    for key in sorted(then.keys() & now.keys()):
        if then[key] != now[key]:
            yield f"the run was made with {key} {then[key]}; here it is {now[key]}"
