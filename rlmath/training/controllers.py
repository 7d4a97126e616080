"""Weights of the KL term and the entropy bonus, which may follow what training does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlmath.algorithms.entropy import active_entropy_coef, next_entropy_coef
from rlmath.algorithms.kl_control import next_kl_coef
from rlmath.config.schema import AlgorithmConfig

if TYPE_CHECKING:
    from rlmath.actor.settings import UpdateSettings


class Coefficients:
    """The two weights, from step to step; in checkpoints.

    Attributes:
        kl_coef: For the next update.
        entropy_coef: The controller's; what an update gets is :meth:`entropy_coef_at`.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self.kl_coef = algorithm.kl_coef
        self.entropy_coef = algorithm.entropy_coef

    def entropy_coef_at(self, entropy: float | None) -> float:
        """The bonus' weight in this step's update, and the controller's next move.

        Args:
            entropy: Mean entropy of the step's tokens before the update, in nats; needed with a
                target.
        """
        settings = self._algorithm
        target = settings.entropy_target
        if target is None:
            return self.entropy_coef
        assert entropy is not None, "a target for the entropy takes the entropy"
        if not math.isfinite(entropy):
            return self.entropy_coef  # The update will say what is wrong.
        active = active_entropy_coef(self.entropy_coef, entropy, target)
        self.entropy_coef = next_entropy_coef(
            self.entropy_coef,
            entropy,
            target,
            settings.entropy_coef_step,
            settings.entropy_coef_max,
        )
        return active

    def metrics(self, used: UpdateSettings) -> dict[str, float]:
        """The weights of a step's update."""
        return {
            "train/kl_coef": self.kl_coef,
            "train/entropy_coef": used.objective.entropy_coef,
        }

    def see_kl(self, kl: float | None, samples: int) -> None:
        """Steer the KL term's weight by the mean KL of a step's tokens, in nats."""
        settings = self._algorithm
        if settings.kl_target is not None and kl is not None and math.isfinite(kl):
            self.kl_coef = next_kl_coef(
                self.kl_coef, kl, settings.kl_target, settings.kl_horizon_samples, samples
            )

    def state_dict(self) -> dict[str, Any]:
        """Weights that are steered; others are the settings' own."""
        state = {}
        if self._algorithm.kl_target is not None:
            state["kl_coef"] = self.kl_coef
        if self._algorithm.entropy_target is not None:
            state["entropy_coef"] = self.entropy_coef
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. A weight that is steered only from now on begins as set."""
        if self._algorithm.kl_target is not None:
            self.kl_coef = float(state.get("kl_coef", self.kl_coef))
        if self._algorithm.entropy_target is not None:
            self.entropy_coef = float(state.get("entropy_coef", self.entropy_coef))
