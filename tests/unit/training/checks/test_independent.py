import itertools
import math
import warnings
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from rlmath.config.load import load
from rlmath.rollout.round import Sampled
from rlmath.training import step
from rlmath.training.checks.base import InvariantError
from rlmath.training.checks.catalog import step_checks
from rlmath.training.checks.independent import dependent_samples, log_tail, repeated_samples
from rlmath.types import GradedSample, Group, Problem
from tests.support.samples import make_sample

RNG = np.random.default_rng(3)
SEEDS = itertools.count()


def sample(index, tokens, log_prob, seed=None):
    seed = next(SEEDS) if seed is None else seed
    return make_sample("p", index, tokens, log_probs=log_prob, version=1, seed=seed)


def draw(groups, size, choices, length):
    """Groups of samples of ``length`` tokens, each of ``choices`` alike ones."""
    p = -math.log(choices)
    return [
        [sample(i, RNG.integers(0, choices, length).tolist(), p) for i in range(size)]
        for _ in range(groups)
    ]


def test_samples_with_one_seed_are_named():
    group = [sample(0, [1], -1.0, seed=7), sample(1, [2], -1.0), sample(2, [3], -1.0, seed=7)]
    (sentence,) = dependent_samples([group])
    assert "samples 0 and 2 of problem p have the same seed (7)" in sentence


@pytest.mark.parametrize(("choices", "length"), [(1, 20), (2, 1), (2, 4), (10, 2), (50, 20)])
def test_chance_is_no_alarm(choices, length):
    """From a policy that always says the same to one that never does."""
    for _ in range(20):
        assert dependent_samples(draw(32, 8, choices, length)) == []


@pytest.mark.parametrize(("choices", "length", "groups"), [(2, 4, 32), (50, 20, 1), (2, 1, 64)])
def test_copies_are_an_alarm(choices, length, groups):
    made = draw(groups, 8, choices, length)
    copies = [
        [sample(i, g[0].token_ids.tolist(), -math.log(choices)) for i in range(8)] for g in made
    ]
    (sentence,) = dependent_samples(copies)
    assert f"{groups * 4} of {groups * 4} pairs" in sentence and "not independent" in sentence


def test_one_copy_of_a_long_response_is_enough():
    made = draw(32, 8, 50, 20)
    made[3][5] = sample(5, made[3][4].token_ids.tolist(), -math.log(50))
    (sentence,) = dependent_samples(made)
    assert "1 of 128 pairs" in sentence and "samples 4 and 5" in sentence


def test_the_bound_is_above_the_binomial_tail():
    for n, p, k in [(10, 0.1, 5), (40, 0.5, 40), (100, 0.01, 8), (5, 1e-30, 1)]:
        exact = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
        bound = log_tail([math.log(p)] * n, k)
        assert math.log(exact) - 1e-9 <= bound <= math.log(exact) + 5
    assert log_tail([0.0] * 20, 20) == pytest.approx(0.0, abs=1e-9)
    # An engine that overflowed; warnings are errors here.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert log_tail([math.nan] * 20, 20) == pytest.approx(0.0, abs=1e-9)


def test_samples_of_an_earlier_step_are_named_and_new_ones_of_its_problems_are_not():
    earlier = [(3, frozenset({("p", 0, 7), ("p", 1, 8)})), (4, frozenset({("q", 0, 9)}))]
    assert repeated_samples(frozenset({("p", 0, 17), ("p", 1, 18), ("q", 0, 19)}), earlier) == []
    (sentence,) = repeated_samples(frozenset({("p", 0, 17), ("p", 1, 8), ("r", 0, 5)}), earlier)
    assert "1 of 3 samples" in sentence and "step 3 (such as sample 1 of problem p)" in sentence


def test_groups_that_a_filter_dropped_are_checked():
    """A group of copies has equal rewards: with dynamic sampling no step trains on one."""
    samples = [sample(index, [1, 2], -1.0, seed=7) for index in range(4)]
    graded = [GradedSample(one, 1.0, True, "correct") for one in samples]
    group = Group(Problem("p", "", (1,), ("1",)), tuple(graded))
    sampled = Sampled((), (group,), {}, "", {"p": "equal_rewards"})
    forgotten = []
    feed = SimpleNamespace(take=lambda step: sampled, forget=forgotten.append)
    parts = SimpleNamespace(
        run=SimpleNamespace(
            config=load(["experiment=quickstart", "model.path=tiny", "runner.run_dir=r"])
        ),
        source=feed,
        monitor=mock.MagicMock(),
        coefficients=mock.Mock(kl_coef=0.0),
        checks=step_checks(),
    )
    with pytest.raises(InvariantError, match="have the same seed"):
        step.train_step(parts, 3)
    assert forgotten == [3]
