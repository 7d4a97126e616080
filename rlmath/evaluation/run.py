"""Sampling and grading of held-out problems, in training and for ``rlmath evaluate``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rlmath.checks.weight_files import not_finite_weight
from rlmath.config.benchmarks import HELD_OUT
from rlmath.engines.requests import Request
from rlmath.errors import WeightsError
from rlmath.evaluation.held_out import HeldOut
from rlmath.evaluation.journal import Journal
from rlmath.evaluation.metrics import benchmark_metrics, tag_metrics
from rlmath.monitor import Monitor
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.sampling import Sampling
from rlmath.rollout.seeds import in_environment, requests_for
from rlmath.types import Group, Sample

# Steps of evaluation have their own random streams, apart from training's.
SEED_OFFSET = 1_000_003


def evaluate(
    sampling: Sampling, run_seed: int, held_out: Sequence[HeldOut], monitor: Monitor, step: int
) -> dict[str, float]:
    """Sample and grade the held-out problems with the engines' present weights."""
    by_benchmark = {}
    with monitor.phase("evaluate"):
        for one in held_out:
            groups = sample_and_grade(sampling, run_seed, one, step)
            monitor.log_samples(step, groups, kind=sample_kind(one.benchmark.name))
            by_benchmark[one.benchmark.name] = benchmark_metrics(groups)
    return tag_metrics(by_benchmark)


def sample_and_grade(
    sampling: Sampling, run_seed: int, held_out: HeldOut, step: int, journal: Journal | None = None
) -> Sequence[Group]:
    """The graded samples of a benchmark. ``journal``: source of samples that exist already, and
    storage of new ones. Raises WeightsError: the engines compute NaN."""
    benchmark = held_out.benchmark
    requests = requests_for(
        held_out.problems,
        samples=benchmark.samples,
        max_tokens=benchmark.max_response_tokens,
        temperature=benchmark.temperature,
        top_p=benchmark.top_p,
        run_seed=run_seed + SEED_OFFSET,
        step=step,
    )
    if benchmark.tools:
        requests = in_environment(requests, held_out.problems)
    samples: Iterable[Sample]
    pool = sampling.pool
    if journal is None:
        samples = _refuse_nan(pool, requests)
    else:
        missing = [request for request in requests if request.key not in journal.samples]
        samples = itertools.chain(
            journal.samples.values(), journal.keep(_refuse_nan(pool, missing))
        )
    # Separate figures, since groups of training may be graded at the same time.
    rewards = sampling.rewards.for_evaluation()
    collect = sampling.collector.collect
    groups = collect(held_out.problems, samples, benchmark.samples, rewards).wait()
    rewards.metrics()
    return groups


def _refuse_nan(pool: RolloutPool, requests: Sequence[Request]) -> Iterator[Sample]:
    """Yield the samples, and raise when the engines compute NaN: then they repeat one token, which
    would be graded as a wrong answer.

    For ``rlmath evaluate`` no rank has read the weights, and those of large models are not checked
    before.
    """
    for sample in pool.generate(requests):
        if isinstance(sample.log_probs, np.ndarray) and np.isnan(sample.log_probs).any():
            model = Path(pool.spec.model_path)
            reason = not_finite_weight(model) or (
                f"all weights in {model} are finite, so suspect an overflow; try another "
                "model.dtype, or an earlier checkpoint"
            )
            raise WeightsError(
                f"{sample.problem_id}: the rollout log-probs are NaN, so its answer means "
                f"nothing: {reason}"
            )
        yield sample


def sample_kind(benchmark: str) -> str:
    return "eval" if benchmark == HELD_OUT else f"eval_{benchmark}"
