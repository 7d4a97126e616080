"""Settings of an update's objective."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.algorithms.losses import LOSSES
from rlmath.utils.setting import Options


@dataclass(frozen=True)
class ObjectiveSettings:
    """The policy loss with its options, the KL term and the entropy term.

    Attributes:
        loss: Name of the policy loss, see ``rlmath/algorithms/losses/``.
        options: The loss's options; ``None``: its defaults.
        kl_coef: Weight of the KL term against the reference model; 0: no term.
        kl_estimator: Name of the estimator, see ``rlmath/algorithms/kl.py``.
        kl_options: The estimator's options; ``None``: its defaults.
        entropy_coef: Weight of the entropy bonus; negative values reduce entropy.
        ratio_threshold: The share of tokens with a higher ratio is logged.
        off_policy_mask_kl: A sequence with a negative advantage is excluded if its mean of
            ``log(engine's / current probability)`` is above this, in nats; ``None``: none is.
    """

    loss: str = "ppo_clip"
    options: Options | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_options: Options | None = None
    entropy_coef: float = 0.0
    ratio_threshold: float = 5.0
    off_policy_mask_kl: float | None = None

    @property
    def loss_options(self) -> Options:
        """The options, or the loss's defaults."""
        return LOSSES.options(self.loss)() if self.options is None else self.options
