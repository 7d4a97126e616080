"""Samples are consistent: prompt, end, text and grade."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlmath.algorithms.filters import TruncatedRule
from rlmath.config.schema import Config
from rlmath.data import load_tokenizer
from rlmath.engines.requests import prompt_digest
from rlmath.grading import Grade, MathGrader
from rlmath.rewards.math_answer import MathAnswer
from rlmath.training.checks.base import AfterUpdate, BeforeUpdate, Metrics, StepCheck, report
from rlmath.types import ONE_TURN, GradedSample, Group
from rlmath.weights.hf_files import generation_config

# Samples of each step that are graded again, which takes under a millisecond for each, and how many
# of them are decoded again.
GRADES_AGAIN, TEXTS_AGAIN = 16, 2
# A grade that ended like this says nothing about the answer.
_UNDECIDED = ("timeout", "error", "ungraded", "bad_gold")
_REPLACED = "\N{REPLACEMENT CHARACTER}"


class SampledResponses(StepCheck):
    """Prompts, ends and rewards of all samples; texts and grades of one group's.

    A second grader, with its own process and no memory of earlier answers, grades them again while
    the ranks train.
    """

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._ends: frozenset[int] | None = None
        self._first_version = 0
        self._grader: MathGrader | None = None
        self._again: list[tuple[GradedSample, Future[Grade]]] = []

    def before_update(self, now: BeforeUpdate) -> Metrics:
        config = now.run.config
        rewards = now.run.sampling.rewards
        if self._ends is None:
            self._ends = ends_of_responses(config.model.path)
            self._tokenizer = load_tokenizer(config.model.path)
            self._first_version = now.run.sampling.pool.weights_version
        groups = now.groups or now.finished
        samples = [one for group in groups for one in group.samples]
        broken = wrong_prompts(groups) + wrong_segments(samples)
        if not config.rollout.ignore_eos:
            # Samples from before a resume may have had another limit.
            limits, since = response_limits(config), self._first_version
            broken += wrong_ends(samples, self._ends, limits, since)
        broken += wrong_rewards(samples, rewards.items, _is_penalized(config))
        group, again = choose(groups, now.step)
        for graded in again[:TEXTS_AGAIN]:
            broken += wrong_text(graded, self._decode)
        report(config, broken, now.step, now.monitor)
        self._again = []
        grader = rewards.grader
        if now.batch is not None and grader is not None and _grade_with(grader, rewards.items):
            assert group is not None
            own, golds = self._other_grader(grader), list(group.problem.answers)
            self._again = [
                (one, own.submit(one.sample.model_part().text, golds))
                for one in again
                if one.sample.failure is None
            ]
        return {}

    def after_update(self, now: AfterUpdate) -> Metrics:
        again, self._again = self._again, []
        broken = [said for one, grade in again for said in wrong_grade(one, grade.result())]
        report(now.run.config, broken, now.step, now.monitor)
        return {}

    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()
            self._grader = None

    def _other_grader(self, grader: MathGrader) -> MathGrader:
        """One that shares neither processes nor verdicts with the rewards'."""
        if self._grader is None:
            same = dataclasses.replace(grader.settings, disagreement_path=None)
            self._grader = MathGrader(num_workers=1, settings=same, cache_size=0)
        return self._grader

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def ends_of_responses(model_path: str) -> frozenset[int]:
    """Tokens at which engines stop."""
    listed = generation_config(Path(model_path)).get("eos_token_id")
    return frozenset(listed if isinstance(listed, list) else [] if listed is None else [listed])


def response_limits(config: Config) -> frozenset[int]:
    """Allowed limits of a response, in tokens: samples may be of an earlier step's."""
    stages = config.algorithm.curriculum.length_stages
    return frozenset(
        [config.rollout.max_response_tokens, *(one.max_response_tokens for one in stages)]
    )


def wrong_prompts(groups: Sequence[Group]) -> list[str]:
    """A sentence if an engine was given another prompt than the one that is trained on."""
    for group in groups:
        wanted = prompt_digest(group.problem.prompt_token_ids)
        for graded in group.samples:
            found = graded.sample.prompt_digest
            if found not in (None, wanted):
                return [
                    f"{_name(graded)} continues another prompt than its problem's: the engine read "
                    f"tokens with CRC-32 {found:08x}, and those of the problem have {wanted:08x}"
                ]
    return []


