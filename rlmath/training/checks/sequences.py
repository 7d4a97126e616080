"""Compare what the ranks trained on with the driver's samples, sequence by sequence.

Each sequence is trained on once, with the tokens of its prompt and sample, the advantage that
follows from the rewards of its group, and the gradient that follows from that: where the importance
ratio is 1, the loss's derivative by the log-probs of a sequence is ``-sum w f A`` for every policy
loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlmath.actor.sequence_report import ADVANTAGE, GRADIENT, PULL, SIZE, SequenceReport
from rlmath.config.algorithm import KlPlace
from rlmath.config.options import ADVANTAGE_OPTIONS
from rlmath.config.schema import Config, OldLogProbs
from rlmath.training.checks.base import AfterUpdate, BeforeUpdate, Metrics, StepCheck, report
from rlmath.training.checks.own_advantages import ScoredGroups, own_advantages
from rlmath.types import Group
from rlmath.weights.sequence_fingerprints import token_digest

# Relative tolerances of a float32 advantage, and of a gradient that is a float32 sum over a
# sequence.
ADVANTAGE_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# How often the root mean square deviation of the ratio from 1 a sequence's mean may be off.
NOISE_FACTOR = 10.0
_NAMED = 3


@dataclass(frozen=True)
class Expected:
    names: Sequence[str]  # Names for messages.
    groups: Sequence[int]  # Index of each one's group.
    digests: Tensor  # [N] int64, see token_digest.
    tokens: Tensor  # [N] float64, in the loss.
    advantages: Tensor | None  # [N] float64, of each token; None: rewards alone do not say.


class TrainedSequences(StepCheck):
    """Compares the ranks' report of their sequences with the samples."""

    def __init__(self) -> None:
        self._expected: tuple[int, Expected] | None = None

    def before_update(self, now: BeforeUpdate) -> Metrics:
        self._expected = None
        if now.batch is not None:
            tokens = now.batch.sequences.loss_token_counts
            broken = wrong_loss_tokens(now.groups, now.batch.takes_part.tolist(), tokens.tolist())
            report(now.run.config, broken, now.step, now.monitor)
            items = now.run.sampling.rewards.items
            weights = {item.label: item.weight for item in items if item.weight}
            config = now.run.config
            self._expected = now.step, expected_sequences(config, now.groups, tokens, weights)
        return {}

    def after_update(self, now: AfterUpdate) -> Metrics:
        found = None if now.result is None else now.result.sequences
        if found is None or now.result is None:
            return {}
        config, broken = now.run.config, []
        if self._expected is not None and self._expected[0] == now.step:
            expected = self._expected[1]
            broken = wrong_places(found, expected.names, complete=not now.result.early_stopped)
            broken = broken or wrong_tokens(found, expected)
            broken = broken or wrong_advantages(found, expected)
        if not broken:
            noise, alone, unclipped = self._noise(now)
            broken = wrong_gradients(found, noise, alone=alone, unclipped=unclipped)
        report(config, broken, now.step, now.monitor)
        return {}

    def _noise(self, now: AfterUpdate) -> tuple[float, bool, bool]:
        """How far ratios of the first minibatch are from 1, whether the policy term is all that it
        has a gradient of, and whether that term lost no token."""
        assert now.result is not None
        config, first = now.run.config, now.result.minibatches[0]
        algorithm = config.algorithm
        clipped = any(v for name, v in first.items() if name.startswith(("clip_", "dual_clip")))
        kl_coef = now.metrics["train/kl_coef"] if algorithm.kl_in is KlPlace.loss else 0.0
        unclipped = (
            not (clipped or first["discarded"])
            and algorithm.old_log_probs is OldLogProbs.recompute
            and algorithm.correction.off_policy_mask_kl is None
        )
        alone = unclipped and not (kl_coef or now.metrics["train/entropy_coef"])
        # approx_kl is half the mean square of the log-ratio where that is small.
        return math.sqrt(2.0 * max(first["approx_kl"], 0.0)), alone, unclipped


