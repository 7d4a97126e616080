"""A step whose one minibatch comes in parts, while others of its groups are sampled.

Each part is passed through as a whole step would be, up to the gradient, which stays in the
ranks' buffers. The last part makes the step: the gradients are divided by what only all parts
together say, and the optimizer steps once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rlmath.actor.rank_step import RankStep, TokenFigures, TokenSettings
from rlmath.actor.settings import UpdateResult, UpdateSettings
from rlmath.algorithms.advantages import SequenceAdvantages
from rlmath.algorithms.alignment import Alignment
from rlmath.batching.shards import Shard
from rlmath.weights.sequence_fingerprints import SequenceFingerprints

if TYPE_CHECKING:
    from rlmath.actor.policy import MegatronActor
    from rlmath.actor.policy_loss import MinibatchPart


@dataclass(frozen=True)
class PartSettings:
    """What becomes of the tokens of a part.

    Attributes:
        update: The algorithm.
        tokens: Between the log-probs and the backward pass.
        old_log_probs: There is a pass for them; else they are those of the forward pass.
        reference: There is one for the reference model's.
        now: The actor's weights version.
    """

    update: UpdateSettings
    tokens: TokenSettings
    old_log_probs: bool
    reference: bool
    now: int


@dataclass(frozen=True)
class PartFigures:
    """What a rank reports of a part. Places are those in the part.

    Attributes:
        alignment: Of its log-probs with the rollout log-probs.
        tokens: Of what the update reads.
    """

    alignment: Alignment
    tokens: TokenFigures

    def at(self, places: Tensor) -> PartFigures:
        """With other places, such as those in the step.

        Args:
            places: ``[n]`` int64, of the part's ``n`` sequences.
        """
        prints = self.tokens.fingerprints
        moved = SequenceFingerprints(places[prints.places], prints.bits, prints.sums)
        return PartFigures(
            dataclasses.replace(self.alignment, places=places[self.alignment.places]),
            dataclasses.replace(self.tokens, fingerprints=moved),
        )


class StepParts:
    """The parts of one step on this rank.

    Args:
        policy: The rank's policy.
    """

    def __init__(self, policy: MegatronActor) -> None:
        self._policy = policy
        self._parts: list[MinibatchPart] = []

    def add(
        self, shard: Shard, settings: PartSettings, advantages: SequenceAdvantages
    ) -> PartFigures | None:
        """Add the gradient of another part.

        Args:
            shard: The rank's sequences of it, perhaps none.
            settings: What to compute.
            advantages: Of these sequences, from rewards alone.

        Returns:
            On the rank that reports.
        """
        step = RankStep(self._policy, None, shard)
        alignment = step.log_probs(settings.now) if settings.old_log_probs else None
        if settings.reference:
            step.reference_log_probs()
        figures = step.finish(settings.tokens, advantages)
        part, found = self._policy.add_part(step.shard, settings.update, is_first=not self._parts)
        self._parts.append(part)
        if figures is None:
            return None
        assert found is not None
        if alignment is None:
            alignment = step.alignment_of(found, settings.now)
            own = {"old_log_probs": found.log_probs}
            lengths = shard.batch.response_lengths
            prints = figures.fingerprints.with_values(
                SequenceFingerprints.of(shard.places, lengths, own)
            )
            figures = dataclasses.replace(figures, fingerprints=prints)
        assert alignment is not None
        return PartFigures(alignment, figures)

    def update(
        self,
        places: Sequence[Tensor],
        settings: UpdateSettings,
        divisor: float,
        traced: Collection[int],
    ) -> UpdateResult | None:
        """The optimizer step of all parts.

        Args:
            places: Of each part, ``[n]`` int64, where its sequences are in the step.
            settings: The algorithm.
            divisor: See ``aggregation.denominator``.
            traced: Places in the step of sequences whose tokens are to be traced.

        Returns:
            On the rank that reports.
        """
        parts = [one.at(own) for one, own in zip(self._parts, places, strict=True)]
        self._parts = []
        result = self._policy.update_from_parts(parts, settings, divisor, traced)
        return result if self._policy.reports else None
