"""``rlmath import FILE``: settings of verl, TRL or OpenRLHF as an experiment."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rlmath.commands.importing.fact import Framework, Imported, translate
from rlmath.commands.importing.openrlhf import OPENRLHF
from rlmath.commands.importing.reading import read
from rlmath.commands.importing.script import rewards_module
from rlmath.commands.importing.trl import TRL
from rlmath.commands.importing.verl import VERL
from rlmath.config.command_line import count
from rlmath.config.experiment_file import write_experiment

FRAMEWORKS = {one.name: one for one in (VERL, TRL, OPENRLHF)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, help="YAML, JSON, a shell script, or a Python script with GRPOConfig"
    )
    parser.add_argument("--name", help="of the experiment; default: the file's")
    parser.add_argument(
        "--config-dir", type=Path, default=Path("imported"), metavar="DIR",
        help="configuration folder to write experiment/NAME.yaml to; default: imported"
    )  # fmt: skip
    parser.add_argument("--gpus", type=count, help="processes of TRL's launch")
    parser.add_argument(
        "--rows", type=count, help="number of training rows, to convert epochs to steps"
    )


def run(options: argparse.Namespace) -> int:
    """Write the experiment, and print settings without a counterpart and differences. Raises
    UserError: the file cannot be read, or the experiment exists already."""
    name, values, unread = read(options.file, options.gpus)
    framework = FRAMEWORKS[name]
    found = translate(framework, values, options.rows)
    experiment = options.name or options.file.stem
    fill_in(found, experiment)
    module = options.config_dir / f"{experiment}_rewards.py"
    own = move_rewards(found, options.file, module)
    written = write_experiment(
        options.config_dir,
        experiment,
        found.settings,
        f"{options.file.name}, a file of {name}, as rlmath import read it",
        option="--name",
    )
    print("\n".join([*describe(framework, found), *(f"unread   {line}" for line in unread)]))
    print(f"written  {written}")
    if own:
        text = options.file.read_text(encoding="utf-8")
        module.write_text(rewards_module(text, own), encoding="utf-8")
        print(f"written  {module}: {', '.join(own)}, with what they use from {options.file}")
    print(f"rlmath train --config-dir {options.config_dir} experiment={experiment} --check")
    return 0


def fill_in(found: Imported, experiment: str) -> None:
    """Add the settings that a run needs and the file lacks."""
    needed = {"model.path": "MODEL", "data.train_paths": ["train.jsonl"]}
    for key, value in needed.items():
        if key not in found.settings:
            found.settings[key] = value
            found.differs.append(f"{key}: the file names none; it is {value} until you set it")
    found.settings.setdefault("runner.run_dir", f"runs/{experiment}")


def move_rewards(found: Imported, script: Path, module: Path) -> list[str]:
    """Copy reward functions from a script, which would train if imported, to a separate module."""
    begin, moved = f"{script}:", []
    for item in found.settings.get("reward.items", []):
        if item["name"].startswith(begin) and script.suffix == ".py":
            moved.append(item["name"].removeprefix(begin))
            item["name"] = f"{module}:{moved[-1]}"
    return moved


def describe(framework: Framework, found: Imported) -> Iterator[str]:
    yield f"from     {framework.name} (table of {framework.version}): {len(found.settings)} values"
    for key, value, text in found.without:
        yield f"none     {key}={value}" + (f": {text}" if text else "")
    for text in found.differs:
        yield f"differs  {text}"
