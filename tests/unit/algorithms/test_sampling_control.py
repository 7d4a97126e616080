import json
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmath.algorithms.curriculum import CooldownSettings, PassRates, staged_length
from rlmath.algorithms.dynamic_sampling import GroupPool
from rlmath.algorithms.entropy import active_entropy_coef, next_entropy_coef, top_entropy_mask
from rlmath.algorithms.filters import (
    FilterConfig,
    MeanRangeOptions,
    TruncatedRule,
    duplicates,
    handle_truncated,
    reason_to_drop,
)

MIXED, EQUAL = [5.0, -5.0], [5.0, 5.0]
UNEQUAL = FilterConfig("variance", max_rounds=4)


@pytest.mark.parametrize(
    "settings, rewards, want",
    [
        (FilterConfig("variance"), MIXED, None),
        (FilterConfig("variance"), EQUAL, "equal_rewards"),
        (FilterConfig("variance"), [5.0, None, None], "unscored"),
        (FilterConfig("variance", max_unscored_share=1.0), [5.0, None, -5.0], None),
        (FilterConfig("variance", max_unscored_share=1.0), [None, None], "unscored"),
        (FilterConfig("all"), EQUAL, None),
        (FilterConfig("mean_range"), MIXED, None),
        (FilterConfig("mean_range"), EQUAL, "mean_out_of_range"),
    ],
)
def test_group_filter(settings, rewards, want):
    options = MeanRangeOptions(-1.0, 0.0) if settings.keep == "mean_range" else None
    assert reason_to_drop(settings, rewards, options=options) == want


def test_advantages_that_read_no_rewards_need_none():
    everything = FilterConfig("all", max_unscored_share=1.0)
    assert reason_to_drop(everything, [None], reads_rewards=False) is None
    assert reason_to_drop(everything, [None]) == "unscored"
    limited = FilterConfig("all", max_unscored_share=0.5)
    assert reason_to_drop(limited, [None], reads_rewards=False) == "unscored"
    by_rewards = FilterConfig("variance", max_unscored_share=1.0)
    assert reason_to_drop(by_rewards, [None], reads_rewards=False) == "unscored"
    pool = GroupPool(1, everything, reads_rewards=False)
    assert pool.add(0, "group", [None, None]) is None


def test_a_filter_by_accuracy_does_not_look_at_rewards():
    settings = FilterConfig("accuracy")
    assert reason_to_drop(settings, [1.0, 1.0], [True, False]) is None
    assert reason_to_drop(settings, [1.0, 0.5], [True, True]) == "equal_accuracy"
    assert reason_to_drop(settings, [1.0, 0.5], [False, None]) == "equal_accuracy"
    assert reason_to_drop(settings, [1.0, 0.5], [None, None]) == "unscored"


def test_later_copies_are_duplicates():
    assert duplicates([bytes(one) for one in ([1, 2], [3], [1, 2], [1], [1, 2])]) == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_truncated_responses():
    rewards, cut = torch.tensor([5.0, -5.0]), torch.tensor([False, True])
    same, taking_part = handle_truncated(rewards, cut, TruncatedRule.keep)
    assert torch.equal(same, rewards) and taking_part.tolist() == [True, True]
    same, taking_part = handle_truncated(rewards, cut, TruncatedRule.mask)
    assert torch.equal(same, rewards) and taking_part.tolist() == [True, False]
    less, taking_part = handle_truncated(rewards, cut, TruncatedRule.penalize, penalty=2.0)
    assert less.tolist() == [5.0, -7.0] and taking_part.tolist() == [True, True]
    scaled, taking_part = handle_truncated(torch.tensor([1.0, 0.8]), cut, TruncatedRule.scale)
    assert scaled.tolist() == [1.0, 0.0] and taking_part.tolist() == [True, True]
    scaled, _ = handle_truncated(torch.tensor([1.0, 0.8]), cut, TruncatedRule.scale, factor=0.25)
    assert scaled.tolist() == pytest.approx([1.0, 0.2])
    # Unscored stays unscored.
    assert handle_truncated(torch.tensor([1.0, float("nan")]), cut, TruncatedRule.scale)[0].isnan()[
        1
    ]


def test_each_dropped_group_is_made_up_for_by_one_prompt_at_once():
    pool = GroupPool(3, UNEQUAL)
    assert pool.to_request(in_flight=0) == 3
    assert pool.to_request(in_flight=3) == 0
    assert pool.add(0, "a", MIXED, [True, False]) is None
    assert pool.to_request(in_flight=2) == 0
    assert pool.add(1, "b", EQUAL, [True, True]) == "equal_rewards"
    assert pool.to_request(in_flight=1) == 1
    pool.add(3, "d", MIXED, [True, False])
    pool.add(2, "c", MIXED, [True, None])
    assert pool.to_request(in_flight=0) == 0
    groups, counts = pool.pop()
    assert groups == ["a", "c", "d"]
    assert (counts.requested, counts.finished, counts.kept) == (4, 4, 3)
    assert counts.dropped == {"equal_rewards": 1}
    # Over all that came back: (1 + 2 + 1 + 1) right of 7 graded.
    assert counts.pass_rate == pytest.approx(5 / 7)


def run_pool(pool, equal, seed):
    """Groups come back in an order drawn from the seed; those in ``equal`` are dropped."""
    draw = random.Random(seed)
    in_flight, order = [], 0
    while (more := pool.to_request(len(in_flight))) or in_flight:
        in_flight += range(order, order + more)
        order += more
        if not more or draw.random() < 0.5:
            done = in_flight.pop(draw.randrange(len(in_flight)))
            pool.add(done, done, EQUAL if done in equal else MIXED)
    return pool.pop(), pool.carried_over


