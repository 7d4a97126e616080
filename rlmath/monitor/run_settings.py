"""The attempts in a run's folder, with their settings. Read without torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlmath.monitor.files import json_objects

CONFIG_FILE = "config.yaml"
SFT_CONFIG_FILE = "sft_config.yaml"
SFT_EXPORTED_FILE = "sft_exported.json"
ATTEMPTS_FILE = "attempts.jsonl"
# The way of resuming does not change results.
NOT_COMPARED = ("runner.resume", "runner.accept_changes")


@dataclass(frozen=True)
class Change:
    """A setting that differs from the saved one; values as in YAML."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.before)} -> {_text(self.now)}"


@dataclass(frozen=True)
class Attempt:
    """One start of the training loop."""

    after_step: int
    settings: Mapping[str, Any]
    # See rlmath.checks.made_with.software_versions; empty outside a run.
    made_with: Mapping[str, str] = field(default_factory=dict)
    # See rlmath.checks.inputs.contents; empty outside a run.
    files: Mapping[str, str] = field(default_factory=dict)


def attempts(run_dir: Path) -> list[Attempt]:
    """The attempts whose steps count, in order: an attempt that begins at an earlier step replaces
    those after it. Without records, one attempt from ``config.yaml``."""
    found: list[Attempt] = []
    for line in _of_this_run(run_dir):
        file = run_dir / line["config"]
        if file.is_file():
            found = [one for one in found if one.after_step < line["after_step"]]
            notes = (line.get(name) or {} for name in ("made_with", "files"))
            found.append(Attempt(line["after_step"], settings_in(file), *notes))
    if not found and (run_dir / CONFIG_FILE).is_file():
        found.append(Attempt(0, settings_in(run_dir / CONFIG_FILE)))
    return found


def attempt_of(found: Sequence[Attempt], step: int | None) -> Attempt:
    """The attempt that trained a step; ``None``: the last one."""
    fitting = [one for one in found if step is None or one.after_step < step]
    return (fitting or list(found))[-1]


def history(found: Sequence[Attempt], until: int | None = None) -> list[tuple[int, list[Change]]]:
    """Changes between attempts, each with the step after which it was made."""
    result = []
    for before, after in itertools.pairwise(found):
        if until is not None and after.after_step >= until:
            break
        old, new = flat(before.settings), flat(after.settings)
        changed = [
            *(one for one in differing(old, new) if one.key not in NOT_COMPARED),
            *differing(before.files, after.files),
        ]
        if changed:
            result.append((after.after_step, changed))
    return result


def resume_steps(run_dir: Path) -> list[int]:
    """Steps after which a start of the training loop resumed, in order."""
    return sorted({one["after_step"] for one in _of_this_run(run_dir)} - {0})


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Changes of settings that both sides have."""
    return [
        Change(key, before[key], now[key])
        for key in now
        if key in before and before[key] != now[key]
    ]


def _of_this_run(run_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in json_objects(run_dir / ATTEMPTS_FILE):
        found = [line] if line.get("begins") else [*found, line]
    return found


def settings_in(file: Path) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by full key; a list is one value, and so is an empty section."""
    if not isinstance(content, Mapping) or not content:
        return {prefix: content}
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if value in (True, False) else str(value)
