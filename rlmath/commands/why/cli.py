"""``rlmath why RUN STEP/PROBLEM/INDEX [--regenerate]``."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path

from rlmath.commands.why.batch import Address, read_step
from rlmath.errors import UserError, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``rlmath why``."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, runner.run_dir")
    parser.add_argument(
        "sample",
        type=_address,
        metavar="STEP/PROBLEM/INDEX",
        help="as `rlmath explain` and the report name it, such as 12/train.jsonl:345/0",
    )
    parser.add_argument("--whole", action="store_true", help="print long texts in full")
    parser.add_argument(
        "--update",
        action="store_true",
        help="redo the step's update, for this sample's share of the gradient and its tokens",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="with --update: another layout to redo it in, such as actor.tensor_parallel=1",
    )
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
    if options.overrides and not options.update:
        raise UserError(f"{options.overrides[0]}: a layout is chosen with --update alone")
    step = read_step(options.run_dir, options.sample)
    # torch and Ray take seconds, and what is wrong is said before.
    from rlmath.commands.why.sampled import generation_lines, prompt_lines
    from rlmath.commands.why.trained import advantage_lines, group_lines, weight_lines
    from rlmath.commands.why.verdict import reward_lines, verdict_lines

    again, values = None, None
    if options.update:
        from rlmath.commands.why.tokens import as_tensors
        from rlmath.commands.why.update import gradient_lines, update_again

        again = update_again(step, options.overrides)
        values = as_tensors(again.probed.trace[1]) if again.probed.trace is not None else None
    _show("Prompt", prompt_lines(step, options.whole))
    _show("Generation", generation_lines(step, options.whole))
    _show("Grading", verdict_lines(step))
    _show("Rewards", reward_lines(step))
    _show(f"Group: {len(step.group)} samples of {step.address.problem}", group_lines(step))
    _show("Advantage", advantage_lines(step, values))
    _show("Weight in the loss", weight_lines(step))
    if again is not None:
        _show("Gradient", gradient_lines(again))
    if options.regenerate:
        from rlmath.commands.why.regenerate import regenerate_lines

        _show("Sampled again", regenerate_lines(step))
    return 0


def _show(title: str, lines: Iterable[str]) -> None:
    """A part of what is known, unless nothing is."""
    lines = iter(lines)
    first = next(lines, None)
    if first is None:
        return
    print(title)
    for line in itertools.chain([first], lines):
        print(f"  {printable(line)}", flush=True)
    print(flush=True)


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
