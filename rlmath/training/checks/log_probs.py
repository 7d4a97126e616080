"""Engine and actor give the same tokens the same log-probs under the same weights.

In a step that trains only on tokens of older weights the gate has nothing to check, so the engines
sample a few tokens for it after the weight sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.filters import TruncatedRule
from rlmath.batching.from_groups import SampledSequences, sampled_sequences
from rlmath.batching.shards import Sequences
from rlmath.config.schema import OnMisalignment
from rlmath.rollout.seeds import requests_for
from rlmath.training.checks.base import AfterSync, AfterUpdate, BeforeUpdate, Metrics, StepCheck
from rlmath.training.gate import AlignmentError, Gate
from rlmath.training.mismatch import alignment_metrics
from rlmath.types import GradedSample, Group

if TYPE_CHECKING:
    from rlmath.training.opening import Running

SEQUENCES_PER_ENGINE = 8
MAX_TOKENS = 64
# The probe's random streams are neither training's nor evaluation's.
SEED_OFFSET = 2_000_003


class LogProbAgreement(StepCheck):
    """Applies the gate to steps whose plan has one; ``alignment.on_fail`` decides between an error
    and a warning."""

    def __init__(self) -> None:
        self.gate = Gate()
        # Groups of a step whose gate had no tokens to check.
        self._unjudged: Sequence[Group] = ()

    def before_update(self, now: BeforeUpdate) -> Metrics:
        self._unjudged = now.groups if now.plan.gate else ()
        if now.alignment is None or now.batch is None or not now.plan.gate:
            return {}
        return self._judge(now, now.alignment, now.batch.sequences)

    def after_update(self, now: AfterUpdate) -> Metrics:
        if now.result is None or now.result.alignment is None or not now.plan.gate:
            return {}
        return self._judge(now, now.result.alignment, now.batch.sequences, updated=True)

    def after_sync(self, now: AfterSync) -> Metrics:
        groups, self._unjudged = self._unjudged, ()
        pool = now.run.sampling.pool
        if not groups or pool.spec.sleeps:  # Ranks have no memory beside awake engines.
            return {}
        with now.monitor.phase("generate"):
            probe = sample_probe(now.run, groups, now.step)
        with now.monitor.phase("log_probs"):
            batch = probe.select(range(len(probe)))
            values = now.run.actor.log_probs(batch)
            alignment = Alignment.of_batch(batch, *values, pool.weights_version)
            return alignment_metrics(alignment) | self._judge(now, alignment, probe)

    def _judge(
        self,
        now: BeforeUpdate | AfterUpdate | AfterSync,
        alignment: Alignment,
        sequences: Sequences,
        updated: bool = False,
    ) -> Metrics:
        """``updated``: the actor's weights have changed since the log-probs were taken."""
        if not alignment.fresh.tokens:
            return {}
        self._unjudged = ()
        try:
            run = cast("Running", now.run)  # A replay has no engines, and its plan no gate.
            return self.gate.check(run, alignment, sequences, step=now.step, updated=updated)
        except AlignmentError as error:
            if now.run.config.alignment.on_fail is OnMisalignment.stop:
                raise
            now.monitor.warn(f"step {now.step}: {error}")
            return {}


def sample_probe(run: Running, groups: Sequence[Group], step: int) -> SampledSequences:
    """A few short responses to a step's prompts, from the engines' present weights. ``groups``:
    groups of the step, at least one. ``step``: from 1."""
    config, layout = run.config, run.layout
    wanted = max(SEQUENCES_PER_ENGINE * layout.engines, layout.actor.data_parallel)
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
    samples = sorted(
        run.sampling.pool.generate(requests), key=lambda one: (one.problem_id, one.index)
    )
    return sampled_sequences(
        [
            Group(problems[one.problem_id], (GradedSample(one, 0.0, None, "ungraded"),))
            for one in samples
        ],
        truncated=TruncatedRule.keep,
        mask_duplicates=False,
    )
