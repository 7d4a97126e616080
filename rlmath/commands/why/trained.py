"""What a sample was worth in the update: its advantage and weights, computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.advantages import (
    ADVANTAGES,
    WITHOUT_REWARDS,
    AdvantageSettings,
    needs_value_model,
    sequence_advantages,
    token_advantages,
)
from rlmath.algorithms.advantages.base import Groups
from rlmath.algorithms.aggregation import sequence_weights
from rlmath.algorithms.filters import TruncatedRule
from rlmath.batching.minibatches import minibatches
from rlmath.commands.why.batch import Row, Step
from rlmath.commands.why.tokens import token_lines, traced
from rlmath.config.algorithm import KlPlace
from rlmath.config.options import ADVANTAGE_OPTIONS
from rlmath.config.schema import Config
from rlmath.monitor.digests import of_number, same_item
from rlmath.monitor.writer import STEP
from rlmath.training.algorithm_settings import aggregation_constant
from rlmath.weights.sequence_fingerprints import SequenceFingerprints


@dataclass(frozen=True)
class Batch:
    """A step's sequences as its samples file has them.

    Attributes:
        rewards: ``[N]`` float32, what the estimator reads; ``[N, K]`` for ``gdpo``.
        totals: ``[N]`` float32.
        group_ids: ``[N]`` int64.
        lengths: ``[N]`` int64, response tokens.
        takes_part: ``[N]`` bool, whether the sequence is in the loss.
    """

    rewards: Tensor
    totals: Tensor
    group_ids: Tensor
    lengths: Tensor
    takes_part: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], config: Config) -> Batch:
        """The sequences of these rows."""
        problems: dict[tuple[str, int], int] = {}
        ids = [problems.setdefault(_group(row), len(problems)) for row in rows]
        settings = advantage_settings(config, rows)
        names = list(settings.reward_weights) if settings.name == "gdpo" else []
        totals = torch.tensor([_number(row.get("reward")) for row in rows])
        table = [
            [_number((row.get("rewards") or {}).get(name)) for name in names]
            if row.get("reward") is not None
            else [float("nan")] * len(names)
            for row in rows
        ]
        return cls(
            torch.tensor(table) if names else totals,
            totals,
            torch.tensor(ids),
            torch.tensor([row["response_tokens"] for row in rows]),
            torch.tensor(list(_takes_part(rows, config))),
        )

    @property
    def token_counts(self) -> Tensor:
        """``[N]`` int64, tokens in the loss."""
        return torch.where(self.takes_part, self.lengths, 0)


def advantage_settings(config: Config, rows: Sequence[Row]) -> AdvantageSettings:
    """As :func:`rlmath.training.algorithm_settings.advantage_settings`, without the rewards
    themselves, which may need a server."""
    algorithm, items = config.algorithm, config.reward.items
    names = list(rows[0].get("rewards") or {}) if rows else []
    weights = [item.weight for item in items] if len(items) == len(names) else [1.0] * len(names)
    return AdvantageSettings(
        name=algorithm.advantage,
        options=ADVANTAGE_OPTIONS.options(algorithm.advantage, algorithm.advantage_options),
        whiten_tokens=algorithm.whiten_tokens,
        whiten_epsilon=algorithm.whiten_epsilon,
        reward_weights={n: w for n, w in zip(names, weights, strict=True) if w},
    )


def group_lines(step: Step) -> Iterator[str]:
    """The group's samples and what the filter made of them."""
    for row in step.group:
        here = "→" if row["index"] == step.row["index"] else " "
        reward = row.get("reward")
        yield (
            f"{here} {row['index']:>3}  reward {'none' if reward is None else f'{reward:g}':>8}  "
            f"{row.get('status')!s:<10} {row['response_tokens']:>6} tokens  {_answer(row)}"
        )
    if step.row.get("dropped") is not None:
        yield f"algorithm.filter dropped the group: {step.row['dropped']}"


