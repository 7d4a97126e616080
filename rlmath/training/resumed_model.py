"""Whether a checkpoint is of the models that a run trains, before ranks and engines are started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlmath.actor.worker import VALUE_MODEL
from rlmath.algorithms.advantages import needs_value_model
from rlmath.config.lora import adapters_of
from rlmath.config.schema import Config
from rlmath.errors import UserError
from rlmath.model.lora import describe
from rlmath.model.spec import read_model_spec

_ABOUT = Path("actor", "about.json")


def check_resumed_model(config: Config, path: Path) -> None:
    """Compare a training run's checkpoint with the settings; the ranks compare the rest.
    ``config``: checked settings. ``path``: folder of the checkpoint. Raises UserError: it is of
    other weights than those that are trained, or has no value model."""
    advantage = config.algorithm.advantage
    if needs_value_model(advantage) and not (path / VALUE_MODEL).is_dir():
        raise UserError(
            f"algorithm.advantage={advantage}: {path} has no value "
            "model, because its run had none, and this one cannot continue it. Set the advantage "
            "as it was, or begin a new run from the exported weights: model.path=.../hf with "
            "another runner.run_dir"
        )
    check_resumed_weights(config, path)


def check_resumed_weights(config: Config, path: Path) -> None:
    """Compare data type and adapters of a checkpoint with the settings. Raises UserError: it is of
    other weights than those that are trained."""
    about = _about(path / _ABOUT)
    if about is None:  # The ranks report the error.
        return
    lora = adapters_of(config.actor.lora, read_model_spec(config.model.path), config.runner.seed)
    own = {
        "model.dtype": config.model.dtype.value,
        **_adapters(None if lora is None else describe(lora)),
    }
    was = {"model.dtype": about.get("dtype"), **_adapters(about.get("lora"))}
    differing = [key for key in own.keys() | was.keys() if was.get(key) != own.get(key)]
    # With other ranks or none, nothing else about the adapters matters.
    if "actor.lora.rank" in differing:
        differing = [key for key in differing if not key.startswith("actor.lora.")]
        differing.append("actor.lora.rank")
    if differing:
        told = "; ".join(f"{key}: {was.get(key)} -> {own.get(key)}" for key in sorted(differing))
        raise UserError(
            f"{path} was saved with other weights to train than these settings: {told}. Set them "
            "as they were, or start again with runner.resume=never"
        )


def _about(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _adapters(saved: dict[str, Any] | None) -> dict[str, Any]:
    """By setting; without adapters, the rank is 0."""
    if saved is None:
        return {"actor.lora.rank": 0}
    return {f"actor.lora.{key}": value for key, value in saved.items()}
