"""Samples are what they say: where they end, what their text is, and how they were graded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlmath.algorithms.filters import TruncatedRule
from rlmath.config.schema import Config
from rlmath.data import load_tokenizer
from rlmath.grading import MathGrader
from rlmath.rewards.math_answer import MathAnswer
from rlmath.training.checks.base import BeforeUpdate, Metrics, StepCheck, report
from rlmath.types import GradedSample, Group
from rlmath.weights.hf_files import generation_config

# Samples of each step that are decoded and graded again; the grader takes a millisecond for each.
SAMPLES_AGAIN = 2
# A grade that ended like this says nothing about the answer.
_UNDECIDED = ("timeout", "error", "ungraded", "bad_gold")
_REPLACED = "\N{REPLACEMENT CHARACTER}"


class SampledResponses(StepCheck):
    """Ends and rewards of all samples; texts and grades of a few, others in each step."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._ends: frozenset[int] | None = None
        self._first_version = 0

    def before_update(self, now: BeforeUpdate) -> Metrics:
        config = now.session.config
        rewards = now.session.sampling.rewards
        if self._ends is None:
            self._ends = ends_of_responses(config.model.path)
            self._tokenizer = load_tokenizer(config.model.path)
            self._first_version = now.session.sampling.pool.weights_version
        groups = now.groups or now.finished
        samples = [one for group in groups for one in group.samples]
        broken = []
        if not config.rollout.ignore_eos:
            # What was sampled before a resume may have had another limit.
            limits, since = response_limits(config), self._first_version
            broken += wrong_ends(samples, self._ends, limits, since)
        broken += wrong_rewards(samples, rewards.items, _is_penalized(config))
        decode = self._decode
        for group, graded in chosen(groups, now.step):
            broken += wrong_text(graded, decode)
            if (grader := rewards.grader) is not None and _grade_with(grader, rewards.items):
                broken += wrong_grade(group, graded, grader)
        report(config, broken, now.step, now.monitor)
        return {}

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def ends_of_responses(model_path: str) -> frozenset[int]:
    """Tokens at which engines stop."""
    listed = generation_config(Path(model_path)).get("eos_token_id")
    return frozenset(listed if isinstance(listed, list) else [] if listed is None else [listed])


def response_limits(config: Config) -> frozenset[int]:
    """What a response's limit may be, in tokens: samples may be of an earlier step's."""
    stages = config.algorithm.curriculum.length_stages
    return frozenset(
        [config.rollout.max_response_tokens, *(one.max_response_tokens for one in stages)]
    )


def wrong_ends(
    samples: Sequence[GradedSample],
    ends: frozenset[int],
    limits: frozenset[int],
    since: int = 0,
) -> list[str]:
    """A sentence for the first sample that does not end as its finish reason says.

    Args:
        samples: Of a step.
        ends: Tokens at which engines stop; empty: unknown.
        limits: Of a response, in tokens.
        since: Weights version from which on responses had these limits.
    """
    for graded in samples:
        sample = graded.sample
        tokens = np.asarray(sample.token_ids)
        (at,) = np.isin(tokens[:-1], list(ends)).nonzero()
        early = int(at[0]) if len(at) else None
        last = int(tokens[-1]) if len(tokens) else None
        problem = None
        if early is not None:
            place = f"token {early + 1} of {len(tokens)}"
            problem = f"has the end-of-sequence token {tokens[early]} as {place}"
        elif sample.finish_reason == "stop" and ends and last not in ends:
            problem = (
                f"has the finish reason stop, but its last token is {last} and not one of "
                f"{sorted(ends)}: the end-of-sequence token was lost"
            )
        elif (
            sample.finish_reason == "length"
            and len(tokens) not in limits
            and sample.spans[0][0] >= since
        ):
            problem = (
                f"has the finish reason length and {len(tokens)} tokens, but the limit is "
                f"{' or '.join(map(str, sorted(limits)))}"
            )
        if problem is not None:
            return [f"{_name(graded)} {problem}"]
    return []


