"""``rlmath bisect RUN_A RUN_B``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmath.commands.bisect.compare import Comparison, Item, Parting, compare
from rlmath.commands.bisect.sides import sides
from rlmath.errors import printable
from rlmath.monitor.files import to_json
from rlmath.monitor.run_folder import RunFolder
from rlmath.utils.ranges import ranges

# Exit code of a comparison that found a difference, as of diff and cmp.
EXIT_DIFFERENT = 1
_MOST_ITEMS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_ = "a run's folder, runner.run_dir"
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help=help_)
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help=help_)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    """Print where two runs part. Returns the exit code: 0 if they do not, else 1. Raises UserError:
    a run has no digests, or they share no step."""
    runs = RunFolder(options.run_a), RunFolder(options.run_b)
    found = compare(*runs)
    lines = [] if found.parting is None else list(sides(*runs, found.parting))
    if options.json:
        print(json.dumps(json.loads(to_json(as_json(found, lines))), indent=2))
    else:
        print(f"A: {options.run_a}\nB: {options.run_b}")
        print("\n".join(printable(line) for line in text(found, lines)))
    return 0 if found.parting is None else EXIT_DIFFERENT


def as_json(found: Comparison, lines: list[str]) -> dict[str, Any]:
    parting = None
    if found.parting is not None:
        parting = {
            **dataclasses.asdict(found.parting),
            "phase": found.parting.phase.name,
            "items": [dataclasses.asdict(item) for item in found.parting.items[:_MOST_ITEMS]],
            "differing_items": len(found.parting.items),
            "details": lines,
        }
    return {**dataclasses.asdict(found), "parting": parting}


def text(found: Comparison, lines: list[str]) -> Iterator[str]:
    for setting in found.settings:
        yield f"setting {setting.key}: A {_value(setting.a)}, B {_value(setting.b)}"
    for one in found.files:
        yield f"{one.key} differ: A {one.a}, B {one.b}"
    for one in found.made_with:
        yield f"{one.key} differs: A {one.a or 'none'}, B {one.b or 'none'}"
    if not found.settings:
        yield "settings: the same"
    for name, steps in zip("AB", found.only, strict=True):
        if steps:
            yield f"only {name} has {_steps(steps)}: not compared"
    if found.parting is None:
        yield f"equal to the last bit: {_steps(found.steps)}"
        return
    yield from _parting(found, found.parting, lines)


def _parting(found: Comparison, parting: Parting, lines: list[str]) -> Iterator[str]:
    before = [step for step in found.steps if step < parting.step]
    if before:
        yield f"equal to the last bit: {_steps(before)}"
    where = f"in step {parting.step}"
    if parting.phase.name == "start_weights":
        where = (
            f"after step {parting.step}, where one of them starts"
            if parting.step
            else "at the start"
        )
    yield f"they diverge {where}: {parting.phase.words} ({parting.phase.name})"
    if parting.equal:
        yield f"  equal before that in this step: {', '.join(parting.equal)}"
    if parting.items:
        first = parting.items[0]
        yield (
            f"  {len(parting.items)} of {parting.total} {parting.phase.of} differ; the first is "
            f"{_name(first)}"
        )
    elif not parting.total:
        yield (
            "  which ones is unknown: the step's file in samples/ was deleted (see "
            "runner.samples_keep_gib)"
        )
    yield from (f"  {line}" for line in lines)


def _name(item: Item) -> str:
    if item.a == item.b:
        return str(item.a)
    return f"{item.a or 'none'} in A and {item.b or 'none'} in B"


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _steps(steps: tuple[int, ...] | list[int]) -> str:
    """``step 3``, or ``steps 1 to 4, 7``."""
    return f"{'step' if len(steps) == 1 else 'steps'} {ranges(steps)}"
