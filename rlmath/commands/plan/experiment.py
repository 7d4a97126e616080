"""From a plan to a run: one command, or an experiment file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.commands.plan.request import PlanRequest
from rlmath.config import experiment_file
from rlmath.config.command_line import NO_PATH
from rlmath.config.groups import CONF_DIR
from rlmath.config.load import value_of_override
from rlmath.errors import UserError


def train_command(request: PlanRequest, settings: Sequence[str]) -> str:
    name = request.path.rstrip("/").rpartition("/")[2].lower()
    words = _for_a_run(request, settings, f"runs/{name}")
    return shlex.join(["rlmath", "train", *words])


def write_experiment(
    request: PlanRequest, settings: Sequence[str], name: str, config_dir: Path | None
) -> Path:
    """Write ``experiment/<name>.yaml`` with a plan's settings. ``config_dir``: a folder of groups,
    made if missing; ``None``: the clone's ``conf``. Returns the file. Raises UserError: the name is
    none for a file, or there is such a file already."""
    found: dict[str, Any] = {}
    groups: list[str | dict[str, str]] = []
    for word in _for_a_run(request, settings, f"runs/{name}"):
        key, _, text = word.partition("=")
        if key == "experiment":  # One of the same group, on which this one builds.
            groups.append(text)
        elif (CONF_DIR / key).is_dir():
            groups.append({f"override /{key}": text})
        else:
            found[key] = value_of_override(word)
    folder = CONF_DIR.resolve() if config_dir is None else config_dir
    head = f"{request.path} on {request.gpus} x {request.gpu.name}, as rlmath plan layout proposed"
    return experiment_file.write_experiment(folder, name, found, head, groups=groups)


def _for_a_run(request: PlanRequest, settings: Sequence[str], run_dir: str) -> list[str]:
    """The settings, and others that a run needs."""
    if request.path == NO_PATH:
        raise UserError("sizes alone are no model to train: give model.path")
    words, keys = list(settings), request.given.keys
    if "runner.run_dir" not in keys:
        words.append(f"runner.run_dir={run_dir}")
    if "data.train_paths" not in keys:
        words.append("data.train_paths=[train.jsonl]")
    return words