@given(
    st.sets(st.integers(0, 30)),
    st.integers(1, 6),
    st.sampled_from([1.0, 1.5, 2.0]),
    st.tuples(st.integers(), st.integers()),
)
def test_sampling_does_not_depend_on_finish_order(equal, target, oversample, seeds):
    first, second = (
        run_pool(
            GroupPool(target, replace(UNEQUAL, max_rounds=3, oversample=oversample)), equal, seed
        )
        for seed in seeds
    )
    assert first == second
    (taken, counts), _ = first
    # The least number of prompts, from the first request on, among which enough are kept.
    limit, start = 3 * target, math.ceil(oversample * target - 1e-9)

    def keep(n):
        return [order for order in range(n) if order not in equal]

    enough = [n for n in range(start, limit + 1) if len(keep(n)) >= target]
    assert counts.requested == (enough[0] if enough else limit)
    assert taken == keep(counts.requested)[:target]


def test_rounds_are_limited_and_the_step_is_then_smaller():
    pool = GroupPool(2, replace(UNEQUAL, max_rounds=2))
    order = 0
    while more := pool.to_request(in_flight=0):
        for _ in range(more):
            pool.add(order, order, MIXED if order == 1 else EQUAL)
            order += 1
    groups, counts = pool.pop()
    assert groups == [1]
    assert (counts.requested, counts.dropped, counts.pass_rate) == (4, {"equal_rewards": 3}, None)
    assert pool.to_request(in_flight=0) == 2  # a new step has a new limit


def test_with_too_few_groups_all_are_kept_for_the_next_step():
    pool = GroupPool(3, replace(UNEQUAL, max_rounds=1))
    for order in range(pool.to_request(0)):
        pool.add(order, order, MIXED if order else EQUAL)
    groups, counts = pool.pop(at_least=3)
    assert (groups, counts.carried_over) == ([], 2)
    assert pool.to_request(in_flight=0) == 1


def test_carried_over_groups_go_to_the_next_step():
    pool = GroupPool(2, replace(UNEQUAL, oversample=1.5))
    assert pool.to_request(0) == 3
    for order in (2, 0, 1):
        pool.add(order, f"g{order}", MIXED)
    groups, counts = pool.pop()
    assert groups == ["g0", "g1"] and counts.carried_over == 1
    resumed = GroupPool(2, replace(UNEQUAL, oversample=1.5))
    resumed.set_carried_over(pool.carried_over)
    for p in (pool, resumed):
        assert p.to_request(in_flight=0) == 2  # ceil(1.5 * 1)
        p.add(3, "g3", MIXED)
        p.add(4, "g4", MIXED)
        assert p.pop()[0] == ["g2", "g3"]


def test_too_easy_and_too_hard_problems_are_on_cooldown():
    rates = PassRates(CooldownSettings(too_easy=0.9, too_hard=0.1, cooldown_steps=5, decay=0.5))
    for problem, passed in (("easy", 8), ("hard", 0), ("good", 4)):
        rates.update(problem, passed, 8, step=0)
        assert not rates.is_on_cooldown(problem, 1)  # one visit is not enough
        rates.update(problem, passed, 8, step=1)
    assert [rates.is_on_cooldown(p, 2) for p in ("easy", "hard", "good", "new")] == [
        True,
        True,
        False,
        False,
    ]
    assert rates.is_on_cooldown("easy", 6) and not rates.is_on_cooldown("easy", 7)
    rates.update("easy", 0, 8, step=7)
    assert rates.rate("easy") == 0.5 and not rates.is_on_cooldown("easy", 8)
    rates.update("good", 0, 0, step=9)
    assert rates.rate("good") == 0.5 and rates.rate("new") is None
    resumed = PassRates(CooldownSettings())
    resumed.load_state(json.loads(json.dumps(rates.state())))
    assert resumed.state() == rates.state()


def test_staged_lengths():
    stages = [(0, 8192), (100, 16384), (200, 24576)]
    assert [staged_length(s, stages) for s in (0, 99, 100, 500)] == [8192, 8192, 16384, 24576]


def test_entropy_coefficient_steps_towards_the_target():
    step = lambda coef, entropy: next_entropy_coef(coef, entropy, 0.2, 1e-3, 5e-3)  # noqa: E731
    assert step(1e-3, 0.1) == pytest.approx(2e-3)
    assert step(1e-3, 0.3) == 0.0
    assert step(5e-3, 0.1) == 5e-3
    assert active_entropy_coef(0.01, 0.2, 0.2) == 0.01
    assert active_entropy_coef(0.01, 0.21, 0.2) == 0.0
    with pytest.raises(ValueError, match="entropy = nan"):
        step(1e-3, float("nan"))


def test_top_entropy_tokens_by_hand():
    entropy = torch.tensor([0.1, 0.9, 0.5, 9.0, 0.3, 0.2])
    mask = torch.tensor([True, True, True, False, True, True])
    got = top_entropy_mask(entropy, mask, 0.4)
    assert got.tolist() == [False, True, True, False, False, False]
    assert torch.equal(top_entropy_mask(entropy, mask, 1.0), mask)
    assert not top_entropy_mask(entropy, torch.zeros_like(mask), 0.2).any()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_top_entropy_keeps_the_share_and_the_highest(values, share):
    entropy = torch.tensor(values, dtype=torch.float64)
    mask = torch.ones(len(values), dtype=torch.bool)
    got = top_entropy_mask(entropy, mask, share)
    assert int(got.sum()) >= share * len(values)
    if not got.all():
        assert entropy[got].min() > entropy[~got].max()
