"""Gradients of groups that are graded, while others are sampled (``algorithm.overlap_update``).

A step with one optimizer minibatch is on-policy: nothing of a group's gradient depends on other
groups but the loss's denominator. So parts of the step go through forward and backward passes as
they come, their gradients add up in the ranks' buffers in the order of admission, and what is the
step's alone comes at its end: the denominator, the alignment gate, the gradient's norm, the
decision whether the minibatch is discarded, and the optimizer's step. Until then no state has
changed; gradients of a step that does not come to its end are dropped by the next one's first part.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.actor.ahead import PassAhead, StepPass
from rlmath.actor.step_parts import PartSettings
from rlmath.algorithms.aggregation import denominator
from rlmath.config.algorithm import needs_old_log_probs
from rlmath.config.schema import Config
from rlmath.monitor import Monitor
from rlmath.training.algorithm_settings import update_settings
from rlmath.training.controllers import Coefficients
from rlmath.training.metrics import batch_metrics
from rlmath.training.mismatch import check_mismatch, correction_metrics
from rlmath.training.passes import Passes
from rlmath.training.passes_ahead import PassesAhead
from rlmath.training.prepare import Prepared, rewards_to_advantages, token_settings
from rlmath.training.session import Session
from rlmath.training.step_batch import StepBatch, StepSequences
from rlmath.types import Group


def update_ahead(session: Session, coefficients: Coefficients) -> PassesAhead:
    """The parts of a step.

    Args:
        session: Its ranks compute them.
        coefficients: Of the step that is sampled.
    """

    def begin_pass(groups: Sequence[Group], is_first: bool) -> PassAhead:
        return begin_part(session, StepBatch.of(session, groups), coefficients, is_first)

    groups = session.config.algorithm.overlap_update
    return PassesAhead(begin_pass, groups, in_order=True, is_done=session.actor.is_done)


def begin_part(
    session: Session, part: StepBatch, coefficients: Coefficients, is_first: bool
) -> PassAhead:
    """Have the ranks add the gradient of whole groups; returns at once.

    Args:
        coefficients: Of the step.
        is_first: Of the step.
    """
    config, kl_coef = session.config, coefficients.kl_coef
    correction = config.algorithm.correction
    settings = PartSettings(
        update_settings(config, kl_coef, coefficients.entropy_coef_at(None)),
        token_settings(config, kl_coef, correction if correction.is_on else None),
        old_log_probs=needs_old_log_probs(config.algorithm),
        reference=config.algorithm.kl_coef > 0,
        now=part.weights_version,
    )
    advantages = rewards_to_advantages(config, part)
    return session.actor.begin_part(part.sequences, settings, advantages, is_first=is_first)


def prepare_parts(
    session: Session,
    batch: StepBatch,
    passes: Passes,
    coefficients: Coefficients,
    monitor: Monitor,
    step: int,
    ahead: Sequence[StepPass] = (),
) -> Prepared:
    """Wait for a step's parts, and judge what they report; in place of ``prepare``.

    Args:
        coefficients: Of the step.
        ahead: Of ``batch.log_prob_passes``, begun while the step was sampled; none: they are made
            now.

    Raises:
        AlignmentError: Engine and actor disagree; see :func:`check_mismatch`. No weight has
            changed.
    """
    metrics = batch_metrics(batch.sequences)
    with monitor.phase("update"):
        parts = tuple(ahead) or tuple(parts_now(session, batch, coefficients))
        found = session.actor.part_figures(parts)
    with monitor.phase("log_probs"):
        metrics |= check_mismatch(
            session, found.alignment, batch.sequences, monitor, step, gate=passes.gate
        )
    metrics |= correction_metrics(session.config.algorithm.correction, found.tokens.correction)
    tokens = found.tokens
    return Prepared(batch, metrics, tokens.any_advantage, tokens.fingerprints, parts=parts)


def parts_now(session: Session, batch: StepBatch, coefficients: Coefficients) -> list[StepPass]:
    """The parts that a step was made of, once more and in their order."""
    return [
        StepPass(
            places,
            begin_part(session, batch.part(places), coefficients, is_first=number == 0),
        )
        for number, places in enumerate(batch.log_prob_passes)
    ]


def divisor_of(config: Config, sequences: StepSequences) -> float:
    """What the weights of the tokens of a step's parts lack."""
    counts, groups = sequences.loss_token_counts, sequences.group_ids
    return denominator(config.algorithm.aggregation, counts, groups)
