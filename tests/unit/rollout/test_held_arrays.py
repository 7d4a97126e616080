"""Arrays that stay where they are: nothing of a sample is lost, and the driver reads figures."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import OwnerDiedError

from rlmath.batching.from_groups import sampled_sequences
from rlmath.errors import LostArrays
from rlmath.monitor.array_figures import array_figures
from rlmath.monitor.digests import digest_log_probs, digest_tokens
from rlmath.monitor.repetition import repetition, repetition_of
from rlmath.rewards.base import token_lists
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix import MixItem, RewardMix
from rlmath.rollout.group_state import sample_from_state, sample_to_state
from rlmath.rollout.held_arrays import bound, fetched, hold
from rlmath.training.checks.independent import dependent_samples
from rlmath.types import ArrayFigures, GradedSample, Group, Problem, Sample
from rlmath.utils.array_refs import ArrayRef


def made(index: int, length: int, seed: int = 0) -> Sample:
    draw = np.random.default_rng((seed, length))
    tokens = draw.integers(9, size=length, dtype=np.int32)
    # Of what float32 has, NaN included, each bit is kept.
    log_probs = -draw.random(length, dtype=np.float32)
    return Sample("p", index, tokens, log_probs, "x" * length, "stop", ((3, 0),), index, 1)


def with_figures(sample: Sample) -> Sample:
    return replace(sample, figures=array_figures(sample))


Held = Callable[[list[Sample]], tuple[Sample, ...]]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """What the driver has of an answer, with a store that is here."""
    store: dict[str, Any] = {}
    monkeypatch.setattr(
        ray, "get", lambda ref: [store[r] for r in ref] if isinstance(ref, list) else store[ref]
    )

    def answered(samples: list[Sample]) -> tuple[Sample, ...]:
        name = f"block {len(store)}"
        light, store[name] = hold([with_figures(one) for one in samples])
        return bound(light, name)

    return answered


def test_a_sample_that_is_held_is_the_same_sample(held: Held) -> None:
    samples = [made(0, 5), made(1, 1), made(2, 3000)]
    found = held(samples)
    assert found == tuple(samples)
    for one, sample in zip(found, samples, strict=True):
        assert isinstance(one.token_ids, ArrayRef) and isinstance(one.log_probs, ArrayRef)
        assert len(one.token_ids) == len(one.log_probs) == len(sample.token_ids)
        assert np.asarray(one.log_probs).dtype == np.float32
        assert np.asarray(one.token_ids).dtype == np.int32
        assert one.weights_version == 3 and one.token_ages().tolist() == [0] * len(one.token_ids)
        # A checkpoint and a reward function have the values themselves.
        assert sample_from_state(sample_to_state(one)) == sample
        assert list(token_lists([one.token_ids])[0]) == sample.token_ids.tolist()
        assert one.token_ids[0] == sample.token_ids[0]


def test_a_group_that_waits_for_another_step_needs_no_node(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [made(0, 5), made(1, 3000)]
    graded = [GradedSample(one, 1.0, True, "correct") for one in held(samples)]
    group = Group(Problem("p", "?", (1, 2), ("1",)), tuple(graded))
    found = fetched(group)

    def gone(_: Any) -> None:
        raise OwnerDiedError("00ff", None, "")

    monkeypatch.setattr(ray, "get", gone)
    assert [one.sample for one in found.samples] == samples and found.problem == group.problem
    assert fetched(found) is found
    with pytest.raises(LostArrays, match=r"sample 0 of problem p \(engine 1\)"):
        fetched(group)


def test_a_reward_function_gets_sequences_of_tokens_that_are_fetched_once(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = made(0, 50)
    found = held([sample])
    fetches: list[Any] = []
    get = ray.get
    monkeypatch.setattr(ray, "get", lambda ref: [fetches.append(ref), get(ref)][1])
    (ids,) = token_lists([one.token_ids for one in found])
    wanted = sample.token_ids.tolist()
    assert isinstance(ids, Sequence) and len(ids) == 50 and not fetches
    assert [ids[i] for i in range(50)] == wanted and ids[-3:] == wanted[-3:] and ids == wanted
    assert ids.count(wanted[0]) == wanted.count(wanted[0]) and wanted[0] in ids
    assert list(reversed(ids)) == wanted[::-1] and str(ids) == str(wanted)
    assert np.asarray(ids).dtype == np.int32 and np.asarray(ids).tolist() == wanted
    again = pickle.loads(pickle.dumps(ids))
    assert type(again) is list and again == wanted
    assert len(fetches) == 1


@pytest.mark.parametrize("on_error", ["raise", "none"])
def test_a_reward_that_reads_tokens_which_are_lost_gives_none_no_value(
    on_error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that went is no failure of the reward, whatever is to be done about those."""

    def gone(_: Any) -> None:
        raise OwnerDiedError("00ff", None, "")

    def reads(completion_ids: Any, **_: Any) -> list[float]:
        return [float(ids[0]) for ids in completion_ids]

    monkeypatch.setattr(ray, "get", gone)
    light, _ = hold([with_figures(made(0, 5))])
    items = [MixItem(FunctionReward(reads, "reads"), "reads")]
    mix = RewardMix(items, answer_grader=None, on_error=on_error)
    with mix, pytest.raises(LostArrays):
        mix.score_group(Problem("p", "?", (1, 2), ("1",)), bound(light, "block"))


def test_the_driver_reads_figures_and_no_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: Any) -> None:
        raise AssertionError("an array was fetched")

    monkeypatch.setattr(ray, "get", nothing)
    samples = [made(0, 400), made(1, 400), made(2, 400, seed=1), made(3, 300)]
    light, _ = hold([with_figures(one) for one in samples])
    found = bound(light, "block")
    for one, sample in zip(found, samples, strict=True):
        assert digest_tokens(one) == digest_tokens(sample)
        assert digest_log_probs(one) == digest_log_probs(sample)
        assert one.log_prob() == float(sample.log_probs.sum(dtype=np.float64))
        assert repetition_of(one) == repetition(sample.text, sample.token_ids)
    assert dependent_samples([found]) == dependent_samples([samples]) != []
    problem = Problem("p", "?", (1, 2), ("1",))
    masks = [
        sampled_sequences(
            [Group(problem, tuple(GradedSample(one, 1.0, True, "correct") for one in of))],
            truncated="keep",  # type: ignore[arg-type]
            mask_duplicates=True,
        ).takes_part.tolist()
        for of in (found, samples)
    ]
    assert masks[0] == masks[1] == [True, False, True, True]


def test_a_block_has_the_arrays_and_nothing_else() -> None:
    for samples in ([made(0, 1)], [made(0, 12799)], [made(0, 9), made(1, 30000)]):
        light, block = hold([with_figures(one) for one in samples])
        values = 8 * sum(len(one.token_ids) for one in samples)
        assert block is not None and block.nbytes == values
    # Samples whose arrays are wanted here stay whole, and nothing is left there.
    mixed = (made(0, 4), with_figures(made(1, 4)))
    light, block = hold(mixed)
    assert light[0] is mixed[0] and isinstance(light[1].token_ids, ArrayRef)
    assert bound(light, "b")[0] is mixed[0]
    assert hold([made(0, 4)]) == ((made(0, 4),), None)


def test_figures_are_no_part_of_what_a_sample_is() -> None:
    sample = made(0, 7)
    other = replace(sample, figures=ArrayFigures("a", "b", 0.0, 0.0))
    assert sample == other and sample != made(0, 8)
