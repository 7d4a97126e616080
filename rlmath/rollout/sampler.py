"""The groups of a step: which problems, sampled and graded, kept or dropped and made up for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.algorithms.curriculum import PassRates, staged_length
from rlmath.algorithms.dynamic_sampling import GroupPool, PoolCounts
from rlmath.batching.from_groups import apply_truncation_penalty
from rlmath.config.schema import Config
from rlmath.data import ProblemStream
from rlmath.rollout.collect import Collector
from rlmath.rollout.group_state import group_from_state, group_to_state
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.requests import Request, requests_for
from rlmath.types import Group, Problem

DROP_REASONS = ("unscored", "equal_rewards", "equal_accuracy", "mean_out_of_range")


@dataclass(frozen=True)
class Sampled:
    """What a step's sampling gave.

    Attributes:
        groups: To train on; empty when too few passed the filter, which are then kept for the
            next step.
        finished: All that were sampled in this step, in the order of their problems.
        metrics: ``sampling/...`` and ``curriculum/...``.
        shortage: In words, why there are fewer groups than ``prompts_per_step``; empty when there
            are not.
        dropped: By problem, why the filter dropped its group.
    """

    groups: tuple[Group, ...]
    finished: tuple[Group, ...]
    metrics: dict[str, float]
    shortage: str
    dropped: dict[str, str]


class Sampler:
    """Takes problems from a stream and has them sampled, until a step has its groups.

    Args:
        config: Checked settings.
        stream: The problems.
        at_least_groups: With fewer groups there is no step.
    """

    def __init__(
        self, config: Config, stream: ProblemStream[Problem], at_least_groups: int = 1
    ) -> None:
        algorithm = config.algorithm
        self._config, self._stream = config, stream
        self._at_least = at_least_groups
        self._groups: GroupPool[Group] = GroupPool(
            algorithm.prompts_per_step,
            algorithm.filter,
        )
        self._rates = PassRates(algorithm.curriculum)
        # Problems asked for so far, over all steps: the order of groups.
        self._asked = 0

    def sample(
        self,
        step: int,
        pool: RolloutPool,
        collector: Collector,
        while_grading: Callable[[], Any],
    ) -> Sampled:
        """Sample and grade until the step has its groups, or may ask for no more.

        Args:
            step: The optimization step, from 1.
            pool: The engines.
            collector: Grades.
            while_grading: A context manager for the time in which engines have nothing to do and
                grades are waited for.
        """
        algorithm = self._config.algorithm
        grading = collector.begin(algorithm.group_size)
        order: dict[str, int] = {}
        seen: dict[str, int] = {}
        finished: dict[int, Group] = {}
        dropped: dict[str, str] = {}
        skipped = 0

        def ask(count: int) -> list[Request]:
            nonlocal skipped
            problems, skipped = self._next_problems(count, step, seen)
            skipped += skipped
            for problem in problems:
                order[problem.id] = self._asked
                self._asked += 1
            grading.expect(problems)
            return self._requests(problems, step)

        def add(groups: Sequence[Group]) -> None:
            for group in groups:
                group = apply_truncation_penalty(
                    group,
                    algorithm.truncated,
                    algorithm.truncated_penalty,
                    algorithm.truncated_factor,
                )
                place = order[group.problem.id]
                finished[place] = group
                reason = self._groups.add(
                    place,
                    group,
                    [s.reward for s in group.samples],
                    [s.correct for s in group.samples],
                )
                if reason is not None:
                    dropped[group.problem.id] = reason

        def more(engines_idle: bool) -> list[Request]:
            add(grading.finished())
            while not (count := self._groups.to_request(len(order) - len(finished))):
                if not engines_idle or len(order) == len(finished):
                    return []
                with while_grading():
                    add(grading.finished(block=True))
            return ask(count)

        for sample in pool.generate(ask(self._groups.to_request(0)), more):
            grading.add(sample)
        in_order = tuple(finished[place] for place in sorted(finished))
        if algorithm.curriculum.cooldown:
            for group in in_order:
                graded = [s.correct for s in group.samples if s.correct is not None]
                self._rates.update(self._data_id(group.problem.id), sum(graded), len(graded), step)
        groups, counts = self._groups.pop(self._at_least)
        metrics = self._metrics(counts, len(groups), skipped, step)
        shortage = self._shortage(counts, len(groups))
        return Sampled(tuple(groups), in_order, metrics, shortage, dropped)

    def max_response_tokens(self, step: int) -> int:
        """Longest response in a step, in tokens."""
        return max_response_tokens(self._config, step)

    def _next_problems(
        self, count: int, step: int, seen: dict[str, int]
    ) -> tuple[list[Problem], int]:
        """The next problems off cooldown, with their own ids, and how many were skipped.

        At an epoch's end a problem may come twice in a step. When a whole epoch is on cooldown,
        the next ones are taken all the same.
        """
        cooldown = self._config.algorithm.curriculum.cooldown
        problems: list[Problem] = []
        skipped = in_a_row = 0
        while len(problems) < count:
            (problem,) = self._stream.next(1)
            waits = cooldown and self._rates.is_on_cooldown(problem.id, step)
            if waits and in_a_row < len(self._stream):
                skipped += 1
                in_a_row += 1
                continue
            in_a_row = in_a_row if waits else 0
            number = seen[problem.id] = seen.get(problem.id, 0) + 1
            if number > 1:
                problem = dataclasses.replace(problem, id=f"{problem.id}#{number}")
            problems.append(problem)
        return problems, skipped

    def _requests(self, problems: Sequence[Problem], step: int) -> list[Request]:
        config = self._config
        return requests_for(
            problems,
            samples=config.algorithm.group_size,
            max_tokens=self.max_response_tokens(step),
            temperature=config.rollout.temperature,
            run_seed=config.runner.seed,
            step=step,
            ignore_eos=config.rollout.ignore_eos,
        )

    def _data_id(self, problem_id: str) -> str:
        """The id in the data of a problem that may have come several times in a step."""
        return problem_id if problem_id in self._stream else problem_id.rpartition("#")[0]

    def _metrics(
        self, counts: PoolCounts, trained: int, skipped: int, step: int
    ) -> dict[str, float]:
        metrics: dict[str, float] = {
            "sampling/requested_groups": counts.requested,
            "sampling/kept_groups": counts.kept,
            **{f"sampling/dropped_{r}": counts.dropped.get(r, 0) for r in DROP_REASONS},
            "sampling/carried_over_groups": counts.carried_over,
            "sampling/trained_groups": trained,
            "curriculum/max_response_tokens": self.max_response_tokens(step),
        }
        if counts.pass_rate is not None:
            metrics["sampling/pass_rate"] = counts.pass_rate
        if self._config.algorithm.curriculum.cooldown:
            metrics["curriculum/problems_on_cooldown"] = self._rates.on_cooldown(step + 1)
            metrics["curriculum/skipped_problems"] = skipped
        return {name: float(value) for name, value in metrics.items()}

    def _shortage(self, counts: PoolCounts, trained: int) -> str:
        wanted = self._config.algorithm.prompts_per_step
        if trained == wanted:
            return ""
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(counts.dropped.items()))
        what = (
            f"trains on {trained} groups instead of prompts_per_step={wanted}"
            if trained
            else f"was skipped: only {counts.carried_over} of the required {self._at_least} groups "
            "passed the filter; they are carried over to the next step"
        )
        return (
            f"{counts.requested} groups were sampled (algorithm.filter.max_rounds="
            f"{self._config.algorithm.filter.max_rounds}) and dropped: {reasons or 'none'}. The "
            f"step {what}"
        )

    # -- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Place in the data, carried-over groups and running pass rates."""
        return {
            "stream": self._stream.state_dict(),
            "asked": self._asked,
            "carried_over": [
                [order, group_to_state(group)] for order, group in self._groups.carried_over
            ],
            "pass_rates": self._rates.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint.

        Raises:
            UserError: It was made with other data or in another order.
        """
        self._stream.load_state_dict(state["stream"])
        self._asked = int(state["asked"])
        self._rates.load_state(state["pass_rates"])
        carried_over = []
        # The name in checkpoints of earlier versions.
        for order, saved in state.get("carried_over", state.get("surplus", ())):
            id_ = saved["problem_id"]
            problem = dataclasses.replace(self._stream[self._data_id(id_)], id=id_)
            carried_over.append((int(order), group_from_state(saved, problem)))
        self._groups.set_carried_over(carried_over)


def max_response_tokens(config: Config, step: int) -> int:
    """Longest response in a step, counted from 1, in tokens."""
    stages = config.algorithm.curriculum.length_stages
    if not stages:
        return config.rollout.max_response_tokens
    return staged_length(
        step - 1, [(stage.first_step - 1, stage.max_response_tokens) for stage in stages]
    )