def advantage_lines(step: Step, values: Mapping[str, Tensor] | None = None) -> Iterator[str]:
    """The estimator's arithmetic, and whether its result is what the update used.

    Args:
        values: Of the sample's tokens in the update; ``None``: as far as the step has kept them.
    """
    config, update = step.update.config, step.update
    name = config.algorithm.advantage
    place = _place(step)
    if place is None:
        yield _not_trained(step)
        return
    if update.step != step.address.step:
        yield f"the group was carried over: step {update.step} trained on it"
    used = update.noted("advantages", step.address.key)
    if needs_value_model(name):
        yield f"algorithm.advantage={name}: from the value model's values"
        yield from _by_token(step, values, None, used, config.value.whiten_advantages)
        return
    batch = Batch.of(step.update.trained, config)
    settings = advantage_settings(config, update.trained)
    described = (ADVANTAGES.get(name).__doc__ or "").strip().split("\n")[0]
    estimator = described.replace("``", "").rstrip(".")
    yield f"algorithm.advantage={name}: {estimator}"
    options = ", ".join(f"{k}={v}" for k, v in config.algorithm.advantage_options.items())
    if options:
        yield f"options: {options}"
    groups = Groups(batch.totals, batch.group_ids)
    yield (
        f"group: {int(groups.sizes[place])} scored samples, mean reward "
        f"{float(groups.mean()[place]):.6g}, standard deviation {float(groups.std()[place]):.6g}; "
        f"this one's reward less the mean: {float(groups.centered()[place]):+.6g}"
    )
    in_reward = config.algorithm.kl_in is KlPlace.reward
    found = sequence_advantages(
        batch.rewards, batch.group_ids, batch.token_counts, settings, token_rewards=in_reward
    )
    yield f"advantage: {float(found.values[place]):+.6g}"
    if in_reward or config.algorithm.distill_coef > 0:
        whitened = found.whiten_epsilon is not None
        yield from _by_token(step, values, float(found.values[place]), used, whitened)
        return
    tokens = token_advantages(found, batch.lengths, _repeated(batch.takes_part, batch.lengths))
    prints = SequenceFingerprints.of(torch.arange(len(batch.lengths)), batch.lengths, {"a": tokens})
    if found.whiten_epsilon is not None:
        yield f"whitened over the step's tokens; sum over its own: {float(prints.sums['a'][place])}"
    yield from _compared(prints, place, used)


def _by_token(
    step: Step,
    values: Mapping[str, Tensor] | None,
    advantage: float | None,
    used: tuple[str, float] | None,
    whitened: bool,
) -> Iterator[str]:
    """Where tokens of a sample have separate advantages."""
    values = traced(step) if values is None else values
    if values is not None:
        yield from token_lines(step, values, advantage, whitened)
        return
    if step.update.config.algorithm.distill_coef:
        yield from _distilled(step)
    yield (
        "values by token are kept of a few samples of a step (runner.token_samples), and this is "
        "none of them; --update computes them again"
    )
    if used is not None:
        yield f"used: sum over its {step.row['response_tokens']} tokens {used[1]:.6g}"


def _distilled(step: Step) -> Iterator[str]:
    """What a teacher adds, of which the sums are kept."""
    algorithm, key = step.update.config.algorithm, step.address.key
    teacher = step.update.noted("teacher_log_probs", key)
    policy = step.update.noted("old_log_probs", key)
    if teacher is not None and policy is not None:
        yield (
            f"log-probs of its tokens: their sum is {teacher[1]:.6g} with the teacher and "
            f"{policy[1]:.6g} with the policy"
        )
    yield (
        f"algorithm.distill_coef={algorithm.distill_coef:g}: times the difference of each token, "
        f"within {algorithm.distill_clip:g} nats, is then added"
    )


def _compared(
    found: SequenceFingerprints, place: int, used: tuple[str, float] | None
) -> Iterator[str]:
    if used is None:
        yield "what the update used is not known: the step's digests are gone"
        return
    total = float(found.sums["a"][place])
    if same_item(of_number(int(found.bits["a"][place])), used[0]):
        yield "equal to what the update used, bit by bit"
    elif abs(total - used[1]) <= 1e-5 * max(1.0, abs(total)):
        yield "equal to what the update used up to rounding (other ranks added in another order)"
    else:
        yield (
            f"NOT what the update used: the sum over its tokens is {total:.6g}, and {used[1]:.6g} "
            "was used"
        )


