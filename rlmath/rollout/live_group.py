"""A group that is admitted and not finished: its samples, finished and cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlmath.engines.requests import Request
from rlmath.rollout.group_state import (
    prompt_to_state,
    sample_from_state,
    sample_to_state,
    with_saved_prompt,
)
from rlmath.types import Problem, Sample


@dataclass
class LiveGroup:
    """A problem's samples while its group is incomplete."""

    ordinal: int  # Its place in the order of admission, over all steps.
    step: int  # Step that admitted it.
    problem: Problem  # The problem, with the group's id.
    # The first requests, without a budget; each sample keeps its seed.
    requests: tuple[Request, ...]
    finished: dict[int, Sample] = field(default_factory=dict)  # Samples by index.
    cut: dict[int, Sample] = field(default_factory=dict)  # Unfinished samples by index.
    # Samples that engines continue, by index, with their tokens before.
    begun: dict[int, Sample] = field(default_factory=dict)
    # Indices of the samples handed to grading in this step.
    graded: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == len(self.requests)

    @property
    def unfinished(self) -> int:
        return len(self.requests) - len(self.finished)

    def known_samples(self) -> list[Sample]:
        """Finished and unfinished samples; continued ones with their earlier tokens."""
        return [*self.finished.values(), *self.cut.values(), *self.begun.values()]

    def add(self, sample: Sample) -> None:
        self.begun.pop(sample.index, None)
        if sample.finish_reason == "cut":
            self.cut[sample.index] = sample
        else:
            self.finished[sample.index] = sample

    def first_requests(self, budget_tokens: int | None) -> list[Request]:
        return [replace(one, budget_tokens=budget_tokens) for one in self.requests]

    def take_cut(self, budget_tokens: int | None) -> list[Request]:
        """The requests that continue the cut samples, which then are no longer cut."""
        cut, self.cut = self.cut, {}
        self.begun |= cut
        return [
            replace(
                self.requests[index],
                # A sample cut before its first token is requested as at first.
                begun=cut[index] if len(cut[index].token_ids) else None,
                budget_tokens=budget_tokens,
            )
            for index in sorted(cut)
        ]

    def copy(self) -> LiveGroup:
        """A copy with its own record of samples."""
        return replace(
            self,
            finished=dict(self.finished),
            cut=dict(self.cut),
            begun=dict(self.begun),
            graded=set(),
        )

    def to_state(self) -> dict[str, Any]:
        """Plain JSON values, without the problem's other fields, which the data has."""
        first = self.requests[0]
        return {
            "ordinal": self.ordinal,
            "step": self.step,
            "problem_id": self.problem.id,
            **prompt_to_state(self.problem),
            "max_tokens": [one.max_tokens for one in self.requests],
            "temperature": first.temperature,
            "ignore_eos": first.ignore_eos,
            "seeds": [one.seed for one in self.requests],
            "finished": [sample_to_state(self.finished[i]) for i in sorted(self.finished)],
            "cut": [sample_to_state(self.cut[i]) for i in sorted(self.cut)],
        }

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        problem: Problem,
        *,
        wants_routes: bool,
        in_environment: bool = False,
    ) -> LiveGroup:
        """Restore a group from :meth:`to_state`.

        Args:
            problem: The problem with the group's id, as the data has it now.
            wants_routes: As in ``Request``, for the continuing run.
            in_environment: As in ``requests_for``, for the continuing run.
        """
        problem = with_saved_prompt(problem, state)
        of_samples = zip(state["seeds"], state["max_tokens"], strict=True)
        requests = tuple(
            Request(
                problem.id,
                index,
                problem.prompt_token_ids,
                max_tokens,
                state["temperature"],
                1.0,
                seed,
                state["ignore_eos"],
                wants_routes=wants_routes,
                problem=problem if in_environment else None,
            )
            for index, (seed, max_tokens) in enumerate(of_samples)
        )
        found = cls(state["ordinal"], state["step"], problem, requests)
        for sample in (*state["finished"], *state["cut"]):
            found.add(sample_from_state(sample))
        return found
