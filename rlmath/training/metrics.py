"""Metrics of a training step, by the names that ``docs/metrics.md`` explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import stdev
from typing import TYPE_CHECKING

from rlmath.algorithms.off_policy import mask_share_by_lag
from rlmath.environments.metrics import environment_metrics
from rlmath.grading.result import FAILED_GRADES, STATUSES
from rlmath.monitor.repetition import repetition
from rlmath.types import GradedSample, Group, Repetition, Sample

if TYPE_CHECKING:
    from rlmath.actor.rank_step import Moments, ValueResult
    from rlmath.actor.settings import UpdateResult
    from rlmath.batching.shards import Sequences


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, accuracy, lengths and statuses of grades, over all samples of the step.

    Groups that a filter dropped are among them; nothing when nothing was sampled.
    """
    if not groups:
        return {}
    samples = [s for group in groups for s in group.samples]
    rewards = [s.reward for s in samples if s.reward is not None]
    judged = [s.correct for s in samples if s.correct is not None]
    lengths = [s.sample.model_tokens for s in samples]
    # Seen when a sample is graded, while others are still generated.
    found = [s.repetition or _repetition(s.sample) for s in samples]
    metrics = {
        "rollout/rewards": _mean(rewards),
        **_standard_error(groups),
        "rollout/accuracy": _mean([float(c) for c in judged]),
        "rollout/unscored_share": 1.0 - len(rewards) / len(samples),
        "rollout/response_length": _mean(lengths),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_share": _mean([s.sample.finish_reason == "length" for s in samples]),
        "rollout/truncated_groups_share": _mean([_all_truncated(g) for g in groups]),
        "rollout/compression_ratio": _mean([one.compression_ratio for one in found]),
        "rollout/repeated_ngrams_share": _mean([one.repeated_ngrams for one in found]),
        "rollout/repetitive_share": _mean([one.is_repetitive for one in found]),
        "rollout/equal_reward_groups_share": _mean([_all_equal(g.samples) for g in groups]),
        "rollout/solved_share": _mean([any(s.correct for s in g.samples) for g in groups]),
        "rollout/prompt_length": _mean([len(g.problem.prompt_token_ids) for g in groups]),
    }
    for status in STATUSES:
        metrics[f"grading/{status}_share"] = _mean([s.status == status for s in samples])
    of_tools = environment_metrics([s.sample for s in samples])
    metrics |= {f"tools/{name}": value for name, value in of_tools.items()}
    metrics["grading/untabled_share"] = _mean([s.untabled for s in samples])
    metrics["grading/failed_share"] = _mean([s.status in FAILED_GRADES for s in samples])
    return metrics


def batch_metrics(sequences: Sequences) -> dict[str, float]:
    """Sizes of the step's batch."""
    responses = int(sequences.model_lengths.sum())
    return {
        "rollout/tokens": float(sequences.sequence_lengths.sum()),
        "rollout/response_tokens": float(responses),
        "rollout/masked_tokens_share": 1.0 - int(sequences.loss_token_counts.sum()) / responses,
    }


def update_metrics(result: UpdateResult) -> dict[str, float]:
    """Means over the step's minibatches; counts are sums and maxima are maxima."""
    minibatches = result.minibatches
    metrics: dict[str, float] = {}
    for name in minibatches[0] if minibatches else ():
        values = [one[name] for one in minibatches]
        if name.startswith(("discarded", "loss_weight", "entropy_term", "term_sizes")):
            continue  # For the invariants, and no figure of the run.
        if name.endswith("_max"):
            metrics[f"train/{name}"] = max(values)
        elif name == "lr" or name.endswith("_count"):
            metrics[f"train/{name}"] = values[-1] if name == "lr" else sum(values)
        else:
            metrics[f"train/{name}"] = _mean(values)
    if "train/entropy" in metrics:
        # The field's name for the policy's mean entropy.
        metrics["train/entropy_loss"] = metrics.pop("train/entropy")
    metrics["train/clip_fraction"] = metrics.get("train/clip_fraction_low", 0.0) + metrics.get(
        "train/clip_fraction_high", 0.0
    )
    metrics["train/early_stopped_minibatches"] = float(len(result.early_stopped))
    # Minibatches that early_stop_rest discards have no metrics.
    unseen = sum(index >= len(minibatches) for index in result.early_stopped)
    metrics["train/discarded_minibatches"] = sum(m["discarded"] for m in minibatches) + unseen
    return metrics


def off_policy_metrics(result: UpdateResult, now: int) -> dict[str, float]:
    """Samples that ``off_policy_mask_kl`` left out, by the age of the weights that sampled.
    ``now``: the weights version before the update."""
    found = mask_share_by_lag(result.off_policy, now)
    return {f"correction/{name}": share for name, share in found.items()}


def _repetition(sample: Sample) -> Repetition:
    own = sample.model_part()
    return repetition(own.text, own.token_ids)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _standard_error(groups: Sequence[Group]) -> dict[str, float]:
    """Standard error of the mean reward, over problems: samples of one problem are alike."""
    scored = [[s.reward for s in group.samples if s.reward is not None] for group in groups]
    means = [_mean(rewards) for rewards in scored if rewards]
    if len(means) < 2:
        return {}
    return {"rollout/rewards_standard_error": stdev(means) / len(means) ** 0.5}


def _all_truncated(group: Group) -> bool:
    return all(s.sample.finish_reason == "length" for s in group.samples)


def _all_equal(samples: Sequence[GradedSample]) -> bool:
    rewards = [s.reward for s in samples if s.reward is not None]
    return all(a == b for a, b in pairwise(rewards))


def memory_by_phase(peaks: Mapping[str, int]) -> dict[str, float]:
    """The metrics of a step. ``peaks``: in bytes, by phase; see ``ActorGroup.take_peaks``."""
    return {f"memory/{phase}_peak_gib": peak / 2**30 for phase, peak in peaks.items()}


def value_metrics(result: ValueResult) -> dict[str, float]:
    """``value/...`` of an update of PPO's value model."""
    minibatches = result.minibatches
    metrics = {
        f"value/{name}": sum(one[name] for one in minibatches) / len(minibatches)
        for name in minibatches[0]
        if name not in ("discarded", "lr")
    }
    metrics["value/lr"] = minibatches[-1]["lr"]
    metrics["value/discarded_minibatches"] = sum(one["discarded"] for one in minibatches)
    return metrics | _fit_metrics(result.moments)


def _fit_metrics(moments: Moments) -> dict[str, float]:
    """How well the values from before the update predicted the returns."""
    count = moments.count
    if not count:
        return {}
    mean = moments.return_sum / count
    # Rounding may leave a tiny negative number.
    spread = max(moments.return_square_sum / count - mean**2, 0.0)
    left = max(moments.error_square_sum / count - (moments.error_sum / count) ** 2, 0.0)
    # Returns that are all equal differ by rounding alone.
    equal = spread <= 1e-14 * moments.return_square_sum / count
    return {
        "value/mean": moments.value_sum / count,
        "value/return_mean": mean,
        "value/explained_variance": float("nan") if equal else 1.0 - left / spread,
    }
