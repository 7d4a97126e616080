"""What the driver asks of the ranks for each part of a step, and what it makes of their answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.actor.step_parts import PartSettings
from rlmath.algorithms.advantages import WITHIN_GROUPS, SequenceAdvantages
from rlmath.config.load import load
from rlmath.training.controllers import Coefficients
from rlmath.training.prepare import rewards_to_advantages
from rlmath.training.step_batch import StepBatch
from rlmath.training.update_ahead import divisor_of, parts_now, update_ahead
from tests.unit.training.test_prepare import GIVEN, groups

IN_PARTS = ("algorithm.minibatches_per_step=1", "algorithm.overlap_update=1")


class Actor:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.begun: list[tuple[list[int], PartSettings, SequenceAdvantages, bool]] = []

    def begin_part(
        self, sequences: Any, settings: PartSettings, advantages: Any, *, is_first: bool
    ) -> int:
        lengths = sequences.loss_token_counts.tolist()
        self.begun.append((lengths, settings, advantages, is_first))
        return len(self.begun)

    def is_done(self, made: int) -> bool:
        return True


def session_of(*overrides: str) -> Any:
    rewards = SimpleNamespace(items=[SimpleNamespace(label="math", weight=1.0)])
    sampling = SimpleNamespace(pool=SimpleNamespace(weights_version=4), rewards=rewards)
    config = load([*GIVEN, *IN_PARTS, *overrides])
    return SimpleNamespace(config=config, actor=Actor(), sampling=sampling)


@pytest.mark.parametrize("advantage", WITHIN_GROUPS)
def test_parts_have_the_advantages_of_the_step(advantage: str) -> None:
    session = session_of(f"algorithm.advantage={advantage}", "algorithm.truncated=mask")
    given = groups()
    coefficients = Coefficients(session.config.algorithm)
    ahead = update_ahead(session, coefficients)
    # In the order of admission, whoever is graded first.
    for place in (1, 0):
        ahead.see(place, given[place])
    made: Any = ahead.take(given)
    batch = StepBatch.of(session, given, log_prob_passes=tuple(one.places for one in made))
    assert [(one.places, one.made) for one in made] == [((0, 1), 1), ((2, 3), 2)]
    wanted = rewards_to_advantages(session.config, batch).values.tolist()
    begun = session.actor.begun
    assert [x for one in begun for x in one[2].values.tolist()] == wanted
    assert any(wanted) or advantage == "pass_at_k"
    assert [x for one in begun for x in one[0]] == batch.sequences.loss_token_counts.tolist()
    assert [one[3] for one in begun] == [True, False]
    # A replay has only the batch.
    again: Any = parts_now(session, batch, coefficients)
    assert [one.places for one in again] == [one.places for one in made]
    for one, other in zip(begun[:2], begun[2:], strict=True):
        assert (one[0], one[1], one[3]) == (other[0], other[1], other[3])
        assert torch.equal(one[2].values, other[2].values)
    assert divisor_of(session.config, batch.sequences) == 7


@pytest.mark.parametrize(
    ("overrides", "old", "reference"),
    [
        ([], False, False),
        (["algorithm.correction.kind=token_truncate"], True, False),
        (["algorithm.kl_coef=0.1"], False, True),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1"],
            True,
            True,
        ),
    ],
)
def test_a_part_has_the_passes_and_the_coefficients_of_its_step(
    overrides: list[str], old: bool, reference: bool
) -> None:
    session = session_of(*overrides, "algorithm.entropy_coef=0.01")
    coefficients = Coefficients(session.config.algorithm)
    ahead = update_ahead(session, coefficients)
    # A controller changes it from step to step.
    coefficients.kl_coef *= 3
    ahead.see(0, groups()[0])
    ((_, settings, _, _),) = session.actor.begun
    assert (settings.old_log_probs, settings.reference, settings.now) == (old, reference, 4)
    in_reward = settings.tokens.kl_coef is not None
    found = settings.tokens.kl_coef if in_reward else settings.update.objective.kl_coef
    assert found == pytest.approx(0.3 if reference else 0)
    assert in_reward == ("algorithm.kl_in=reward" in overrides)
    assert settings.update.objective.entropy_coef == 0.01
    assert (settings.tokens.correction is not None) == ("correction" in "".join(overrides))
