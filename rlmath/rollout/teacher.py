"""A teacher scores samples: the log-probs that it gives to the tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlmath.cluster.watchdog import WatchedComponent
from rlmath.errors import ComponentError
from rlmath.rollout import watchdog_probes
from rlmath.rollout.requests import Request
from rlmath.types import Group, Sample

if TYPE_CHECKING:
    from rlmath.rollout.pool import RolloutPool

LogProbs: TypeAlias = NDArray[np.float32]


class TeacherError(ComponentError):
    """The teacher could not score a sample. The message says which and why."""


@dataclass(frozen=True)
class ToScore:
    """A sequence for the teacher.

    Attributes:
        name: Of problem and sample, for messages.
        prompt_token_ids: Of its problem.
        sample: With the tokens to score.
    """

    name: str
    prompt_token_ids: tuple[int, ...]
    sample: Sample


class Teacher(Protocol):
    """Where the teacher is."""

    def probe(self) -> None:
        """Find what would make it fail, in seconds; before anything is started.

        Raises:
            UserError: It cannot be used as the settings say.
        """

    def score(self, sequences: Sequence[ToScore]) -> list[LogProbs]:
        """Of each sequence float32 ``[n]``: the teacher's log-prob of each of the sample's ``n``
        tokens, at temperature 1, after the prompt and the tokens before it.

        Raises:
            ComponentError: It failed more often than the settings allow.
        """

    def watchdog_probe(self) -> WatchedComponent:
        """What is waited for."""


class EngineTeacher:
    """A teacher on vLLM engines of the run.

    Args:
        pool: Its engines, with the weights of its folder.
        vocabulary: Rows of its embedding.
    """

    def __init__(self, pool: RolloutPool, vocabulary: int) -> None:
        self.pool, self._vocabulary = pool, vocabulary

    def probe(self) -> None:
        """See :meth:`Teacher.probe`: its folder was checked with the settings."""

    def score(self, sequences: Sequence[ToScore]) -> list[LogProbs]:
        """See :meth:`Teacher.score`. An engine that fails is started again, and what it had is
        scored again."""
        for one in sequences:
            largest = int(one.sample.token_ids.max(initial=0))
            if largest >= self._vocabulary:
                raise TeacherError(
                    f"sample {one.name} has token {largest}, of the policy's padding, and the "
                    f"teacher's embedding has {self._vocabulary} rows: it cannot read it",
                    raised=True,
                )
        requests = [_request(place, one) for place, one in enumerate(sequences)]
        found: list[Any] = [None] * len(requests)
        for sample in self.pool.generate(requests):
            found[sample.index] = sample.log_probs
        return checked(sequences, found)

    def watchdog_probe(self) -> WatchedComponent:
        """See :meth:`Teacher.watchdog_probe`."""
        return watchdog_probes.engines(self.pool)


def sequences_of(groups: Iterable[Group]) -> list[ToScore]:
    """All samples of the groups, in their order."""
    return [
        ToScore(
            f"{group.problem.id}/{graded.sample.index}",
            group.problem.prompt_token_ids,
            graded.sample,
        )
        for group in groups
        for graded in group.samples
    ]


def _request(place: int, sequence: ToScore) -> Request:
    return Request(
        problem_id=sequence.name,
        index=place,
        prompt_token_ids=sequence.prompt_token_ids,
        max_tokens=len(sequence.sample.token_ids) + 1,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        begun=sequence.sample,
        scores=True,
    )


def checked(sequences: Sequence[ToScore], found: Sequence[Any]) -> list[LogProbs]:
    """Every token has a log-prob; a teacher may rule one out, which is minus infinity."""
    for sequence, log_probs in zip(sequences, found, strict=True):
        wanted = len(sequence.sample.token_ids)
        given = 0 if log_probs is None else len(log_probs)
        if given != wanted or np.isnan(log_probs).any() or (log_probs > 1e-3).any():
            what = "some that are no log-probabilities" if given == wanted else f"{given}"
            raise TeacherError(
                f"the teacher gave {what} for the {wanted} tokens of sample {sequence.name}",
                raised=True,
            )
    return list(found)
