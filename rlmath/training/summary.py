"""Files for a person at the end of a run: curves, a summary, and whether its export is right."""

from __future__ import annotations

import dataclasses
import math
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from rlmath.algorithms.mismatch import measure
from rlmath.config.arithmetic import RunLayout
from rlmath.config.quoting import override, path_override, quoted_path
from rlmath.config.schema import Config, DType
from rlmath.errors import UserError, WeightsError
from rlmath.model.precision import log_prob_limit
from rlmath.model.spec import read_model_spec
from rlmath.monitor import WARNINGS_FILE, plot_curves, read_metrics, update_summary
from rlmath.monitor.progress import duration
from rlmath.monitor.run_folder import RunFolder
from rlmath.training.gate import measure_noise
from rlmath.training.opening import RunningRanks
from rlmath.types import TrainingBatch
from rlmath.validation.convert import folder_fingerprints
from rlmath.validation.hf_log_probs import hf_log_probs
from rlmath.weights.fingerprint import compare_fingerprints

_ERROR = "eval/accuracy_standard_error"
_OF_THE_EXPORT = ("alignment/hf_mean_exp_abs_diff", "alignment/hf_max_abs_diff")


class ExportError(UserError):
    """The written model is not the one that was trained."""


def check_export(run: RunningRanks, folder: Path, batch: TrainingBatch | None) -> dict[str, float]:
    """Compare the exported folder with the actor: each tensor bit by bit, and log-probs with those
    of ``transformers``.

    Args:
        folder: The export; one that fails is renamed, as it is no model.
        batch: Sequences to compare log-probs on; ``None``: tensors alone are compared.

    Returns:
        ``alignment/hf_mean_exp_abs_diff`` and ``alignment/hf_max_abs_diff``; nothing without a
        batch.

    Raises:
        ExportError: A tensor differs, or log-probs differ by more than the limit of
            ``toolkits/convert``.
    """
    try:
        held = run.actor.weights_changes()[0].fingerprints
        compare_fingerprints(held, folder_fingerprints(folder), str(folder))
        return {} if batch is None else _check_log_probs(run, folder, batch)
    except WeightsError as error:
        rejected = folder.with_name(f"{folder.name}_rejected")
        shutil.rmtree(rejected, ignore_errors=True)
        folder.rename(rejected)
        raise ExportError(
            f"the exported model is not the trained one, and is now {rejected}: {error}. The last "
            "checkpoint has the weights; toolkits/convert exports it"
        ) from error


def no_room_to_compare(folder: Path) -> str:
    """Why transformers cannot read a model on this machine, in float32; empty: it can."""
    needed = 4 * read_model_spec(folder).num_parameters
    free = psutil.virtual_memory().available
    if 2 * needed <= free:
        return ""
    return (
        f"its weights take {needed / 2**30:.0f} GiB in float32, more than half of the "
        f"{free / 2**30:.0f} GiB that are free; toolkits/convert compares it elsewhere"
    )


def _check_log_probs(run: RunningRanks, folder: Path, batch: TrainingBatch) -> dict[str, float]:
    config = run.config
    ours, _ = run.actor.log_probs(batch)
    theirs = hf_log_probs(folder, batch, config.rollout.temperature)
    metrics = measure(ours, theirs).metrics()
    moe = read_model_spec(config.model.path).experts > 0
    noise = measure_noise(run.actor, batch, seed=0).excess
    limit = log_prob_limit(config.model.dtype is DType.float32, moe, noise)
    # Written so that NaN is above it.
    if not metrics["mean_exp_abs_diff"] <= limit:
        raise WeightsError(
            f"mean exp|logp_megatron - logp_transformers| over {len(batch)} sequences is "
            f"{metrics['mean_exp_abs_diff']:.6f}, above {limit:.6g}"
        )
    return {
        _OF_THE_EXPORT[0]: metrics["mean_exp_abs_diff"],
        _OF_THE_EXPORT[1]: metrics["max_abs_diff"],
    }


def summarize(config: Config, layout: RunLayout, extra: dict[str, float]) -> dict[str, Any]:
    """Write ``curves.png`` and ``summary.json`` from the run's metrics; returns the summary."""
    run_dir = Path(config.runner.run_dir)
    lines = read_metrics(run_dir)
    held_out = [line for line in lines if "eval/accuracy" in line]
    train_s = sum(line.get("timing/step") or 0.0 for line in lines)
    alignment = [
        line["alignment/mean_exp_abs_diff"]
        for line in lines
        if line.get("alignment/mean_exp_abs_diff") is not None
    ]
    summary: dict[str, Any] = {
        "eval/accuracy_before": held_out[0]["eval/accuracy"] if held_out else None,
        "eval/accuracy_after": held_out[-1]["eval/accuracy"] if held_out else None,
        "eval/standard_error_before": held_out[0].get(_ERROR) if held_out else None,
        "eval/standard_error_after": held_out[-1].get(_ERROR) if held_out else None,
        # The worst of all steps, not the last.
        "alignment/mean_exp_abs_diff": max(alignment) if alignment else math.nan,
        "layout": {
            "tp": layout.actor.tensor_parallel,
            "pp": layout.actor.pipeline_parallel,
            "dp": layout.actor.data_parallel,
            "cp": layout.actor.context_parallel,
            "engines": layout.engines,
        },
        "steps": lines[-1]["step"],
        "tokens_generated": int(sum(line.get("rollout/response_tokens", 0) for line in lines)),
        "train_s": train_s,
        "skipped_steps": sum(line.get("sampling/trained_groups") == 0 for line in lines),
        # GPU hours of the steps that count; starts, exports and repeated steps are not in it.
        "gpu_hours": layout.accelerators * train_s / 3600,
        # Not those of an earlier export.
        **dict.fromkeys(_OF_THE_EXPORT),
        **extra,
    }
    update_summary(run_dir, summary)
    plot_curves(run_dir)
    return summary