def weight_lines(step: Step) -> Iterator[str]:
    """What each of its tokens weighs in the loss."""
    place, update = _place(step), step.update
    if place is None or update.step is None:
        return
    config, address = update.config, step.address
    algorithm = config.algorithm
    batch = Batch.of(step.update.trained, config)
    seed = config.runner.seed + update.step
    dealt = minibatches(batch.group_ids.tolist(), algorithm.minibatches_per_step, seed)
    number = next(i for i, members in enumerate(dealt) if place in members)
    members = dealt[number]
    counts = batch.token_counts[members]
    weights = sequence_weights(
        algorithm.aggregation, counts, batch.group_ids[members], aggregation_constant(config)
    ).float()
    tokens, weight = int(batch.token_counts[place]), float(weights[members.index(place)])
    yield (
        f"minibatch {number + 1} of {len(dealt)}: {len(members)} sequences, "
        f"{int(counts.sum())} tokens in the loss"
    )
    if not tokens:
        yield f"it is not in the loss: {_why_not(step)}"
        return
    share = weight * tokens / float((weights * counts).sum())
    yield (
        f"algorithm.aggregation={algorithm.aggregation}: each of its {tokens} tokens weighs "
        f"{weight:.6g}; together {weight * tokens:.6g}, {share:.2%} of the minibatch"
    )
    yield "its share of the gradient and of the gradient's norm: --update redoes the update for it"
    factors = update.noted("policy_factors", address.key)
    if factors is not None:
        yield (
            f"factors of the policy term (correction, entropy): sum {factors[1]:.6g} over its "
            f"{tokens} tokens, where 1 each would be {tokens}"
        )
    old = update.noted("old_log_probs", address.key)
    rollout = step.noted("rollout_log_probs", "samples", address.key)
    if old is not None and rollout is not None:
        yield (
            f"actor before the update minus engine, log-prob of the response: "
            f"{old[1] - rollout[1]:+.3g} nats"
        )


def _answer(row: Row) -> str:
    answer = row.get("answer")
    return "no answer" if answer is None else f"answer {str(answer)[:40]!r}"


def _place(step: Step) -> int | None:
    keys = [f"{row['problem_id']}/{row['index']}" for row in step.update.trained]
    return keys.index(step.address.key) if step.address.key in keys else None


def _not_trained(step: Step) -> str:
    if step.row.get("dropped") is not None:
        return f"none: algorithm.filter dropped the group ({step.row['dropped']})"
    update = step.update
    if update.step is None:
        last = step.files.metrics[-1][STEP] if step.files.metrics else step.address.step
        return f"none yet: the group is carried over, and no step up to {last} has trained on it"
    if update.details is None:
        return "not known: the step's file with digests is gone (runner.samples_keep_gib)"
    if not update.details["keys"].get("sequences"):
        return "none: the step was skipped, as too few groups passed the filter"
    return "not known: samples that the step trained on are not in samples/ any more"


def _why_not(step: Step) -> str:
    if step.row.get("reward") is None:
        return "nothing could score it"
    if step.update.config.algorithm.truncated is TruncatedRule.mask and _is_truncated(step.row):
        return "it is truncated (algorithm.truncated=mask)"
    return "it repeats an earlier sample of its group (algorithm.filter.mask_duplicates)"


def _takes_part(rows: Sequence[Row], config: Config) -> Iterator[bool]:
    algorithm = config.algorithm
    seen: set[tuple[object, ...]] = set()
    for row in rows:
        part = row.get("reward") is not None or algorithm.advantage in WITHOUT_REWARDS
        if algorithm.truncated is TruncatedRule.mask and _is_truncated(row):
            part = False
        if algorithm.filter.mask_duplicates:
            # Tokens are not kept; the same text in as many tokens is the same response.
            response = (*_group(row), row["response"], row["response_tokens"])
            if part:
                part = response not in seen
                seen.add(response)
        yield part


def _is_truncated(row: Row) -> bool:
    return row.get("finish_reason") == "length"


def _group(row: Row) -> tuple[str, int]:
    """A problem, and the step that sampled it: a group that was carried over may be there with a
    later one of the same problem."""
    return row["problem_id"], row["step"]


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _repeated(values: Tensor, counts: Tensor) -> Tensor:
    return torch.repeat_interleave(values, counts)
