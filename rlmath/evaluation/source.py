"""The evaluated model and problems, and their identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rlmath.checks.inputs import contents, reward_files
from rlmath.config.plugins import option_places
from rlmath.config.schema import Config
from rlmath.config.secrets import without_secrets
from rlmath.evaluation.held_out import HeldOut
from rlmath.monitor.files import replacing
from rlmath.plugins.loading import receive, sources
from rlmath.plugins.source import hashes, split
from rlmath.types import Problem

_MARK = "made_from.json"


def with_checkpoint(config: Config, folder: Path) -> Config:
    """The settings with ``model.path`` for ``eval.checkpoint``'s weights in Hugging Face format.

    The folder is written to ``folder``, unless one from the same checkpoint is there, by a separate
    process: one that was a Megatron rank is not fit to be shared with vLLM. Raises UserError: the
    checkpoint is missing, or is of another model than ``model.path``.
    """
    checkpoint = config.eval.checkpoint
    if checkpoint is None:
        return config
    from rlmath.validation.convert import read_checkpoint

    mark = {"model": config.model.path, "checkpoint": _files(read_checkpoint(checkpoint).folder)}
    if not (folder / _MARK).is_file() or json.loads((folder / _MARK).read_text()) != mark:
        print(f"writing the weights of {checkpoint} as a Hugging Face folder", flush=True)
        export_checkpoint(checkpoint, folder, config.model.path)
        with replacing(folder / _MARK) as file:
            file.write(json.dumps(mark).encode())
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))


def export_checkpoint(checkpoint: str, folder: Path, source: str) -> None:
    """Write a checkpoint as a Hugging Face folder, in a separate process. Raises UserError: as
    :func:`rlmath.validation.convert.to_hf`."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, mp_context=spawn, initializer=receive, initargs=(sources(),)
    ) as process:
        process.submit(_export, checkpoint, str(folder), source).result()


def about(config: Config, held_out: HeldOut) -> dict[str, Any]:
    """Everything that determines the samples of a benchmark and their grades, without secrets."""
    settings = json.loads(json.dumps(dataclasses.asdict(held_out.benchmark), default=str))
    found: dict[str, Any] = {
        "weights": _files(Path(config.model.path)),
        "dtype": config.model.dtype.value,
        "problems_sha256": _problems_sha256(held_out.problems),
        "settings": settings,
        "reward": json.loads(json.dumps(dataclasses.asdict(config.reward), default=str)),
        "reward_files": contents(reward_files(config)),
        "seed": config.runner.seed,
    }
    if held_out.benchmark.tools:
        found["tools"] = tool_settings(config)
    shown: dict[str, Any] = without_secrets(found)
    return shown


def tool_settings(config: Config) -> dict[str, Any]:
    """Settings that the calls of a response depend on."""
    names = (
        *("tools", "environment", "environment_options", "tool_format", "tool_parser"),
        *("python_provider", "python_provider_settings"),
        *("python_session", "max_turns", "max_calls", "call_timeout_s", "tools_timeout_s"),
        "max_observation_tokens",
    )
    named = [*config.rollout.tools, config.rollout.environment or ""]
    # An environment that is registered with options may be of any plug-in.
    chosen = (at for at, name in map(split, named) if name)
    places = dict.fromkeys([*config.plugins, *chosen, *option_places(config)])
    found = {name: digest for place in places for name, digest in hashes(place).items()}
    return {name: getattr(config.rollout, name) for name in names} | {"sources": found}


def _problems_sha256(problems: Sequence[Problem]) -> str:
    """A digest of the problems as read, whether from a file or from a data set of a hub."""
    digest = hashlib.sha256()
    for one in problems:
        digest.update(json.dumps(dataclasses.asdict(one), default=str).encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Any]:
    """Names, sizes and times of a folder's files; hashing 15 GB of weights adds little."""
    return [
        [str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _MARK
    ]


def _export(checkpoint: str, folder: str, source: str) -> None:
    from rlmath.validation.convert import to_hf
    from rlmath.validation.processes import open_process

    to_hf(open_process(), checkpoint, folder, source)
