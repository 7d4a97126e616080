from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rlmath.errors import ConfigError, UserError

STEPS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "settings",
        nargs="*",
        metavar="RECIPE [key=value ...]",
        help="a recipe or an experiment, and settings as for rlmath train; or plugin and your file",
    )
    add(
        "--steps",
        type=int,
        default=STEPS,
        help=f"steps of the run, an even number (default: {STEPS})",
    )
    add(
        "--write-band",
        action="store_true",
        help="store the band of the reward beside the recipe, at the learning rate of a stored one",
    )
    add("--out", metavar="DIR", help="folder of the runs; default: a temporary one")
    add("--config-dir", metavar="DIR", help="folder with your own config groups")


def run(arguments: argparse.Namespace) -> int:
    """Test a recipe, or a plug-in. Returns 0 when everything that was asked holds, else 1. Raises
    UserError: settings that cannot work."""
    if arguments.settings[:1] == ["plugin"]:
        from rlmath.commands.plugin_test import cli as plugin_test

        return plugin_test.run(arguments)
    if not arguments.settings:
        raise UserError("rlmath test: give a recipe or an experiment, such as rlmath test dapo")
    if arguments.steps < 2 or arguments.steps % 2:
        raise UserError(f"--steps {arguments.steps}: takes an even number from 2 on")
    with tempfile.TemporaryDirectory(prefix="rlmath_test_") as made:
        return _run(arguments, Path(arguments.out or made).absolute())


def _run(arguments: argparse.Namespace, folder: Path) -> int:
    from rlmath.commands.drill.cli import problems_of
    from rlmath.commands.drill.shrink import shrink
    from rlmath.commands.recipe_test import band as bands
    from rlmath.commands.recipe_test import run as test
    from rlmath.config.groups import CONF_DIR

    own = [Path(arguments.config_dir)] if arguments.config_dir else []
    file = bands.band_file([CONF_DIR, *own], arguments.settings)
    if arguments.write_band and (file is None or arguments.steps != STEPS):
        raise UserError(
            f"--write-band: give one experiment or recipe, no other settings, and {STEPS} steps"
        )
    band = bands.read_band(file) if arguments.steps == STEPS else None
    shrunk = shrink(
        arguments.settings,
        folder,
        arguments.config_dir,
        arguments.steps,
        lambda lr: band.lr_factor if band else bands.lr_factor(lr),
    )
    problems = problems_of(shrunk)
    if problems:
        raise ConfigError.of(problems)
    print("\n".join(shrunk.notes), flush=True)
    failed = False
    for one in test.run_test(shrunk, folder, None if arguments.write_band else band):
        verdict = {True: "ok", False: "FAILED", None: "-"}[one.ok]
        print(f"{verdict:<7} {one.name:<16} {one.text}", flush=True)
        failed |= one.ok is False
    if arguments.write_band and not failed and file is not None:
        first = shrunk.config.runner.seed
        seeds = range(first + 1, first + bands.SEEDS)
        runs = [folder / "straight", *(test.another_seed(shrunk, folder, seed) for seed in seeds)]
        rewards = [bands.rewards_of(one) for one in runs]
        starts, ends = [one[0] for one in rewards], [bands.reward_of(one) for one in runs]
        made = bands.band_of(arguments.steps, shrunk.lr_factor, starts, ends)
        bands.write_band(file, made)
        print(f"band {made.low:g} to {made.high:g} stored in {file}")
    return int(failed)