def expected_sequences(
    config: Config, groups: Sequence[Group], tokens: Tensor, weights: Mapping[str, float]
) -> Expected:
    """Expected sequences of a step, from its samples.

    Args:
        tokens: ``[N]`` int64, of each sample in the loss.
        weights: Weights of the rewards that count, by label.
    """
    samples = [one for group in groups for one in group.samples]
    of_groups = [np.array(group.problem.prompt_token_ids, np.int32) for group in groups]
    prompts = [of_groups[i] for i, group in enumerate(groups) for _ in group.samples]
    pairs = zip(prompts, samples, strict=True)
    digests = [token_digest(prompt, one.sample.token_ids) for prompt, one in pairs]
    advantages = _advantages(config, groups, tokens.tolist(), weights)
    return Expected(
        [f"sample {one.sample.index} of problem {one.sample.problem_id}" for one in samples],
        [index for index, group in enumerate(groups) for _ in group.samples],
        torch.tensor(digests, dtype=torch.int64),
        tokens.double(),
        None if advantages is None else torch.tensor(advantages, dtype=torch.float64),
    )


def wrong_loss_tokens(
    groups: Sequence[Group], takes_part: Sequence[bool], tokens: Sequence[int]
) -> list[str]:
    """A sentence unless each sequence's tokens in the loss are those that the model sampled.
    ``takes_part``: whether each sample is in the loss. ``tokens``: number of those in the loss."""
    samples = [one.sample for group in groups for one in group.samples]
    for sample, is_in, count in zip(samples, takes_part, tokens, strict=True):
        wanted, since = 0, None
        for kind, start in (*sample.segments, ("end", len(sample.token_ids))):
            wanted += 0 if since is None else start - since
            since = start if kind == "model" else None
        if count != (wanted if is_in else 0):
            return [
                f"sample {sample.index} of problem {sample.problem_id} has {count} tokens in the "
                f"loss, but the model sampled {wanted} and it takes {'' if is_in else 'no '}part"
            ]
    return []


def _advantages(
    config: Config, groups: Sequence[Group], tokens: Sequence[int], weights: Mapping[str, float]
) -> list[float] | None:
    algorithm = config.algorithm
    if algorithm.distill_coef or (algorithm.kl_in is KlPlace.reward and algorithm.kl_coef):
        return None  # Something is added to each token.
    left = iter(tokens)
    return own_advantages(
        algorithm.advantage,
        ScoredGroups(
            [[_float32(one.reward) for one in group.samples] for group in groups],
            [
                [[_float32(one.rewards.get(name)) for name in weights] for one in group.samples]
                for group in groups
            ],
            list(weights.values()),
            [[next(left) for _ in group.samples] for group in groups],
            ADVANTAGE_OPTIONS.of(config),
        ),
        algorithm.whiten_epsilon if algorithm.whiten_tokens else None,
    )


