"""pass@k, maj@k and standard errors against closed forms and against counting every choice."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.evaluation.estimators import maj_at_k, mean_and_errors, pass_at_k


def by_counting(correct, wrong, silent, k):
    """maj@k over every choice of ``k`` samples, ties shared."""
    votes = ["right"] * correct + [i for i, n in enumerate(wrong) for _ in range(n)]
    votes += [None] * silent
    choices = list(combinations(votes, k))
    won = 0.0
    for choice in choices:
        counts = {vote: choice.count(vote) for vote in choice if vote is not None}
        most = max(counts.values(), default=0)
        winners = [vote for vote, count in counts.items() if count == most]
        won += ("right" in winners) / len(winners) if winners else 0.0
    return won / len(choices)


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(*[st.just(n)], st.integers(0, n), st.integers(1, n))
    )
)
def test_pass_at_k_counts_every_choice(case):
    n, c, k = case
    choices = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@given(
    st.integers(0, 4),
    st.lists(st.integers(1, 3), max_size=3),
    st.integers(0, 3),
    st.integers(1, 12),
)
def test_maj_at_k_counts_every_choice(correct, wrong, silent, k):
    samples = correct + sum(wrong) + silent
    if k > samples:
        return
    assert maj_at_k(correct, wrong, silent, k) == pytest.approx(
        by_counting(correct, wrong, silent, k)
    )


def test_maj_at_1_is_the_accuracy_and_pass_at_1_too():
    assert maj_at_k(3, [2, 1], 2, 1) == pytest.approx(3 / 8) == pass_at_k(8, 3, 1)


def test_sixty_four_samples_take_no_time():
    assert 0 < maj_at_k(20, [1] * 44, 0, 32) <= 1
    assert maj_at_k(33, [31], 0, 64) == 1.0


def test_standard_errors_by_hand():
    # Shares 1, 1/2, 0: mean 1/2, deviation 1/2.
    mean, over_problems, over_samples = mean_and_errors([4, 2, 0], [4, 4, 4])
    assert mean == 0.5
    assert over_problems == pytest.approx(0.5 / math.sqrt(3))
    assert over_samples == pytest.approx(math.sqrt(0.25 / 3) / 3)
    mean, over_problems, over_samples = mean_and_errors([1, 0], [1, 1])
    assert (mean, over_problems) == (0.5, pytest.approx(0.5))
    assert math.isnan(over_samples)
    assert math.isnan(mean_and_errors([1], [1])[1])


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1)])
def test_pass_at_k_refuses_out_of_range_counts(n, c, k):
    with pytest.raises(ValueError, match="has to be from"):
        pass_at_k(n, c, k)