def wrong_rewards(
    samples: Sequence[GradedSample], items: Sequence[Any], penalized: bool
) -> list[str]:
    """A sentence for the first sample whose reward does not follow from its grade and parts.

    Args:
        samples: Of a step.
        items: Of the reward mix.
        penalized: Rewards of truncated samples were changed.
    """
    weights = {item.label: item.weight for item in items if item.weight}
    graded_by = {one.label: one.reward for one in items if type(one.reward) is MathAnswer}
    for one in samples:
        for label, reward in graded_by.items() if len(graded_by) == 1 else ():
            value = one.rewards.get(label)
            wanted = reward.correct if one.correct else reward.incorrect
            if value is not None and one.correct is not None and value != wanted:
                return [
                    f"{_name(one)} was graded {one.status}, for which {label} gives {wanted:g}, "
                    f"but it has {value:g}: the reward of another sample"
                ]
        if one.reward is None or (penalized and one.sample.finish_reason == "length"):
            continue
        parts = [one.rewards.get(label) for label in weights]
        if any(part is None or math.isnan(part) for part in parts):
            continue  # A reward that is not required may be missing.
        pairs = zip(weights.values(), parts, strict=True)
        total = math.fsum(weight * part for weight, part in pairs if part is not None)
        if abs(one.reward - total) > 1e-6 * (1 + abs(total)):
            return [
                f"{_name(one)} has a reward of {one.reward:g}, but its parts {_parts(one.rewards)} "
                f"add up to {total:g}: the reward of another sample"
            ]
    return []


def chosen(groups: Sequence[Group], step: int) -> list[tuple[Group, GradedSample]]:
    """The samples to look at again: in turn, and of both outcomes where a group has both."""
    pairs = [(group, one) for group in groups for one in group.samples]
    if not pairs:
        return []
    # An odd stride, so that in the course of steps the place in a group changes.
    start = (step - 1) * 7 % len(pairs)
    turned = pairs[start:] + pairs[:start]
    first = turned[0]
    other = next((one for one in turned[1:] if one[1].correct != first[1].correct), None)
    return [first, *([] if other is None else [other])][:SAMPLES_AGAIN]


def wrong_text(graded: GradedSample, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """A sentence if a sample's text is not that of its tokens.

    Args:
        graded: The sample.
        decode: Its tokens, without special ones.
    """
    text, own = graded.sample.text, decode(graded.sample.token_ids.tolist())
    # Of bytes that are no text, decoding as they come may give another number of marks.
    if _REPLACED in text or _REPLACED in own or "".join(text.split()) == "".join(own.split()):
        return []
    return [
        f"{_name(graded)} has a text that is not that of its tokens: {own[:60]!r} were sampled, "
        f"and {text[:60]!r} was graded"
    ]


def wrong_grade(group: Group, graded: GradedSample, grader: MathGrader) -> list[str]:
    """A sentence if a second grade of a sample's text differs from the first."""
    if graded.correct is None or graded.status in _UNDECIDED:
        return []
    again = grader.grade_one(graded.sample.text, list(group.problem.answers))
    if again.status in _UNDECIDED:
        return []
    if (again.correct, again.answer) == (graded.correct, graded.answer):
        return []
    return [
        f"{_name(graded)} was graded {graded.status} (answer {graded.answer!r}), and its text is "
        f"graded {again.status} (answer {again.answer!r}) now: another text was graded"
    ]


def _grade_with(grader: MathGrader, items: Sequence[Any]) -> bool:
    """Whether every grade comes from this grader, for its usual task."""
    graders = [
        r.answer_grader for r in (one.reward for one in items) if hasattr(r, "answer_grader")
    ]
    return all(one.task == "math" and one.grader is grader for one in graders)


def _is_penalized(config: Config) -> bool:
    return config.algorithm.truncated in (TruncatedRule.penalize, TruncatedRule.scale)


def _name(graded: GradedSample) -> str:
    return f"sample {graded.sample.index} of problem {graded.sample.problem_id}"


def _parts(rewards: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name}={value}" for name, value in rewards.items())
