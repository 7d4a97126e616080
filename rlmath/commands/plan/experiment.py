"""From a plan to a run: one command, or an experiment file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rlmath.commands.plan.wish import Wish
from rlmath.config.command_line import NO_PATH, Given
from rlmath.config.groups import CONF_DIR
from rlmath.config.load import value_of_override
from rlmath.errors import UserError
from rlmath.monitor.files import replacing

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def train_command(wish: Wish, settings: Sequence[str], given: Given) -> str:
    """``rlmath train`` with the layout's settings, the given ones among them, for a shell.

    Args:
        wish: What was asked for.
        settings: Of the layout.
        given: What the command line of the plan says; it goes before.
    """
    name = wish.path.rstrip("/").rpartition("/")[2].lower()
    words = _with_given(wish, settings, given, f"runs/{name}")
    return shlex.join(["rlmath", "train", *words])


def write_experiment(
    wish: Wish, settings: Sequence[str], given: Given, name: str, config_dir: Path | None
) -> Path:
    """Write ``experiment/<name>.yaml`` with the layout's settings.

    Args:
        wish: What was asked for.
        settings: Of the layout.
        given: What the command line of the plan says.
        name: Of the experiment and of its folder of runs.
        config_dir: A folder of groups, made if missing; ``None``: the clone's ``conf``.

    Returns:
        The file.

    Raises:
        UserError: The name is none for a file, or there is such a file already.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"--write {name}: give a name of letters, digits, -, _ and .")
    folder = CONF_DIR.resolve() if config_dir is None else config_dir
    file = folder / "experiment" / f"{name}.yaml"
    if file.exists():
        raise UserError(f"--write {name}: {file} exists; give another name, or remove it")
    nested: dict[str, Any] = {}
    groups: list[str | dict[str, str]] = []
    for word in _with_given(wish, settings, given, f"runs/{name}"):
        key, _, text = word.partition("=")
        if key == "experiment":  # One of the same group, on which this one builds.
            groups.append(text)
            continue
        if (CONF_DIR / key).is_dir():
            groups.append({f"override /{key}": text})
            continue
        *sections, last = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value_of_override(word)
    head = (
        "# @package _global_\n"
        f"# {wish.path} on {wish.gpus} x {wish.gpu.name}, as rlmath plan layout proposed.\n"
    )
    if groups:
        nested = {"defaults": groups, **nested}
    with replacing(file) as out:
        out.write((head + yaml.safe_dump(nested, sort_keys=False)).encode())
    return file


def _with_given(wish: Wish, settings: Sequence[str], given: Given, run_dir: str) -> list[str]:
    """The layout's settings with the given values, and what a run needs besides."""
    if wish.path == NO_PATH:
        raise UserError("sizes alone are no model to train: give model.path")
    # The model's path is the one that was found; of the rest the user's words count.
    own = {word.partition("=")[0]: word for word in given.words if not word.startswith("cluster=")}
    own.pop("model.path", None)
    words = [own.pop(word.partition("=")[0], word) for word in settings]
    words += own.values()
    if "runner.run_dir" not in given.keys:
        words.append(f"runner.run_dir={run_dir}")
    if "data.train_paths" not in given.keys:
        words.append("data.train_paths=[train.jsonl]")
    return words
