from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlmath.config.benchmarks import HELD_OUT
from rlmath.environments.metrics import environment_metrics
from rlmath.evaluation.estimators import ks_for, maj_at_k, mean_and_errors, pass_at_k
from rlmath.evaluation.votes import count_votes
from rlmath.grading.result import STATUSES
from rlmath.types import Group

_ERRORS = ("accuracy_standard_error", "accuracy_sampling_error")


def benchmark_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Figures of one benchmark, by their names in ``docs/metrics.md``.

    A sample that no grader could judge is not right; a figure counts these by kind.
    """
    votes = [count_votes(group.samples) for group in groups]
    sizes = [len(group.samples) for group in groups]
    mean, over_problems, over_samples = mean_and_errors([v.correct for v in votes], sizes)
    samples = [s for group in groups for s in group.samples]
    metrics = {"accuracy": mean, "accuracy_standard_error": over_problems}
    if min(sizes) > 1:
        metrics["accuracy_sampling_error"] = over_samples
    for k in ks_for(min(sizes)):
        metrics[f"pass_at_{k}"] = _mean(
            [pass_at_k(n, v.correct, k) for n, v in zip(sizes, votes, strict=True)]
        )
        metrics[f"maj_at_{k}"] = _mean([maj_at_k(v.correct, v.wrong, v.silent, k) for v in votes])
    metrics["response_length"] = _mean([s.sample.model_tokens for s in samples])
    metrics["truncated_share"] = _mean([s.sample.finish_reason == "length" for s in samples])
    of_tools = environment_metrics([s.sample for s in samples])
    shown = ("turns", "calls", "failed_share") if of_tools else ()
    metrics |= {f"tools_{name}": of_tools[name] for name in shown}
    rewards = [s.reward for s in samples if s.reward is not None]
    if rewards and all(s.status == "ungraded" for s in samples):
        metrics["reward"] = _mean(rewards)
    for status in (*STATUSES[2:], "ungraded"):
        metrics[f"{status}_share"] = _mean([s.status == status for s in samples])
    return metrics


def tag_metrics(by_benchmark: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step: ``eval/<benchmark>/<figure>``, and their means ``eval/<figure>``.

    Every benchmark weighs the same in the mean, and only figures that all have are in it; the
    error of a mean of ``B`` independent figures is ``sqrt(sum of squares) / B``. The held-out
    problems of ``data.eval_paths`` alone have no name.
    """
    metrics: dict[str, float] = {}
    first, *rest = by_benchmark.values()
    for name in first:
        if all(name in other for other in rest):
            values = [figures[name] for figures in by_benchmark.values()]
            if name in _ERRORS:
                mean = math.sqrt(sum(v * v for v in values)) / len(values)
            else:
                mean = _mean(values)
            metrics[f"eval/{name}"] = mean
    if list(by_benchmark) != [HELD_OUT]:
        for benchmark, figures in by_benchmark.items():
            metrics |= {f"eval/{benchmark}/{name}": value for name, value in figures.items()}
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
