"""What a training run leaves for a person: curves, a summary, and whether its export is right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rlmath.algorithms.mismatch import measure
from rlmath.config.schema import Config
from rlmath.monitor import plot_curves, read_metrics, update_summary
from rlmath.training.session import Session
from rlmath.types import TrainingBatch
from rlmath.validation.hf_log_probs import hf_log_probs


def check_export(session: Session, folder: Path, batch: TrainingBatch) -> dict[str, float]:
    """Compare the actor's log-probs with those of the exported folder in ``transformers``.

    Args:
        batch: Its first ``runner.check_export_sequences`` sequences are used.

    Returns:
        ``alignment/hf_mean_exp_abs_diff`` and ``alignment/hf_max_abs_diff``; nothing when the
        setting is 0.
    """
    count = min(session.config.runner.check_export_sequences, len(batch))
    if not count:
        return {}
    part = batch.select(range(count))
    ours, _ = session.actor.log_probs(part)
    theirs = hf_log_probs(folder, part, session.config.rollout.temperature)
    metrics = measure(ours, theirs).metrics()
    return {
        "alignment/hf_mean_exp_abs_diff": metrics["mean_exp_abs_diff"],
        "alignment/hf_max_abs_diff": metrics["max_abs_diff"],
    }


def summarize(config: Config, session: Session, extra: dict[str, float]) -> dict[str, Any]:
    """Write ``curves.png`` and ``summary.json`` from the run's metrics; returns the summary."""
    run_dir = Path(config.runner.run_dir)
    lines = read_metrics(run_dir)
    layout = session.layout
    held_out = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    alignment = [
        line["alignment/mean_exp_abs_diff"]
        for line in lines
        if line.get("alignment/mean_exp_abs_diff") is not None
    ]
    summary: dict[str, Any] = {
        "eval/accuracy_before": held_out[0] if held_out else None,
        "eval/accuracy_after": held_out[-1] if held_out else None,
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
        "train_s": sum(line.get("timing/step") or 0.0 for line in lines),
        **extra,
    }
    update_summary(run_dir, summary)
    plot_curves(run_dir)
    return summary
