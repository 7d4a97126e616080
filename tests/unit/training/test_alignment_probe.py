"""The gate where a step trains on older tokens alone: a few are sampled for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlmath.rollout.requests import Request
from rlmath.training.alignment_probe import check_probe, sample_probe
from rlmath.training.gate import AlignmentError
from rlmath.types import GradedSample, Group, Problem, Sample
from tests.unit.training.test_log_prob_gate import session_of

NOW = 4
MONITOR: Any = SimpleNamespace(phase=lambda _: contextlib.nullcontext())
FEED: Any = SimpleNamespace(engines_free=lambda _: contextlib.nullcontext())
GATED: Any = SimpleNamespace(gate=True)


def group(version: int, problem: str = "p") -> Group:
    sample = sample_of(Request(problem, 0, (1, 2), 8, 1.0, 1.0, 0), version, 0.0)
    return Group(Problem(problem, "?", (1, 2), ("3",)), (GradedSample(sample, 1.0, True, ""),))


def sample_of(request: Request, version: int, difference: float) -> Sample:
    return Sample(
        request.problem_id,
        request.index,
        np.arange(3, dtype=np.int32),
        np.full(3, -1.0 - difference, np.float32),
        "",
        "stop",
        ((version, 0),),
        request.seed,
        0,
    )


def session(
    difference: float, *, sleeps: bool = False, engines: int = 2, keeps_kv: bool = False
) -> Any:
    """Engines whose log-probs differ from the actor's."""
    made = session_of("model.dtype=float32", sleeps=sleeps)
    made.layout.engines = engines
    pool = made.sampling.pool
    pool.spec.keeps_kv = keeps_kv
    pool.requests = []

    def generate(requests: Sequence[Request]) -> Iterator[Sample]:
        pool.requests += requests
        return (sample_of(one, NOW, difference) for one in reversed(requests))

    pool.generate = generate
    return made


def test_an_engine_that_is_right_passes_and_one_that_is_not_stops_the_step() -> None:
    right = session(1e-6)
    probe = sample_probe(right, FEED, [group(3), group(3, "q")], GATED, MONITOR, step=5)
    requests = right.sampling.pool.requests
    assert len(requests) == 16 and {one.problem_id for one in requests} == {"p", "q"}
    assert len({one.key for one in requests}) == len({one.seed for one in requests}) == 16
    assert all(one.max_tokens == 64 for one in requests)
    assert check_probe(right, probe, MONITOR, step=5)["alignment/max_abs_diff"] > 0

    wrong = session(0.01)
    probe = sample_probe(wrong, FEED, [group(3)], GATED, MONITOR, step=5)
    with pytest.raises(AlignmentError, match="over 48 tokens"):
        check_probe(wrong, probe, MONITOR, step=5)


@pytest.mark.parametrize(
    ("groups", "gate", "sleeps"),
    [
        ([], True, False),
        ([group(3)], False, False),
        ([group(3)], True, True),
        # What the step trains on has such tokens.
        ([group(3), group(NOW)], True, False),
    ],
)
def test_no_probe_where_none_is_needed_or_engines_sleep(
    groups: list[Group], gate: bool, sleeps: bool
) -> None:
    made, passes = session(0.0, sleeps=sleeps), SimpleNamespace(gate=gate)
    assert sample_probe(made, FEED, groups, passes, MONITOR, step=5) is None  # type: ignore[arg-type]
    assert not made.sampling.pool.requests
    assert check_probe(made, None, MONITOR, step=5) == {}


def test_where_old_keys_and_values_stay_the_gate_needs_responses_of_one_version() -> None:
    (graded,) = group(NOW).samples
    mixed = replace(graded, sample=replace(graded.sample, spans=((NOW - 1, 0), (NOW, 1))))
    groups = [replace(group(NOW), samples=(mixed,))]
    keeps = session(1e-6, keeps_kv=True)
    assert sample_probe(keeps, FEED, groups, GATED, MONITOR, step=5) is not None
    assert sample_probe(session(1e-6), FEED, groups, GATED, MONITOR, step=5) is None
    assert sample_probe(keeps, FEED, [group(NOW)], GATED, MONITOR, step=5) is None
