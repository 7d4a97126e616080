"""No command may write over one of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlmath.config.hub_names import is_hub
from rlmath.config.schema import Config
from rlmath.model.folder import TINY
from rlmath.model.hub import is_hub_model
from rlmath.weights.model_folder import replaced_source

# Folders in ``runner.run_dir`` whose contents a command replaces.
_WRITTEN = {
    "train": ("hf", "hf_adapter", "samples", "journal"),
    "sft": ("sft", "sft_adapter"),
    "evaluate": ("evaluation/samples", "evaluation/unfinished"),
}


def overwritten_inputs(config: Config, command: str) -> Iterator[str]:
    """A message for each input that is, or is in, a folder that the command replaces."""
    names = list(_WRITTEN[command])
    if command == "evaluate" and config.eval.checkpoint is not None:
        names.append("evaluation/model")
    inputs = dict(_inputs(config, command))
    for name in names:
        target = Path(config.runner.run_dir) / name
        lost = replaced_source(target, tuple(map(Path, inputs.values())))
        if lost is not None:
            key = next(key for key, path in inputs.items() if Path(path) == lost)
            yield (
                f"{key}={lost}: {command} would replace it, because it writes {target}; give "
                "another runner.run_dir"
            )


def _inputs(config: Config, command: str) -> Iterator[tuple[str, str]]:
    model = config.model.path
    if model != TINY and not is_hub_model(model):
        yield "model.path", model
    lists = {"data.eval_paths": config.data.eval_paths}
    if command == "train":
        lists["data.train_paths"] = config.data.train_paths
        if config.teacher.path and not is_hub_model(config.teacher.path):
            yield "teacher.path", config.teacher.path
    if command == "sft":
        lists = {"sft.train_paths": config.sft.train_paths}
    if command != "evaluate" and config.actor.lora.init_from:
        yield "actor.lora.init_from", config.actor.lora.init_from
    if command == "evaluate" and config.eval.checkpoint:
        yield "eval.checkpoint", config.eval.checkpoint
    for key, paths in lists.items():
        for index, path in enumerate(paths):
            if not is_hub(path):
                yield f"{key}[{index}]", path
