"""Sampling and grading held-out problems, inside training and as ``rlmath evaluate``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rlmath.config.load import save
from rlmath.config.schema import Config
from rlmath.data import load_problems, load_tokenizer
from rlmath.monitor import Monitor, open_monitor
from rlmath.rollout.requests import requests_for
from rlmath.session import Session, open_session, with_model_folder
from rlmath.train_metrics import STATUSES
from rlmath.types import Group, Problem

# Steps of evaluation have random streams of their own, apart from training's.
SEED_OFFSET = 1_000_003


def run(config: Config) -> int:
    """Evaluate ``model.path`` on ``data.eval_paths``; every response is kept.

    Writes to ``run_dir/evaluation``, apart from what a training run has there.
    """
    config = with_model_folder(config)
    run_dir = Path(config.runner.run_dir) / "evaluation"
    save(config, run_dir / "config.yaml")
    tokenizer = load_tokenizer(config.model.path)
    problems, report = load_problems(
        config.data.eval_paths, config.data, tokenizer, limit=config.data.max_eval_problems
    )
    print("held-out problems:", report.describe(config.data.max_prompt_tokens), flush=True)
    with (
        open_session(config, optimizer=None) as session,
        open_monitor(run_dir, config.runner, total_steps=0) as monitor,
    ):
        metrics = evaluate(session, problems, monitor, step=0)
        metrics = monitor.log_step(0, metrics)
    path = run_dir / "metrics.json"
    path.write_text(json.dumps(metrics, indent=2) + "\n")
    for name, value in metrics.items():
        print(f"{name:32} {value:.4f}")
    print(f"written to {path}; every response is in {run_dir / 'samples'}")
    return 0


def evaluate(
    session: Session, problems: Sequence[Problem], monitor: Monitor, step: int
) -> dict[str, float]:
    """Sample and grade the held-out problems with the engines' present weights."""
    config = session.config
    settings = config.eval
    sampling = session.sampling
    with monitor.phase("evaluate"):
        requests = requests_for(
            problems,
            samples=settings.samples,
            max_tokens=settings.max_response_tokens or config.rollout.max_response_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            run_seed=config.runner.seed + SEED_OFFSET,
            step=step,
        )
        samples = sampling.pool.generate(requests)
        groups = sampling.collector.collect(problems, samples, settings.samples).wait()
        sampling.rewards.metrics()  # Evaluation's figures are not training's.
    monitor.log_samples(step, groups, kind="eval")
    return eval_metrics(groups)


def eval_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Accuracy (the mean over problems of the mean over samples) and its standard error.

    The error is that of a mean over problems drawn at random: the deviation (Bessel) of the
    problems' accuracies over the root of their number.
    """
    per_problem = [
        sum(bool(s.correct) for s in group.samples) / len(group.samples) for group in groups
    ]
    n = len(per_problem)
    mean = sum(per_problem) / n
    variance = sum((p - mean) ** 2 for p in per_problem) / (n - 1) if n > 1 else math.nan
    samples = [s for group in groups for s in group.samples]
    metrics = {
        "eval/accuracy": mean,
        "eval/accuracy_standard_error": math.sqrt(variance / n),
        "eval/solved_share": sum(any(s.correct for s in g.samples) for g in groups) / n,
        "eval/response_length": sum(len(s.sample.token_ids) for s in samples) / len(samples),
        "eval/truncated_share": sum(s.sample.finish_reason == "length" for s in samples)
        / len(samples),
    }
    for status in STATUSES[2:]:
        metrics[f"eval/{status}_share"] = sum(s.status == status for s in samples) / len(samples)
    return metrics
