"""``rlmath why RUN STEP/PROBLEM/INDEX [--regenerate]``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from rlmath.commands.why.batch import Address, read_step
from rlmath.commands.why.sampled import generation_lines, prompt_lines
from rlmath.commands.why.verdict import reward_lines, verdict_lines
from rlmath.errors import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``rlmath why``."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, runner.run_dir")
    parser.add_argument(
        "sample",
        type=_address,
        metavar="STEP/PROBLEM/INDEX",
        help="as `rlmath explain` and the report name it, such as 12/train.jsonl:345/0",
    )
    parser.add_argument("--whole", action="store_true", help="long texts in full")
    parser.add_argument(
        "--regenerate",
        action="store_true",
        help="sample it again, with an engine and the weights that it came from",
    )


def run(options: argparse.Namespace) -> int:
    """Print everything about a sample. Returns the exit code.

    Raises:
        UserError: The run, the step or the sample is not there; the weights are not kept.
    """
    from rlmath.commands.why.trained import advantage_lines, group_lines, weight_lines

    step = read_step(options.run_dir, options.sample)
    _show("Prompt", prompt_lines(step, options.whole))
    _show("Generation", generation_lines(step, options.whole))
    _show("Grading", verdict_lines(step))
    _show("Rewards", reward_lines(step))
    _show(f"Group: {len(step.group)} samples of {step.address.problem}", group_lines(step))
    _show("Advantage", advantage_lines(step))
    _show("Weight in the loss", weight_lines(step))
    if options.regenerate:
        from rlmath.commands.why.regenerate import regenerate_lines

        _show("Sampled again", regenerate_lines(step))
    return 0


def _show(title: str, lines: Iterable[str]) -> None:
    print(f"{title}", flush=True)
    for line in lines:
        print(f"  {printable(line)}", flush=True)
    print()


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
