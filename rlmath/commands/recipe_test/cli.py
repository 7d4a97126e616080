"""``rlmath test``: its options."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rlmath.errors import ConfigError, UserError

STEPS = 30
# On either side of what was measured: of the range from reward.incorrect to reward.correct.
MARGIN = 0.15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add = parser.add_argument
    add(
        "settings",
        nargs="*",
        metavar="RECIPE [key=value ...]",
        help="a recipe or an experiment, and settings as for rlmath train",
    )
    add("--steps", type=int, default=STEPS, help=f"of the run, an even number (default: {STEPS})")
    add("--write-band", action="store_true", help="store the band of the reward beside the recipe")
    add("--out", metavar="DIR", help="folder of the runs; default: a temporary one")
    add("--config-dir", metavar="DIR", help="a folder with groups of your own")


def run(arguments: argparse.Namespace) -> int:
    """Test a recipe.

    Returns:
        0 when everything that was asked holds, else 1.

    Raises:
        UserError: Settings that cannot work.
    """
    if not arguments.settings:
        raise UserError("rlmath test: give a recipe or an experiment, such as rlmath test dapo")
    if arguments.steps < 2 or arguments.steps % 2:
        raise UserError(f"--steps {arguments.steps}: takes an even number from 2 on")
    with tempfile.TemporaryDirectory(prefix="rlmath_test_") as made:
        return _run(arguments, Path(arguments.out or made).absolute())


def _run(arguments: argparse.Namespace, folder: Path) -> int:
    from rlmath.commands.drill.cli import problems_of
    from rlmath.commands.drill.shrink import shrink
    from rlmath.commands.recipe_test import run as test
    from rlmath.config.groups import CONF_DIR

    shrunk = shrink(arguments.settings, folder, arguments.config_dir, arguments.steps)
    problems = problems_of(shrunk)
    if problems:
        raise ConfigError.of(problems)
    own = [Path(arguments.config_dir)] if arguments.config_dir else []
    file = test.band_file([CONF_DIR, *own], arguments.settings)
    if arguments.write_band and file is None:
        raise UserError("--write-band: give one experiment or recipe, without other settings")
    band = test.read_band(file) if arguments.steps == STEPS and not arguments.write_band else None
    print("\n".join(shrunk.notes), flush=True)
    failed = False
    for one in test.run_test(shrunk, folder, band):
        verdict = {True: "ok", False: "FAILED", None: "-"}[one.ok]
        print(f"{verdict:<7} {one.name:<16} {one.text}", flush=True)
        failed |= one.ok is False
    if arguments.write_band and not failed and file is not None:
        reward = shrunk.config.reward
        margin = MARGIN * (reward.correct - reward.incorrect)
        _write(file, test.reward_of(folder / "straight"), margin, arguments.steps)
    return int(failed)


def _write(file: Path, reward: float, margin: float, steps: int) -> None:
    """A band around what was measured, joined with the one that is there (of another seed)."""
    from rlmath.commands.recipe_test.run import read_band

    before = read_band(file) or {"low": reward - margin, "high": reward + margin, "measured": []}
    measured = [*before["measured"], round(reward, 4)]
    band = {
        "steps": steps,
        "low": round(min(before["low"], reward - margin), 4),
        "high": round(max(before["high"], reward + margin), 4),
        "measured": measured,
    }
    file.write_text(json.dumps(band) + "\n", encoding="utf-8")
    print(f"band {band['low']:g} to {band['high']:g} stored in {file}")
