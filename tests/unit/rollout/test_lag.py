"""How old trained tokens are, and whether age picks by length."""

from dataclasses import replace

import numpy as np
import pytest

from rlmath.rollout.lag import LengthTotals
from rlmath.rollout.live_group import LiveGroup
from rlmath.rollout.requests import Request
from rlmath.types import GradedSample, Group, Problem, Sample


def sample(tokens, finish_reason="stop"):
    ids = np.zeros(tokens, np.int32)
    return Sample("p", 0, ids, np.zeros(tokens, np.float32), "", finish_reason, ((0, 0),), 0, 0)


def group(*tokens):
    graded = [GradedSample(sample(count), 1.0, True, "correct") for count in tokens]
    return Group(Problem("p", "", (1,), ()), tuple(graded))


def test_the_length_bias_counts_what_is_unfinished_with_the_tokens_so_far():
    totals = LengthTotals()
    totals.add([group(10, 30)], [group(10)])
    # 60 tokens over 2 finished responses.
    assert totals.bias([sample(20, "cut")]) == {"rollout/length_bias": 10 / 30 - 1}
    assert totals.bias([sample(20)]) == {"rollout/length_bias": 10 / 20 - 1}


def test_no_length_bias_before_any_response_is_known_to_be_finished():
    totals = LengthTotals()
    totals.add([], [group(10)])
    assert totals.bias([sample(20, "cut")]) == {}
    assert totals.bias([replace(sample(20), index=1)])["rollout/length_bias"] == pytest.approx(-0.5)


def test_a_response_that_engines_continue_counts_with_what_it_had():
    """With ``continuous`` all of them are under way when a step takes its groups."""
    problem = Problem("p", "", (1,), ())
    requests = tuple(Request("p", i, (1,), 64, 1.0, 1.0, seed=i) for i in range(3))
    live = LiveGroup(0, 1, problem, requests)
    live.add(sample(8))
    live.add(replace(sample(20, "cut"), index=1))
    assert live.unfinished == 2
    (continued,) = live.take_cut(None)
    assert continued.begun_tokens == 20 and not live.cut
    assert sorted(len(one.token_ids) for one in live.known()) == [8, 20]
    live.add(replace(sample(30), index=1))
    assert sorted(len(one.token_ids) for one in live.known()) == [8, 30]
    assert live.unfinished == 1
