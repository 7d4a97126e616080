"""Shares of a change: exact, and the planted cause gets nearly all of it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.commands.explain import shares
from rlmath.commands.explain.outcomes import REST, Outcome
from rlmath.commands.explain.shares import METRICS, explain
from rlmath.commands.explain.text import lines
from rlmath.errors import UserError

GROUPS, SAMPLES, PROBLEMS = 300, 8, 40


def outcome(
    step,
    problem,
    index,
    *,
    correct,
    status="verdict",
    tokens=100,
    truncated=False,
    dropped=False,
    extra=0.0,
    scored=True,
):
    """A sample worth ±5 and a second reward."""
    math = 5.0 if correct else -5.0
    return Outcome(
        address=f"{step}/{problem}/{index}",
        problem=problem,
        group=(step, problem),
        source=problem.partition(":")[0],
        dropped=dropped,
        truncated=truncated,
        no_answer=status == "no_answer",
        status=status,
        correct=correct,
        tokens=tokens,
        reward=math + extra if scored else None,
        parts={"reward math": math, "reward short": extra, REST: 0.0} if scored else {},
    )


def window(
    seed,
    *,
    hard=0.5,
    skill=0.0,
    truncated=0.02,
    silent=0.02,
    timeouts=0.0,
    extra=1.0,
    tokens=100,
    per_token=0.0,
    first=0,
    drop=lambda right: False,
):
    """Samples of easy and hard problems; each argument is a cause."""
    random = np.random.default_rng(seed)
    found = []
    for group in range(GROUPS):
        is_hard = random.random() < hard
        number = first + int(random.integers(PROBLEMS // 2)) + is_hard * PROBLEMS // 2
        samples = []
        for index in range(SAMPLES):
            right = bool(random.random() < (0.25 if is_hard else 0.75) + skill)
            status, cut = "verdict", bool(random.random() < truncated)
            if cut or random.random() < silent:
                status, right = "no_answer", False
            elif random.random() < timeouts:
                status, right = "timeout", False
            length = int(random.normal(tokens, 5))
            worth = extra * random.random() - per_token * length
            samples.append(
                outcome(
                    seed * GROUPS + group,
                    f"train.jsonl:{number}",
                    index,
                    correct=right,
                    status=status,
                    truncated=cut,
                    tokens=length,
                    extra=worth,
                )
            )
        dropped = drop(sum(bool(one.correct) for one in samples))
        found += [replace(one, dropped=dropped) for one in samples]
    return found


@pytest.mark.parametrize(
    ("cause", "metric", "planted"),
    [
        (shares.PROBLEMS, "reward", {"hard": 0.95}),
        (shares.PROBLEMS, "accuracy", {"hard": 0.95}),
        (shares.TRUNCATION, "reward", {"truncated": 0.5}),
        (shares.TRUNCATION, "accuracy", {"truncated": 0.5}),
        (shares.NO_ANSWER, "reward", {"silent": 0.5}),
        (shares.GRADER, "reward", {"timeouts": 0.5}),
        (shares.GRADER, "accuracy", {"timeouts": 0.5}),
        (shares.SKILL, "reward", {"skill": -0.25}),
        (shares.SKILL, "accuracy", {"skill": -0.25}),
        ("reward short", "reward", {"extra": -9.0}),
        (shares.LENGTH, "reward", {"tokens": 400, "per_token": 0.01}),
        ("length of responses alike", "length", {"tokens": 150}),
        # A policy that collapsed: to one short answer, which is wrong nearly always; to an end
        # without an answer; and to a loop that the limit ends.
        (shares.SKILL, "reward", {"skill": -0.7, "tokens": 10}),
        (shares.NO_ANSWER, "reward", {"silent": 1.0, "tokens": 5}),
        (shares.TRUNCATION, "accuracy", {"truncated": 1.0, "tokens": 400}),
        (shares.UNMATCHED, "accuracy", {"skill": -0.25, "first": 1000}),
    ],
)
def test_a_planted_cause_is_named(cause, metric, planted):
    always = {key: planted[key] for key in ("per_token",) if key in planted}
    before = window(1, **always)
    after = window(2, **planted)
    found = explain(before, after, metric, replicates=20)
    assert found.causes[0].name == cause
    assert 0.9 < found.causes[0].share / found.change < 1.1
    assert abs(sum(one.share for one in found.causes) - found.change) < 1e-9
    # It is no chance, and what was not planted may be.
    assert abs(found.causes[0].share) > 5 * found.causes[0].standard_error > 0
    assert found.standard_error < abs(found.change) / 5


def test_the_filter_is_a_cause_of_what_is_trained_on():
    before = window(1)
    after = window(2, drop=lambda right: right <= 3)
    found = explain(before, after, "reward", trained_only=True, replicates=20)
    assert found.causes[0].name == shares.FILTER
    assert 0.9 < found.causes[0].share / found.change < 1.1 and found.change > 0
    # No reward depends on lengths here.
    (length,) = (one for one in found.causes if one.name == shares.LENGTH)
    assert abs(length.share) < 0.01 * found.change
    sampled = explain(before, after, "reward", replicates=2)
    assert {one.share for one in sampled.causes if one.name == shares.FILTER} == {0.0}


def test_means_are_those_of_the_curves():
    before = [
        outcome(1, "a:0", 0, correct=True),
        outcome(1, "a:0", 1, correct=None, status="bad_gold", scored=False),
    ]
    after = [
        outcome(2, "a:0", 0, correct=False, tokens=50),
        outcome(2, "b:0", 0, correct=True, tokens=40),
    ]
    found = explain(before, after, "reward", replicates=0)
    assert (found.before, found.after, found.samples) == (5.0, 0.0, (1, 2))
    assert explain(before, after, "accuracy", replicates=0).before == 1.0
    assert explain(before, after, "length", replicates=0).after == pytest.approx(45)
    assert (found.shared_problems, found.shared_samples) == (1, 0.75)
    # A group that is worse than before moves a mean that fell.
    assert [(one.addresses, one.before, one.now, one.part) for one in found.moved] == [
        (["2/a:0/0"], 5.0, -5.0, -5.0)
    ]


OUTCOMES = st.builds(
    outcome,
    step=st.integers(0, 1),
    problem=st.sampled_from(["a:0", "a:1", "b:0"]),
    index=st.integers(0, 3),
    correct=st.sampled_from([True, False, None]),
    status=st.sampled_from(["verdict", "no_answer", "timeout", "ungraded"]),
    tokens=st.integers(0, 50),
    truncated=st.booleans(),
    dropped=st.booleans(),
    extra=st.floats(-3, 3),
    scored=st.booleans(),
)


@given(
    st.lists(OUTCOMES, min_size=1, max_size=12),
    st.lists(OUTCOMES, min_size=1, max_size=12),
    st.sampled_from(METRICS),
    st.booleans(),
)
def test_shares_add_up(before, after, metric, trained_only):
    def mean(samples):
        kept = [one for one in samples if not (trained_only and one.dropped)]
        values = {
            "reward": [one.reward for one in kept],
            "accuracy": [one.correct for one in kept],
            "length": [one.tokens for one in kept],
        }[metric]
        known = [float(one) for one in values if one is not None]
        return sum(known) / len(known) if known else None

    means = mean(before), mean(after)
    if None in means:
        with pytest.raises(UserError, match="no sample of the"):
            explain(before, after, metric, trained_only=trained_only, replicates=0)
        return
    found = explain(before, after, metric, trained_only=trained_only, replicates=0)
    assert (found.before, found.after) == pytest.approx(means, abs=1e-9)
    assert abs(sum(one.share for one in found.causes) - found.change) < 1e-9


@given(st.lists(st.floats(-9, 9), min_size=32, max_size=32))
def test_shapley_values_are_means_over_orders(numbers):
    n, parts = 3, 2
    found = np.array(numbers).reshape(1 << n, 2, parts)

    def value(taken):
        mask = sum(1 << i for i in taken if i < n)
        return float(sum(found[mask, int(n + k in taken), k] for k in range(parts)))

    expected = np.zeros(n + parts)
    orders = list(itertools.permutations(range(n + parts)))
    for order in orders:
        for at, player in enumerate(order):
            before = frozenset(order[:at])
            expected[player] += value(before | {player}) - value(before)
    np.testing.assert_allclose(shares._shapley(found, n), expected / len(orders), atol=1e-9)


def test_windows_without_a_common_problem_are_compared_by_difficulty():
    def group(problem, right):
        return [outcome(1, problem, i, correct=i < right) for i in range(4)]

    before = [*group("d:1", 4), *group("d:2", 3)]
    after = [*group("d:3", 0), *group("d:4", 2), *group("d:5", 1), *group("d:6", 4)]
    found = explain(before, after, "accuracy", replicates=2)
    assert list(found.difficulty.values()) == [(0, 0.25), (0, 0.5), (0.5, 0), (0.5, 0.25)]
    text = "\n".join(lines(found, range(1, 2), range(2, 3)))
    assert "No problem was sampled in both windows" in text and "0 problems" not in text
    same = explain(before, [*after, *group("d:1", 0)], "accuracy", replicates=2)
    assert not same.difficulty
    assert "1 problems were sampled in both" in "\n".join(lines(same, range(1, 2), range(2, 3)))