def _float32(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(np.float32(value))


def wrong_places(found: SequenceReport, names: Sequence[str], *, complete: bool) -> list[str]:
    """A sentence unless every sequence was trained on exactly once. ``names``: names of the step's
    sequences. ``complete``: no minibatch was left out."""
    times = torch.bincount(found.places, minlength=len(names)).tolist()
    twice = [names[i] for i, count in enumerate(times[: len(names)]) if count > 1]
    never = [names[i] for i, count in enumerate(times[: len(names)]) if not count]
    if twice or (never and complete):
        return [
            f"{len(twice)} of {len(names)} sequences were trained on more than once"
            f"{_list_names(twice)} and {len(never)} were not trained on{_list_names(never)}: a "
            "data-parallel rank has sequences of another rank"
        ]
    return []


def wrong_tokens(found: SequenceReport, expected: Expected) -> list[str]:
    """A sentence if the tokens of a sequence are not those of its prompt and sample."""
    wrong = (found.tokens != expected.digests[found.places]).nonzero()[:, 0].tolist()
    if not wrong:
        return []
    names = [expected.names[found.places[i]] for i in wrong]
    return [
        f"{len(wrong)} of {len(found.places)} sequences have other tokens on the ranks than prompt "
        f"and sample have{_list_names(names)}"
    ]


def wrong_advantages(found: SequenceReport, expected: Expected) -> list[str]:
    """A sentence if the ranks trained with advantages that do not follow from the rewards."""
    if expected.advantages is None:
        return []
    counts = expected.tokens[found.places]
    wanted = expected.advantages[found.places] * counts
    scale = float(expected.advantages.abs().max()) if len(expected.advantages) else 0.0
    sums = found.sums[:, ADVANTAGE]
    tolerance = ADVANTAGE_TOLERANCE * (wanted.abs() + 0.1 * scale * counts)
    wrong = (~((sums - wanted).abs() <= tolerance)).nonzero()[:, 0].tolist()
    if not wrong:
        return []
    first = wrong[0]
    place = int(found.places[first])
    count = max(float(counts[first]), 1.0)
    groups = {expected.groups[int(found.places[i])] for i in wrong}
    return [
        f"the advantages of {len(wrong)} of {len(sums)} sequences in {len(groups)} groups do not "
        f"follow from their rewards: {expected.names[place]} was trained with a mean of "
        f"{float(sums[first]) / count:.6g}, and the rewards of its group give "
        f"{float(wanted[first]) / count:.6g}. {_cause(found, expected, sums, wanted)}"
    ]


def _cause(found: SequenceReport, expected: Expected, sums: Tensor, wanted: Tensor) -> str:
    if torch.allclose(sums, -wanted, rtol=1e-4, atol=1e-6):
        return "All have the opposite sign"
    assert expected.advantages is not None
    order = torch.argsort(found.places)
    counts = expected.tokens[found.places][order].clamp(min=1)
    given, own = (sums[order] / counts), expected.advantages[found.places][order]
    for shift in (1, -1):
        if torch.allclose(given, own.roll(shift), rtol=1e-4, atol=1e-6):
            return f"Each has that of the sequence {'before' if shift == 1 else 'after'} it"
    return "Rewards, groups or tokens are out of order, or the estimator is wrong"


def wrong_gradients(
    found: SequenceReport, noise: float, *, alone: bool, unclipped: bool = True
) -> list[str]:
    """A sentence if a sequence gave another gradient than its advantages say.

    Args:
        noise: Root mean square of how far the ratios of the first minibatch are from 1.
        unclipped: The first minibatch has no clipped token.
        alone: The first minibatch has no gradient but that of the policy term, and no clipped
            token, so that its gradient is known.
    """
    sums = found.sums
    none = sums[:, GRADIENT].isnan() & (sums[:, SIZE] > 0)
    if none.any():
        return [
            f"no backward pass reached {int(none.sum())} of {len(sums)} sequences, of minibatch "
            f"{int(found.minibatches[none][0])}: a micro-batch without a gradient"
        ]
    first = found.minibatches == 0
    zero = first & (sums[:, GRADIENT] == 0) & (sums[:, SIZE] > 0) & (sums[:, PULL] != 0)
    if unclipped and zero.any():
        return [
            f"{int(zero.sum())} of {int(first.sum())} sequences of the first minibatch have a "
            "gradient of exactly 0, though they have advantages: a micro-batch without a gradient"
        ]
    if not alone or not first.any():
        return []
    pull, size, gradient = (sums[first, column] for column in (PULL, SIZE, GRADIENT))
    tolerance = size * (GRADIENT_TOLERANCE + NOISE_FACTOR * noise)
    wrong = ~((gradient + pull).abs() <= tolerance)
    if not wrong.any():
        return []
    index = int(wrong.nonzero()[0])
    return [
        f"the gradients of {int(wrong.sum())} of {len(pull)} sequences of the first minibatch are "
        f"not those of their advantages: at place {int(found.places[first][index])} the loss's "
        f"derivative by the log-probs is {float(gradient[index]):.6g}, and -sum w f A is "
        f"{-float(pull[index]):.6g} (to within {float(tolerance[index]):.1g})"
    ]


def _list_names(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return f" ({', '.join(names[:_NAMED])}{more})" if names else ""
