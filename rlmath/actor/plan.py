"""All that ranks are told of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmath.algorithms.correction import CorrectionConfig
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.config.algorithm import AlgorithmConfig
from rlmath.config.value import ValueConfig


@dataclass(frozen=True)
class StepPlan:
    """A step's forward passes, advantages and update, made before the step begins.

    Alone it is a plain update: the whole batch at once, from the advantages that the batch has, and
    nothing is discarded. ``AlgorithmConfig`` and ``ValueConfig`` say what the other fields mean.

    Attributes:
        objective: Of the policy. Where ``entropy_target`` sets its entropy coefficient, that is
            known after the forward passes.
        now: The weights version before the update.
        passes: Names of the forward passes before the update, in order: ``old``, ``reference``,
            ``values``. Without ``old``, these log-probs come with the update of the first
            minibatch; with ``values`` the value model is trained, and advantages come from it.
        gate: Fail the run, or warn, when actor and engines disagree on the log-probs.
        policy: Update the policy; not while the value model warms up.
        stale_kv: Engines keep keys and values of older weights; see ``Alignment.of``.
        minibatches: Optimizer steps.
        seed: Of the split into minibatches.
        constant_length: See ``sequence_weights``.
        old_is_engine: The rollout log-probs are those of the old policy.
        correction: Against the mismatch; ``None``: there is none. ``auto`` is resolved after the
            forward passes.
        kl_in_reward: Weight of a KL in the reward; ``None``: there is none.
        advantage: The estimator of a value model's advantages.
        routing_mismatch: Under routing replay, measure the mismatch with and without the replayed
            routes.
        value_clip: ``ValueConfig.clip``.
        traced: Places in the step of sequences whose tokens are to be traced.
    """

    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    now: int = 0
    passes: tuple[str, ...] = ()
    gate: bool = False
    policy: bool = True
    stale_kv: bool = False
    minibatches: int = 1
    seed: int = 0
    aggregation: str = AlgorithmConfig.aggregation
    constant_length: int | None = None
    old_is_engine: bool = False
    correction: CorrectionConfig | None = None
    entropy_top_share: float = 1.0
    kl_in_reward: float | None = None
    advantage: str = "gae"
    gamma: float = ValueConfig.gamma
    lam: float = ValueConfig.lam
    whiten_advantages: bool = ValueConfig.whiten_advantages
    distill_coef: float = 0.0
    distill_clip: float = AlgorithmConfig.distill_clip
    early_stop_ratio: float | None = None
    early_stop_rest: bool = AlgorithmConfig.early_stop_rest
    routing_mismatch: bool = False
    value_clip: float | None = ValueConfig.clip
    traced: tuple[int, ...] = ()

    @property
    def values(self) -> bool:
        """Whether the value model is trained."""
        return "values" in self.passes


PLAIN = StepPlan()