def ending(config: Config, summary: Mapping[str, Any]) -> str:
    """Result of a run, its files and next commands, for the terminal."""
    run_dir = Path(config.runner.run_dir)
    took = duration(summary["train_s"])
    if summary["gpu_hours"]:
        took += f" = {summary['gpu_hours']:.1f} GPU-hours"
    tokens = f"{summary['tokens_generated']:,} response tokens"
    lines = ["", f"done     {summary['steps']:,} steps in {took}, on {tokens}"]
    if skipped := summary["skipped_steps"]:
        lines.append(
            f"skipped  {skipped:,} of them, because too few groups passed algorithm.filter"
            if skipped < summary["steps"]
            else "skipped  all of them, because too few groups passed algorithm.filter: no weight "
            "was changed"
        )
    if summary["eval/accuracy_before"] is not None:
        before, after = (_accuracy(summary, when) for when in ("before", "after"))
        lines.append(f"accuracy {before} before, {after} after, on held-out problems")
    return "\n".join(
        [
            *lines,
            f"health   {_health(run_dir, summary)}",
            f"model    {run_dir / 'hf'}, for transformers and vLLM",
            f"curves   {run_dir / 'curves.png'}; tensorboard --logdir {run_dir / 'tensorboard'}",
            f"samples  {run_dir / 'samples'}: every response with its grade",
            f"report   rlmath report {shlex.quote(str(run_dir))}: all of it as one page",
            f"next     {_evaluate_command(config)}",
        ]
    )


def _health(run_dir: Path, summary: Mapping[str, Any]) -> str:
    """Warnings, and how far log-probs of engine, actor and export are apart."""
    count = len(RunFolder(run_dir).warnings)
    parts = [f"warnings: {count:,}, in {run_dir / WARNINGS_FILE}" if count else "no warning"]
    for who, tag in (
        ("engine and actor, worst step", "alignment/mean_exp_abs_diff"),
        ("actor and exported model", _OF_THE_EXPORT[0]),
    ):
        value = summary.get(tag)
        if value is not None and math.isfinite(value):
            parts.append(f"{who}: {value:.6f}")
    unit = "; mean exp|Δ log-prob| of " * (len(parts) > 1)
    return parts[0] + unit + ", ".join(parts[1:])


def _accuracy(summary: Mapping[str, Any], when: str) -> str:
    error = summary[f"eval/standard_error_{when}"]
    spread = "" if error is None else f" ± {error:.3f}"
    return f"{summary[f'eval/accuracy_{when}']:.3f}{spread}"


# Settings of the sections for prompts, sampling and grades that the command below does not repeat.
# Accuracy does not depend on the rewards.
_NOT_FOR_EVALUATION = {
    "data": {"train_paths", "train_weights", "eval_paths", "shuffle", "seed"},
    "eval": {"benchmarks", "data_dir", "published_settings", "checkpoint", "every", "samples"},
    "reward": {"items", "correct", "incorrect", "on_error", "num_workers", "workers_on"},
}


def _evaluate_command(config: Config) -> str:
    """Evaluates the trained model on the same held-out problems, or on a benchmark."""
    run_dir, data = Path(config.runner.run_dir), config.data
    words = [path_override("model.path", run_dir / "hf"), f"model.dtype={config.model.dtype.name}"]
    words.append(path_override("runner.run_dir", run_dir))
    if data.eval_paths:
        paths = ",".join(map(quoted_path, data.eval_paths))
        words += [
            f"data.eval_paths=[{paths}]",
            f"eval.samples={8 if config.eval.temperature else 1}",
        ]
        for section, left_out in _NOT_FOR_EVALUATION.items():
            own = getattr(config, section)
            words += [
                override(f"{section}.{field.name}", getattr(own, field.name))
                for field in dataclasses.fields(own)
                if field.name not in left_out
                and getattr(own, field.name) != getattr(type(own)(), field.name)
            ]
        words.append(f"rollout.max_response_tokens={config.rollout.max_response_tokens}")
    else:
        words.append("eval.benchmarks=[{name: math500}]")
    return shlex.join(["rlmath", "evaluate", *words])