def wrong_ends(
    samples: Sequence[GradedSample], ends: frozenset[int], limits: frozenset[int], since: int = 0
) -> list[str]:
    """A sentence for the first sample that does not end as its finish reason says.

    Args:
        ends: Tokens at which engines stop; empty: unknown.
        limits: Limits of a response, in tokens.
        since: Weights version from which on responses had these limits.
    """
    for graded in samples:
        sample = graded.sample
        tokens = np.asarray(sample.token_ids)
        inside = any(np.count_nonzero(tokens[:-1] == end) for end in ends)
        # Each turn may end with such a token, and what a template writes may have more.
        found = [
            a + int(at.argmax())
            for kind, a, b in (sample.pieces() if inside else ())
            if kind == "model"
            for at in (tokens[a : b - 1] == end for end in ends)
            if at.any()
        ]
        early = min(found) if found else None
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
            and sample.segments == ONE_TURN
            and not sample.calls  # Else another budget may have run out.
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


def wrong_segments(samples: Sequence[GradedSample]) -> list[str]:
    """A sentence for the first sample whose segments are invalid or do not fit its log-probs."""
    for graded in samples:
        segments, count = graded.sample.segments, len(graded.sample.token_ids)
        if segments == ONE_TURN:
            continue
        starts = [start for _, start in segments]
        kinds = [kind for kind, _ in segments]
        ordered = all(a <= b for a, b in pairwise([*starts, count]))
        if starts[0] != 0 or not ordered or (kinds[0], kinds[-1]) != ("model", "model"):
            return [
                f"{_name(graded)} has {count} tokens in the segments {segments}: they do not begin "
                "and end with the model's, or are out of order"
            ]
        others = ~graded.sample.model_mask()
        if np.asarray(graded.sample.log_probs)[others].any():
            return [
                f"{_name(graded)} has log-probs for tokens that the model did not sample: its "
                f"segments {segments} are out of place"
            ]
    return []


def wrong_rewards(
    samples: Sequence[GradedSample], items: Sequence[Any], penalized: bool
) -> list[str]:
    """A sentence for the first sample whose reward does not follow from its grade and parts.

    Args:
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


def choose(groups: Sequence[Group], step: int) -> tuple[Group | None, list[GradedSample]]:
    """The group to look at again, and which of its samples.

    Groups with both outcomes come in turn. Its samples begin with two next to each other that have
    different outcomes, as a grade that was moved to a neighbor shows there for certain.
    """
    mixed = [one for one in groups if len({g.correct for g in one.samples}) > 1] or list(groups)
    if not mixed:
        return None, []
    group = mixed[(step - 1) % len(mixed)]
    samples = group.samples
    changes = [i for i, one in enumerate(samples) if one.correct != samples[i - 1].correct] or [0]
    # Other changes in later steps.
    first = changes[(step - 1) // len(mixed) % len(changes)] - 1
    count = min(GRADES_AGAIN, len(samples))
    return group, [samples[(first + i) % len(samples)] for i in range(count)]


def wrong_text(graded: GradedSample, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """A sentence if a sample's text is not that of its tokens. ``graded``: the sample. ``decode``:
    its tokens, without special ones."""
    text, own = graded.sample.text, decode(graded.sample.token_ids.tolist())
    # Bytes that are no text may give another number of replacement marks when decoded piece by
    # piece.
    if _REPLACED in text or _REPLACED in own or "".join(text.split()) == "".join(own.split()):
        return []
    return [
        f"{_name(graded)} has a text that is not that of its tokens: {own[:60]!r} were sampled, "
        f"and {text[:60]!r} was graded"
    ]


def wrong_grade(graded: GradedSample, again: Grade) -> list[str]:
    """A sentence if a second grade of a sample's text differs from the first."""
    if graded.correct is None or graded.status in _UNDECIDED or again.status in _UNDECIDED:
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
