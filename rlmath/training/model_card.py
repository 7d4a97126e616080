"""The model card of a run: recipe, data, results and settings, from its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmath.errors import UserError
from rlmath.evaluation.results import read_results, table
from rlmath.model.hub import hub_name
from rlmath.monitor import run_settings
from rlmath.monitor.files import replacing
from rlmath.monitor.summary import read_summary

CARD = "README.md"
# An absolute path says more of a machine than a card should.
_ABSOLUTE = re.compile(r"(?<![\w.~-])/(?:[^\s,\]'\"]*/)?([^/\s,\]'\"]+)")
HF = "hf"
# The adapters alone, in PEFT's format, of a run with actor.lora.
HF_ADAPTER = "hf_adapter"
# Settings that make the recipe, in the order in which they are read.
_RECIPE = (
    ("advantage", "algorithm.advantage"),
    ("policy loss", "algorithm.loss"),
    ("aggregation", "algorithm.aggregation"),
    ("prompts per step", "algorithm.prompts_per_step"),
    ("samples per prompt", "algorithm.group_size"),
    ("minibatches per step", "algorithm.minibatches_per_step"),
    ("clip, low and high", "algorithm.loss_options.clip_low", "algorithm.loss_options.clip_high"),
    ("KL coefficient", "algorithm.kl_coef"),
    ("learning rate", "actor.optimizer.lr"),
    ("LoRA rank and alpha (rank 0: all weights)", "actor.lora.rank", "actor.lora.alpha"),
    ("schedule", "actor.optimizer.schedule"),
    (
        "longest prompt and response, tokens",
        "data.max_prompt_tokens",
        "rollout.max_response_tokens",
    ),
    ("sampling temperature", "rollout.temperature"),
    ("seed", "runner.seed"),
)


# Where and how a run is executed.
_NOT_IN_RECIPE = ("cluster", "runner", "watchdog", "weights")


def write_card(run_dir: Path) -> None:
    """Put the card into the run's model folder."""
    with replacing(run_dir / HF / CARD) as file:
        file.write(model_card(run_dir).encode())


_FRONT_MATTER = (
    "---",
    "library_name: transformers",
    "pipeline_tag: text-generation",
    "tags:",
    "- rlmath",
    "- reinforcement-learning",
    "- math",
    "---",
    "",
)


def model_card(run_dir: Path, step: int | None = None) -> str:
    """The card: recipe, data, results, from the run folder. ``run_dir``: a training run's folder.
    ``step``: step of a checkpoint; ``None``: the run's end. Raises UserError: it is no run's
    folder."""
    from omegaconf import OmegaConf

    found = run_settings.attempts(run_dir)
    if not found:
        raise UserError(f"{run_dir} is not the folder of a training run: it has no config.yaml")
    summary = read_summary(run_dir)
    # A start after the last step may have other settings, with which nothing was trained.
    steps = step if step is not None else summary.get("steps")
    config = OmegaConf.create(dict(run_settings.attempt_of(found, steps).settings))

    def setting(key: str) -> str:
        return str(OmegaConf.select(config, key))

    base = hub_name(setting("model.path")) or Path(setting("model.path")).name
    rows = [(name, ", ".join(setting(key) for key in keys)) for name, *keys in _RECIPE]
    lines = [
        *_FRONT_MATTER,
        f"# {run_dir.resolve().name}",
        "",
        f"{base}, trained with reinforcement learning on mathematics problems by rlmath"
        + (f"; after step {steps}." if steps is not None else "."),
        "",
        *_adapter_lines(run_dir, step),
        "## Recipe",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "Every setting is below, for `rlmath train`, with the last part of absolute paths.",
        "",
        *_changes_lines(run_settings.history(found, steps)),
        "## Data",
        "",
        *_data_lines(config),
        "",
        "## Results",
        "",
        *_result_lines(run_dir, summary, step),
        "",
        "## All settings",
        "",
        "```yaml",
        _ABSOLUTE.sub(r"\1", OmegaConf.to_yaml(config)).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _adapter_lines(run_dir: Path, step: int | None) -> list[str]:
    if step is not None or not (run_dir / HF_ADAPTER).is_dir():
        return []
    return [
        "Its low-rank adapters (LoRA) are merged into these weights; alone, in PEFT's format, they "
        f"are in `{HF_ADAPTER}`.",
        "",
    ]


def _changes_lines(history: Sequence[tuple[int, list[run_settings.Change]]]) -> list[str]:
    """Earlier settings: each change of a setting, with the steps before and after it."""
    if not history:
        return []
    rows = [
        f"| {after} | `{_format(one.key)}` | {_format(one.before)} | {_format(one.now)} |"
        for after, changes in history
        for one in changes
        if one.key.partition(".")[0] not in _NOT_IN_RECIPE
    ]
    if not rows:
        return []
    return [
        "Settings that were changed during the run (the table above has the last values):",
        "",
        "| after step | setting | up to there | from there on |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _format(value: Any) -> str:
    return _ABSOLUTE.sub(r"\1", "null" if value is None else str(value)).replace("|", "\\|")


def _data_lines(config: Any) -> list[str]:
    weights = list(config.data.get("train_weights") or [])
    files = [Path(str(path)).name for path in config.data.train_paths]
    shares = [f", weight {weight:g}" for weight in weights] or [""] * len(files)
    source = [f"- training: `{config.data.source}`"] if config.data.get("source") else []
    lines = source + [
        f"- training: `{name}`{share}" for name, share in zip(files, shares, strict=True)
    ]
    return lines + [f"- held out: `{Path(str(p)).name}`" for p in config.data.eval_paths]


def _result_lines(run_dir: Path, summary: Mapping[str, Any], step: int | None) -> list[str]:
    lines = []
    before, after = summary.get("eval/accuracy_before"), summary.get("eval/accuracy_after")
    if step is None and before is not None and after is not None:
        lines.append(f"Accuracy on held-out problems went from {before:.3f} to {after:.3f}.")
    if step is not None:
        manifest = run_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json"
        if manifest.is_file():
            metrics = json.loads(manifest.read_bytes()).get("metrics", {})
            lines += [f"- `{k}`: {v:.4f}" for k, v in metrics.items() if k.startswith("eval/")]
    entries = read_results(run_dir / "evaluation")
    if entries and step is None:
        lines += ["", table(entries), "", "Percent, ± one standard error over problems."]
    return lines or ["Not evaluated."]
