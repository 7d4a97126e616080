"""Log-prob passes over groups that are graded, while others are sampled
(``algorithm.overlap_log_probs``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlmath.actor.ahead import PassAhead
from rlmath.algorithms.filters import TruncatedRule
from rlmath.batching.from_groups import SampledSequences, sampled_sequences
from rlmath.training.passes_ahead import PassesAhead
from rlmath.types import Group


def log_probs_ahead(
    begin_log_probs: Callable[[SampledSequences, bool], PassAhead],
    groups_per_pass: int,
    reference: bool,
    is_done: Callable[[PassAhead], bool] = lambda _: True,
) -> PassesAhead:
    """The log-prob passes of a step.

    Args:
        begin_log_probs: See ``ActorGroup.begin_log_probs``.
        groups_per_pass: See ``PassesAhead``.
        reference: And those of the reference model.
        is_done: See ``PassesAhead``.
    """

    def begin_pass(groups: Sequence[Group], is_first: bool) -> PassAhead:
        # What is masked is the update's affair.
        sequences = sampled_sequences(
            groups, truncated=TruncatedRule.keep, mask_duplicates=False, reads_rewards=False
        )
        return begin_log_probs(sequences, reference)

    return PassesAhead(begin_pass, groups_per_pass, is_done=is_done)
