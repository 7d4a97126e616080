"""A few tokens of the present weights for the alignment gate, where a step trains on older ones.

The gate compares engine and actor under the same weights. The pipelined schedule never trains on
such tokens, so some are sampled for it alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.actor.plan import StepPlan
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.filters import TruncatedRule
from rlmath.batching.from_groups import SampledSequences, sampled_sequences
from rlmath.monitor import Monitor
from rlmath.rollout.requests import requests_for
from rlmath.training.feed import Feed
from rlmath.training.mismatch import check_alignment
from rlmath.training.session import Session
from rlmath.types import GradedSample, Group

SEQUENCES_PER_ENGINE = 8
MAX_TOKENS = 64
# The probe's random streams are neither training's nor evaluation's.
SEED_OFFSET = 2_000_003


def sample_probe(
    session: Session,
    feed: Feed,
    groups: Sequence[Group],
    plan: StepPlan,
    monitor: Monitor,
    step: int,
) -> SampledSequences | None:
    """Sample a few short responses to a step's prompts, with the engines' present weights.

    Args:
        feed: Frees the engines for it.
        groups: Of the step.
        plan: Of the step.
        step: The optimization step, from 1.

    Returns:
        ``None``: the gate does not look at this step, has tokens of the present weights that it
        can judge, or the engines have given their memory to the actor.
    """
    pool, layout = session.sampling.pool, session.layout
    now = pool.weights_version
    is_old = not any(
        one.sample.weights_version == now and (not pool.spec.keeps_kv or len(one.sample.spans) == 1)
        for group in groups
        for one in group.samples
    )
    if not groups or not plan.gate or not is_old or pool.spec.sleeps:
        return None
    wanted = max(SEQUENCES_PER_ENGINE * layout.engines, layout.actor.data_parallel)
    config = session.config
    requests = requests_for(
        [group.problem for group in groups],
        samples=-(-wanted // len(groups)),
        max_tokens=min(MAX_TOKENS, config.rollout.max_response_tokens),
        temperature=config.rollout.temperature,
        run_seed=config.runner.seed + SEED_OFFSET,
        step=step,
        wants_routes=True,
    )[:wanted]
    problems = {group.problem.id: group.problem for group in groups}
    with monitor.phase("generate"), feed.engines_free(step):
        samples = sorted(pool.generate(requests), key=lambda one: (one.problem_id, one.index))
    return sampled_sequences(
        [
            Group(problems[one.problem_id], (GradedSample(one, 0.0, None, "ungraded"),))
            for one in samples
        ],
        truncated=TruncatedRule.keep,
        mask_duplicates=False,
    )


def check_probe(
    session: Session, probe: SampledSequences | None, monitor: Monitor, step: int
) -> dict[str, float]:
    """Apply the gate to what :func:`sample_probe` gave, before the actor's weights change.

    Returns:
        ``alignment/...``; nothing without a probe.

    Raises:
        AlignmentError: The difference is above the limit.
    """
    if probe is None:
        return {}
    batch = probe.select(range(len(probe)))
    with monitor.phase("log_probs"):
        log_probs, entropy = session.actor.log_probs(batch)
        alignment = Alignment.of_batch(
            batch, log_probs, entropy, session.sampling.pool.weights_version
        )
        return check_alignment(session, alignment, probe, monitor, step, gate=True)
