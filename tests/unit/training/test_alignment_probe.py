"""The gate where a step trains on older tokens alone: a few are sampled for it."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.filters import TruncatedRule
from rlmath.batching.from_groups import sampled_sequences
from rlmath.engines.requests import Request
from rlmath.training.checks.base import AfterSync, BeforeUpdate
from rlmath.training.gate import AlignmentError
from rlmath.types import GradedSample, Group, Problem
from tests.support.samples import make_sample
from tests.unit.training.test_log_prob_gate import session_of

NOW = 4
MONITOR = SimpleNamespace(phase=lambda _: contextlib.nullcontext())


def group(version, problem="p"):
    sample = sample_of(Request(problem, 0, (1, 2), 8, 1.0, 1.0, 0), version, 0.0)
    return Group(Problem(problem, "?", (1, 2), ("3",)), (GradedSample(sample, 1.0, True, ""),))


def sample_of(request, version, difference):
    values = {"log_probs": -1.0 - difference, "version": version, "seed": request.seed}
    return make_sample(request.problem_id, request.index, 3, **values)


def session(difference, *, sleeps=False, engines=2, keeps_kv=False):
    """Engines whose log-probs differ from the actor's."""
    made = session_of("model.dtype=float32", sleeps=sleeps)
    made.layout.engines = engines
    pool = made.sampling.pool
    pool.spec.keeps_kv = keeps_kv
    pool.requests = []

    def generate(requests):
        pool.requests += requests
        return (sample_of(one, NOW, difference) for one in reversed(requests))

    pool.generate = generate
    return made


def judge(session, groups, gate=True, step=5):
    """A step of these groups, whose tokens of the present weights have no difference."""
    plan, check = SimpleNamespace(gate=gate), session.check
    batch = sampled_sequences(groups, truncated=TruncatedRule.keep, mask_duplicates=False)
    trained = SimpleNamespace(sequences=batch)
    given = batch.select(range(len(batch)))
    values = given.engine_log_probs
    alignment = Alignment.of_batch(
        given, values, values, NOW, stale_kv=session.sampling.pool.spec.keeps_kv
    )
    before = BeforeUpdate(session, MONITOR, step, plan, groups, groups, trained, alignment)
    check.before_update(before)
    assert not session.sampling.pool.requests
    found = check.after_sync(AfterSync(session, MONITOR, step, False))
    return found


def test_an_engine_that_is_right_passes_and_one_that_is_not_stops_the_step():
    right = session(1e-6)
    assert judge(right, [group(3), group(3, "q")])["alignment/max_abs_diff"] > 0
    requests = right.sampling.pool.requests
    assert len(requests) == 16 and {one.problem_id for one in requests} == {"p", "q"}
    assert len({one.key for one in requests}) == len({one.seed for one in requests}) == 16
    assert all(one.max_tokens == 64 for one in requests)
    with pytest.raises(AlignmentError, match="over 48 tokens"):
        judge(session(0.01), [group(3)])


@pytest.mark.parametrize(
    ("groups", "gate", "sleeps"),
    [
        ([group(3)], False, False),
        ([group(3)], True, True),
        # The step trains on such tokens.
        ([group(3), group(NOW)], True, False),
    ],
)
def test_no_probe_where_none_is_needed_or_engines_sleep(groups, gate, sleeps):
    made = session(0.0, sleeps=sleeps)
    assert not [name for name in judge(made, groups, gate) if "noise" not in name]
    assert not made.sampling.pool.requests


def test_a_skipped_step_is_not_probed():
    made = session(0.0)
    plan = SimpleNamespace(gate=True)
    made.check.before_update(BeforeUpdate(made, MONITOR, 5, plan, [group(3)], (), None))
    assert made.check.after_sync(AfterSync(made, MONITOR, 5, False)) == {}


def test_gate_with_kept_kv_needs_responses_of_one_version():
    (graded,) = group(NOW).samples
    mixed = replace(graded, sample=replace(graded.sample, spans=((NOW - 1, 0), (NOW, 1))))
    groups = [replace(group(NOW), samples=(mixed,))]
    for keeps_kv, given, probes in (
        (True, groups, True),
        (False, groups, False),
        (True, [group(NOW)], False),
    ):
        made = session(1e-6, keeps_kv=keeps_kv)
        judge(made, given)
        assert bool(made.sampling.pool.requests) == probes
