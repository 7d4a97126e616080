"""Weighted sum of rewards, computed as samples finish.

    total_i = sum of weight_r * r_i over the rewards r that have a value for sample i

A reward that returned ``None`` for a sample is left out of its total, so a mix may contain rewards
that score only part of the data. A total is ``None`` if no reward with a weight scored the sample,
or if one marked ``required`` did not. The trainer excludes such a sample from its group's
statistics and from the loss.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from rlmath.grading import GradingSettings, MathGrader
from rlmath.grading.settings import REWARD_FALLBACK
from rlmath.rewards.answers import GRADES_COLUMN, AnswerGrader, GradedReward
from rlmath.rewards.base import (
    RewardError,
    RewardSettingError,
    Value,
    Values,
    check_values,
    texts_of,
)
from rlmath.rewards.columns import ADDED_COLUMNS, function_columns, group_columns
from rlmath.rewards.failure import reward_error
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix_items import MixItem, build_items
from rlmath.rewards.required_columns import check_required
from rlmath.rewards.sandbox.counted import SANDBOX_RUNS, SANDBOX_TIMEOUTS
from rlmath.rewards.scored import Partial, ScoredSample
from rlmath.rewards.stats import RewardStats
from rlmath.rewards.uses import Use, use_for
from rlmath.types import GradedSample, Problem, Sample
from rlmath.utils.ending_signals import is_signal
from rlmath.utils.futures import resolve

log = logging.getLogger(__name__)


class RewardMix:
    """Rewards with weights. Thread-safe; close it after use.

    Args:
        on_error: ``raise``: a reward that raises stops the run. ``none``: that call gives
            ``None`` and is counted as ``rewards/<label>/errors``.
    """

    def __init__(
        self,
        items: Sequence[MixItem],
        *,
        answer_grader: AnswerGrader | None = None,
        on_error: Literal["raise", "none"] = "raise",
    ) -> None:
        if not items:
            raise RewardSettingError("reward.items is empty; a run needs at least one reward")
        if all(item.weight == 0 for item in items):
            raise RewardSettingError(
                f"all weights are 0 ({', '.join(i.label for i in items)}); every total would be "
                f"None and nothing would be trained"
            )
        if on_error not in ("raise", "none"):
            raise RewardSettingError(f"on_error={on_error!r}; use raise or none")
        self.items = tuple(items)
        self.on_error = on_error
        self.trainer_state = SimpleNamespace(global_step=0, max_steps=0)
        self._answer_grader = answer_grader
        self._stats = RewardStats()
        self._use = Use.training
        self._locks = {
            item.label: nullcontext() if item.reward.thread_safe else threading.Lock()
            for item in items
        }

    @classmethod
    def from_config(
        cls,
        items: Sequence[Any],
        *,
        correct: float | None = None,
        incorrect: float | None = None,
        fallback: str = REWARD_FALLBACK,
        num_workers: int = GradingSettings.num_workers,
        timeout_s: float = GradingSettings.timeout_s,
        grader: MathGrader | None = None,
        completion_format: Literal["chat", "text"] = "text",
        on_error: Literal["raise", "none"] = "raise",
    ) -> RewardMix:
        """Create the mix from the ``reward`` settings.

        Args:
            items: Names, or mappings (or objects) with ``name``, ``weight`` (1), ``params`` ({}),
                and optionally ``label``, ``required``, ``completion_format``, ``needs_group``.
            correct: Default of the math reward's ``correct``; ``incorrect`` likewise.
            fallback: Fallback of the shared grader; an item with its own grading settings gets its
                own grader.
            timeout_s: Limit of one comparison, in seconds.
            grader: A running grader to share instead; the caller closes it.
            completion_format: Form of the completions for rewards from import or file paths. TRL
                passes message lists if the data's prompts are chats, else strings.

        Raises:
            RewardSettingError: An item does not exist, or a setting is invalid.
        """
        shared = AnswerGrader(
            num_workers=num_workers, timeout_s=timeout_s, fallback=fallback, grader=grader
        )
        defaults = {"correct": correct, "incorrect": incorrect}
        given = {name: value for name, value in defaults.items() if value is not None}
        return cls(
            build_items(items, shared, given, completion_format),
            answer_grader=shared,
            on_error=on_error,
        )

    def for_evaluation(self) -> RewardMix:
        """The same rewards with separate metrics, because training's groups may be graded at the
        same time. Closing it closes the rewards."""
        found = copy.copy(self)
        found._stats, found._use = RewardStats(), Use.evaluation
        return found

    def set_step(self, step: int, total_steps: int = 0) -> None:
        """Update the ``trainer_state`` that TRL-style rewards receive."""
        self.trainer_state.global_step = step
        self.trainer_state.max_steps = total_steps

    def check_columns(self, problems: Iterable[Problem]) -> None:
        """Check that every problem has the columns that reward functions require.

        Raises:
            RewardSettingError: A column is missing; names reward, file, parameter and columns.
        """
        needed = {
            item.label: (item.reward.function, item.reward.required_columns)
            for item in self.items
            if isinstance(item.reward, FunctionReward)
        }
        if needed:
            check_required(
                needed, ((p.id, group_columns(p, ()).keys() | ADDED_COLUMNS) for p in problems)
            )

    def probe(self) -> None:
        """Check before a run starts that every reward can work.

        Raises:
            RewardSettingError: A reward cannot work, for example its server is unreachable.
        """
        for item in self.items:
            item.reward.probe()

    def prescore(self, completions: Sequence[Any], **columns: Any) -> list[Partial]:
        """Run the rewards that need no group while the rest of the group is still sampled.

        Does not wait for asynchronous rewards (see :class:`Partial`).

        Returns:
            One item per completion, for :meth:`score`, in the group's order.
        """
        partials = [Partial() for _ in completions]
        self._evaluate(
            [i for i in self.items if not i.reward.needs_group], partials, completions, columns
        )
        return partials

    def score(
        self,
        completions: Sequence[Any],
        *,
        prescored: Sequence[Partial] | None = None,
        **columns: Any,
    ) -> list[ScoredSample]:
        """Score completions: a whole group if a reward compares them, else any number.

        Args:
            prescored: Result of :meth:`prescore` for these completions, in this order.
            **columns: One value per completion: ``prompts``, ``completion_ids``,
                ``finish_reason``, ``answers`` (accepted answers) or ``solution``, ``problem_id``,
                and the data's other fields.

        Raises:
            RewardError: A reward raised or returned something invalid (with ``on_error="raise"``).
        """
        return self.totals(self.begin_score(completions, prescored=prescored, **columns))

    def begin_score(
        self,
        completions: Sequence[Any],
        *,
        prescored: Sequence[Partial] | None = None,
        **columns: Any,
    ) -> list[Partial]:
        """Start :meth:`score` without waiting for asynchronous rewards.

        Returns:
            One item per completion, for :meth:`totals`.
        """
        if prescored is not None and len(prescored) != len(completions):
            raise RewardSettingError(
                f"{len(prescored)} prescored pieces for {len(completions)} completions"
            )
        partials = list(prescored) if prescored is not None else [Partial() for _ in completions]
        if completions:
            todo = [i for i in self.items if prescored is None or i.reward.needs_group]
            self._evaluate(todo, partials, completions, columns)
        return partials

    def totals(self, partials: Sequence[Partial]) -> list[ScoredSample]:
        """Wait for pending calls and compute the totals.

        Raises:
            RewardError: A reward raised or returned something invalid (with ``on_error="raise"``).
        """
        for partial in partials:
            for call in partial.pending:
                call.result()
        scored = [
            # In the order of the settings, independent of the order of arrival.
            ScoredSample(
                self._total(p.values),
                {item.label: p.values[item.label] for item in self.items if item.label in p.values},
                p.grade,
                dict(p.extra),
            )
            for p in partials
        ]
        self._stats.add_values("total", (s.total for s in scored))
        return scored

    def score_group(self, problem: Problem, samples: Sequence[Sample]) -> list[GradedSample]:
        return self.grade(samples, self.begin_group(problem, samples))

    def begin_group(
        self,
        problem: Problem,
        samples: Sequence[Sample],
        prescored: Sequence[Partial] | None = None,
    ) -> list[Partial]:
        return self.begin_score(
            [s.text for s in samples], prescored=prescored, **group_columns(problem, samples)
        )

    def grade(self, samples: Sequence[Sample], partials: Sequence[Partial]) -> list[GradedSample]:
        """The samples with their totals, in order; waits for pending calls."""
        scored = self.totals(partials)
        return [
            GradedSample(
                sample=sample,
                reward=result.total,
                correct=result.correct,
                status=result.status,
                answer=None if result.grade is None else result.grade.answer,
                rewards=result.rewards,
                method=None if result.grade is None else result.grade.method,
                untabled=result.grade is not None and result.grade.untabled,
            )
            for sample, result in zip(samples, scored, strict=True)
        ]

    def prescore_group(self, problem: Problem, samples: Sequence[Sample]) -> list[Partial]:
        return self.prescore([s.text for s in samples], **group_columns(problem, samples))

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call (see :meth:`RewardStats.drain`); the totals are under
        ``rewards/total``."""
        result = self._stats.drain()
        sandbox = {SANDBOX_RUNS: 0.0, SANDBOX_TIMEOUTS: 0.0}
        for item in self.items:
            with use_for(self._use):
                own = item.reward.drain_metrics()
            for name, value in own.items():
                result[f"rewards/{item.label}/{name}"] = value
                if name in sandbox:
                    sandbox[name] += value
        if sandbox[SANDBOX_RUNS]:
            share = sandbox[SANDBOX_TIMEOUTS] / sandbox[SANDBOX_RUNS]
            result["rewards/sandbox_timeout_share"] = share
        return result

    @property
    def grader(self) -> MathGrader | None:
        return None if self._answer_grader is None else self._answer_grader.grader

    def close(self) -> None:
        for item in self.items:
            item.reward.close()
        if self._answer_grader is not None:
            self._answer_grader.close()

    def __enter__(self) -> RewardMix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _total(self, values: Mapping[str, Value]) -> Value:
        total: Value = None
        for item in self.items:
            value = values.get(item.label)
            if value is None:
                if item.required:
                    return None
                continue
            if item.weight != 0:
                total = (total or 0.0) + item.weight * value
        return total

    def _evaluate(
        self,
        items: Sequence[MixItem],
        partials: Sequence[Partial],
        completions: Sequence[Any],
        columns: Mapping[str, Any],
    ) -> None:
        """Fill ``partials`` with the values of ``items``."""
        if not completions:
            return
        given = {k: v for k, v in columns.items() if v is not None}
        batch = _Batch(partials, texts_of(completions), given)
        if any(i.reward.needs_tokens for i in items) and "completion_ids" not in given:
            names = ", ".join(i.label for i in items if i.reward.needs_tokens)
            raise RewardSettingError(f"{names}: token lengths need the column completion_ids")
        with use_for(self._use):
            for item in items:
                started_s = time.monotonic()
                if item.reward.is_asynchronous:
                    call = self._submit(item, batch, started_s)
                    for partial in partials:
                        partial.pending.append(call)
                else:
                    self._note(item, batch, self._call(item, batch), started_s)

    def _submit(self, item: MixItem, batch: _Batch, started_s: float) -> Future[None]:
        """Call an asynchronous reward; done when its values are in the partials."""
        noted: Future[None] = Future()
        try:
            if isinstance(item.reward, FunctionReward):
                coming = item.reward.submit(**self._for_function(item, batch))
            else:
                coming = item.reward.submit(batch.texts, **batch.columns)
        except Exception as error:
            coming = Future()
            coming.set_exception(error)

        def note(done: Future[Any]) -> None:
            self._note(item, batch, self._check_values(item, done.result, batch), started_s)

        coming.add_done_callback(lambda done: resolve(noted, lambda: note(done)))
        return noted

    def _note(self, item: MixItem, batch: _Batch, values: Values, started_s: float) -> None:
        for partial, value in zip(batch.partials, values, strict=True):
            partial.values[item.label] = value
        self._stats.add_values(item.label, values, time.monotonic() - started_s)

    def _call(self, item: MixItem, batch: _Batch) -> Values:
        def call() -> Values:
            if isinstance(item.reward, GradedReward):
                return self._call_graded(item, item.reward, batch)
            with self._locks[item.label]:
                if isinstance(item.reward, FunctionReward):
                    return item.reward(**self._for_function(item, batch))
                return item.reward(batch.texts, **batch.columns)

        return self._check_values(item, call, batch)

    def _check_values(self, item: MixItem, call: Callable[[], Values], batch: _Batch) -> Values:
        """The checked values of a call; on an error, as ``on_error`` says."""
        count = len(batch.texts)
        try:
            values = check_values(item.label, call(), count)
        except RewardSettingError:
            raise
        except (Exception, SystemExit) as error:
            if is_signal(error):
                raise
            if self.on_error == "raise":
                if isinstance(error, RewardError):
                    raise
                raise reward_error(item.label, error, count, batch.columns) from error
            log.warning("reward %s gave None to %d completions: %s", item.label, count, error)
            self._stats.add_error(item.label)
            values = [None] * count
        return values

    def _call_graded(self, item: MixItem, reward: GradedReward, batch: _Batch) -> Values:
        """Call a graded reward; rewards with the same grader share its grades."""
        grader, partials = id(reward.answer_grader), batch.partials
        if any(grader not in p.grades for p in partials):
            grades = reward.grades(batch.texts, batch.columns)
            for partial, grade in zip(partials, grades, strict=True):
                partial.grades[grader] = grade
                partial.grade = partial.grade or grade
            self._stats.add_statuses(item.label, (p.grades[grader].status for p in partials))
        given = {**batch.columns, GRADES_COLUMN: [p.grades[grader] for p in partials]}
        return reward(batch.texts, **given)

    def _for_function(self, item: MixItem, batch: _Batch) -> dict[str, Any]:
        return function_columns(
            batch.columns,
            batch.texts,
            item.completion_format,
            batch.partials,
            trainer_state=self.trainer_state,
            log_metric=lambda name, value: self._stats.add_note(item.label, name, value),
        )


@dataclass(frozen=True)
class _Batch:
    """Completions to score, with their columns and their values so far."""

    partials: Sequence[Partial]
    texts: list[str]
    columns: Mapping[str, Any]
