"""The groups of a step, with the real stream, grading and filters, and samples made up in place of
engines: in any order, they come out the same, and the same after a checkpoint."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rlmath.data import ProblemStream
from rlmath.rollout.group_state import group_from_state, group_to_state
from rlmath.types import GradedSample, Group, Problem
from tests.support import fake_engines
from tests.support.fake_engines import PROBLEMS, Engines, anywhere, sample_from, score
from tests.support.samples import make_sample
from tests.unit.plugins.test_plugin_loading import EXAMPLES, own_plugins  # noqa: F401


class Truncating(Engines):
    """Engines whose samples have 1 to 3 tokens; those of 3 are cut off."""

    def length(self, seed):
        return 1 + seed % 3

    def _answer(self, request):
        one = replace(super()._answer(request), engine=0)
        return replace(one, finish_reason="length") if len(one.token_ids) == 3 else one


def sampler_of(*overrides, **more):
    return fake_engines.sampler_of(*(f"algorithm.{one}" for one in overrides), **more)


def sample(sampler, step, collector, order_seed=0):
    return sample_from(Truncating(order_seed, 0), sampler, step, collector)


FILTERED = ("filter.keep=variance", "filter.oversample=3", "filter.max_rounds=9")


def test_counts_of_what_was_dropped(collector):
    sampled = sample(sampler_of(*FILTERED), 1, collector)
    figures = sampled.metrics
    dropped = [figures[f"sampling/dropped_{r}"] for r in ("unscored", "equal_rewards")]
    assert sum(dropped) + figures["sampling/kept_groups"] == figures["sampling/requested_groups"]
    assert len(sampled.finished) == figures["sampling/requested_groups"] > 4
    ids = [group.problem.id for group in sampled.finished]
    assert ids[:3] == [p.id for p in ProblemStream(PROBLEMS).next(3)] and len(set(ids)) == len(ids)
    assert not sampled.shortage
    reasons = list(sampled.dropped.values())
    assert [reasons.count(r) for r in ("unscored", "equal_rewards")] == dropped
    assert len(reasons) == sum(dropped) and set(sampled.dropped) <= set(ids)


def test_each_kept_group_is_announced_once(collector):
    """A teacher scores them: those that the filter drops would be scored for nothing."""
    told = []
    sampler = sampler_of(*FILTERED, on_kept=lambda group: told.append(group.problem.id))
    trained = []
    kept = 0.0
    for step in (1, 2):
        before = len(told)
        sampled = sample(sampler, step, collector, step)
        trained += [group.problem.id for group in sampled.groups]
        kept += sampled.metrics["sampling/kept_groups"]
        assert not set(told[before:]) & set(sampled.dropped)
        assert set(trained) <= set(told)
    assert len(told) == kept and len(trained) == 8


def test_too_few_groups(collector):
    one_round = ("filter.keep=mean_range", "filter.options.low=2", "filter.max_rounds=1")
    sampled = sample(sampler_of(*one_round), 1, collector)
    assert sampled.groups == () and "mean_out_of_range" in sampled.shortage
    assert "was skipped" in sampled.shortage and len(sampled.finished) == 4
    better = ("filter.keep=mean_range", "filter.options.low=0.6", "filter.options.high=1")
    some = sample(sampler_of(*better, "filter.max_rounds=2"), 1, collector)
    assert 0 < len(some.groups) < 4 and "instead of prompts_per_step=4" in some.shortage
    # One round asks for smaller steps.
    fewer = sample(sampler_of("filter.keep=variance", "filter.max_rounds=1"), 1, collector)
    assert 0 < len(fewer.groups) < 4 and fewer.shortage == ""


def test_a_penalty_counts_before_the_filter(collector):
    rules = ("filter.keep=variance", "filter.max_rounds=9", "truncated=penalize")
    sampled = sample(sampler_of(*rules, "truncated_penalty=0.5"), 1, collector)
    for group in sampled.finished:
        for graded in group.samples:
            plain = score([graded.sample.text])[0]
            cut = graded.sample.finish_reason == "length"
            assert graded.reward == (None if plain is None else plain - 0.5 * cut)


def test_a_truncated_response_may_be_worth_nothing(collector):
    rules = ("filter.keep=variance", "filter.max_rounds=9", "truncated=scale")
    sampled = sample(sampler_of(*rules), 1, collector)
    cut = [
        g for group in sampled.finished for g in group.samples if g.sample.finish_reason == "length"
    ]
    assert cut and all(graded.reward in (0.0, None) for graded in cut)


def test_lengths_come_in_stages(collector):
    stages = "[{first_step: 1, max_response_tokens: 8}, {first_step: 3, max_response_tokens: 16}]"
    sampler = sampler_of(f"curriculum.length_stages={stages}")
    assert [sampler.max_response_tokens(step) for step in (1, 2, 3, 9)] == [8, 8, 16, 16]
    engines = Truncating(0, 0)
    sample_from(engines, sampler, 2, collector)
    assert {request.max_tokens for request in engines.requests} == {8}


def test_problems_on_cooldown_are_sampled_when_all_are():
    sampler = sampler_of("curriculum.cooldown=true", "curriculum.min_visits=1")
    for problem in PROBLEMS:
        sampler._rates.update(problem.id, 0, 2, step=0)
    problems = sampler._next_problems(3, 1, {})
    assert len(problems) == 3 and sampler._skipped == len(PROBLEMS)
    passed_over = sampler._skipped
    sampler._next_problems(2, 51, {})
    assert sampler._skipped == passed_over  # Rested for 50 steps.


def test_carried_over_arrays_are_compact_in_a_checkpoint_and_exact():
    log_probs = np.array([-0.1, -1e-38, -np.inf], np.float32)
    sample = make_sample("p0", 1, [3, 70_000, 0], log_probs=log_probs)
    problem = Problem("p0", "?", (1,), ("1",))
    group = Group(problem, (GradedSample(sample, 1.0, True, "correct", method="sympy"),))
    state = json.loads(json.dumps(group_to_state(group)))
    assert isinstance(state["samples"][0]["sample"]["token_ids"], str)
    assert group_from_state(state, problem) == group


@pytest.mark.parametrize("schedule", ["pipelined", "continuous"])
def test_schedule_without_lag_samples_what_synchronous_samples(collector, schedule):
    usual = fake_engines.sampler_of()
    other = fake_engines.sampler_of(f"rollout.schedule={schedule}", "rollout.max_lag=0")
    for step in range(1, 5):
        one, two = (fake_engines.sample(each, step, collector, step)[0] for each in (usual, other))
        assert anywhere(one) == anywhere(two)
