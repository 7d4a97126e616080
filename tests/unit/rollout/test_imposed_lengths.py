from dataclasses import replace

import numpy as np
import pytest

from rlmath.engines.requests import Request
from rlmath.rollout.imposed_lengths import with_imposed_length
from rlmath.rollout.live_group import LiveGroup
from rlmath.types import Problem

REQUEST = Request("p", 0, (1, 2), 3000, 1.0, 1.0, seed=0)


def test_lengths_have_the_mean_and_end_at_the_longest():
    found = [with_imposed_length(replace(REQUEST, seed=seed), 1200) for seed in range(4000)]
    lengths = np.array([one.max_tokens for one in found])
    assert all(one.ignore_eos for one in found)
    assert lengths.mean() == pytest.approx(1200, rel=0.03)
    assert lengths.max() == 3000
    assert lengths.min() < 200


def test_a_request_has_the_same_length_again_and_the_longest_without_a_mean():
    assert with_imposed_length(REQUEST, 1200) == with_imposed_length(REQUEST, 1200)
    assert with_imposed_length(REQUEST, None) == replace(REQUEST, ignore_eos=True)


def test_a_group_that_is_resumed_has_the_lengths_that_it_had():
    problem = Problem("p", "", (1, 2), ("3",))
    requests = tuple(with_imposed_length(replace(REQUEST, index=i, seed=i), 1200) for i in (0, 1))
    assert requests[0].max_tokens != requests[1].max_tokens
    state = LiveGroup(0, 1, problem, requests).to_state()
    restored = LiveGroup.from_state(state, problem, wants_routes=False)
    assert restored.requests == requests
