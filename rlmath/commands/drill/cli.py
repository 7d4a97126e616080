"""``rlmath drill``: its options, and the settings of the run that faults are planted in."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.errors import UserError

if TYPE_CHECKING:
    from rlmath.commands.drill.shrink import Shrunk
    from rlmath.config.schema import Config

STEPS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "settings",
        nargs="*",
        metavar="EXPERIMENT [key=value ...]",
        help="an experiment or a recipe, and settings as for rlmath train",
    )
    add("--only", metavar="FAULT[,FAULT]", help="only these faults; see --list")
    add("--list", action="store_true", help="list the faults and exit")
    add("--check", action="store_true", help="show what is shrunk, check the settings, and exit")
    add(
        "--as-is",
        action="store_true",
        help="shrink nothing: the run's own model, problems and layout, on this machine or cluster",
    )
    add("--json", metavar="FILE", help="write the outcomes to this file")
    add(
        "--markdown",
        action="store_true",
        help="print the outcomes as a Markdown table, as in docs/records/drills.md",
    )
    add(
        "--table",
        metavar="NAME=FILE",
        action="append",
        help="print the outcomes of several --json files side by side and exit (repeatable)",
    )
    add("--out", metavar="DIR", help="output folder of the runs (default: a temporary folder)")
    add("--config-dir", metavar="DIR", help="folder with your own config groups")


def run(arguments: argparse.Namespace) -> int:
    """List the faults, or plant them. Returns 0 when every alarm fired and the healthy run had
    none, else 1. Raises UserError: settings that cannot work, or an unknown fault."""
    if arguments.list:
        from rlmath.commands.drill.catalog import FAULTS

        width = max(len(fault.name) for fault in FAULTS)
        print("\n".join(f"{one.name:<{width}}  {one.what} ({one.where})" for one in FAULTS))
        return 0
    if arguments.table:
        from rlmath.commands.drill.table import side_by_side

        print(side_by_side(dict(map(_outcomes, arguments.table))))
        return 0
    if not arguments.settings:
        raise UserError("rlmath drill: give an experiment, such as rlmath drill quickstart")
    with tempfile.TemporaryDirectory(prefix="rlmath_drill_") as made:
        folder = Path(arguments.out or made).absolute()
        return _run(arguments, folder)


def _outcomes(word: str) -> tuple[str, Any]:
    name, _, file = word.rpartition("=")
    try:
        return name or Path(file).stem, json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--table {word}: not a file of --json ({error})") from error


def _run(arguments: argparse.Namespace, folder: Path) -> int:
    from rlmath.commands.drill import table
    from rlmath.commands.drill.shrink import shrink
    from rlmath.errors import ConfigError

    shrunk = None
    if arguments.as_is:
        config = _as_is(arguments, folder)
    else:
        shrunk = shrink(arguments.settings, folder, arguments.config_dir, STEPS)
        config = shrunk.config
        if problems := problems_of(shrunk):
            raise ConfigError.of(problems)
    # Importing torch takes seconds; errors of the settings come first.
    from rlmath.commands.drill.catalog import select

    faults = select(arguments.only)
    print("\n".join(shrunk.notes if shrunk else [f"model: {config.model.path}"]), flush=True)
    if arguments.check:
        return 0
    from rlmath.commands.drill.material import write_material
    from rlmath.commands.drill.runner import run_drill

    if shrunk is not None:
        write_material(shrunk)
    outcomes = run_drill(config, faults, folder, lambda one: print(table.line(one), flush=True))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.as_plain(outcomes), indent=1) + "\n")
    print(f"\n{table.markdown(outcomes) if arguments.markdown else table.summary(outcomes)}")
    return 0 if all(one.fired or one.skipped for one in outcomes) else 1


def _as_is(arguments: argparse.Namespace, folder: Path) -> Config:
    """The configuration as ``rlmath train`` would take it, but for the folder of its run."""
    from rlmath.checks.run import check
    from rlmath.commands.drill.shrink import as_override
    from rlmath.config.load import load
    from rlmath.config.quoting import path_override
    from rlmath.config.settings import replace_values

    run_dir = folder / "run"
    apart = {"runner.run_dir": str(run_dir), "runner.resume": "never", "runner.save_every": 0}
    words = [as_override(word, arguments.config_dir) for word in arguments.settings]
    if not any(word.startswith(("experiment=", "runner.run_dir=")) for word in words):
        words.append(path_override("runner.run_dir", run_dir))
    # Not as overrides: the quickstart's model is below its own folder.
    config = replace_values(load(words, arguments.config_dir), apart)
    check(config)
    return config


def problems_of(shrunk: Shrunk) -> list[str]:
    """Errors of shrunk settings; model and problems are made when there are none."""
    from rlmath.checks.layout import lengths
    from rlmath.checks.machine import Machine
    from rlmath.checks.run import find_problems
    from rlmath.model.spec import model_spec

    return [
        *lengths(shrunk.config, model_spec(shrunk.model), "train"),
        *(
            one
            for one in find_problems(shrunk.config, "train", Machine.here())
            if not one.startswith(("model.path", "data.train_paths"))
        ),
    ]
