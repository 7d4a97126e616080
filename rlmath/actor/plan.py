"""The instructions of the driver to the ranks for a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmath.algorithms.correction import CorrectionConfig
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.config.algorithm import AlgorithmConfig
from rlmath.config.value import ValueConfig
from rlmath.utils.setting import Options


@dataclass(frozen=True)
class StepPlan:
    """A step's forward passes, advantages and update, planned before the step begins.

    The default is a plain update: the whole batch at once, from the batch's own advantages, and
    nothing is discarded. ``AlgorithmConfig`` and ``ValueConfig`` document the other fields.
    """

    # The policy's objective. If entropy_target determines its entropy coefficient, that is known
    # only after the forward passes.
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    now: int = 0  # The weights version before the update.
    # Names of the forward passes before the update, in order: old, reference, values. Without old,
    # these log-probs come with the update of the first minibatch; with values the value model is
    # trained, and advantages come from it.
    passes: tuple[str, ...] = ()
    # Whether to fail the run, or warn, when actor and engines disagree on the log-probs.
    gate: bool = False
    policy: bool = True  # Whether to update the policy; not while the value model warms up.
    # Whether engines keep keys and values of older weights; see Alignment.of_batch.
    stale_kv: bool = False
    minibatches: int = 1  # Number of optimizer steps.
    seed: int = 0  # Seed of the split into minibatches.
    aggregation: str = AlgorithmConfig.aggregation
    constant_length: int | None = None  # See sequence_weights.
    aggregation_options: Options | None = None  # Options of the aggregation, see sequence_weights.
    old_is_engine: bool = False  # The rollout log-probs are those of the old policy.
    # Correction of the mismatch, if any. auto is resolved after the forward passes.
    correction: CorrectionConfig | None = None
    entropy_top_share: float = 1.0
    kl_in_reward: float | None = None  # Weight of a KL in the reward, if any.
    advantage: str = "gae"  # The estimator of a value model's advantages.
    gamma: float = ValueConfig.gamma
    lam: float = ValueConfig.lam
    whiten_advantages: bool = ValueConfig.whiten_advantages
    distill_coef: float = 0.0
    distill_clip: float = AlgorithmConfig.distill_clip
    early_stop_ratio: float | None = None
    early_stop_rest: bool = AlgorithmConfig.early_stop_rest
    # Whether to measure the mismatch with and without the replayed routes under routing replay.
    routing_mismatch: bool = False
    value_clip: float | None = ValueConfig.clip  # ValueConfig.clip.
    traced: tuple[int, ...] = ()  # Places in the step of sequences whose tokens are traced.

    @property
    def values(self) -> bool:
        """Whether the value model is trained."""
        return "values" in self.passes


PLAIN = StepPlan()
