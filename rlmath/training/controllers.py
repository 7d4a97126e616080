from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlmath.algorithms.entropy import active_entropy_coef, next_entropy_coef
from rlmath.algorithms.kl_control import next_kl_coef
from rlmath.config.schema import AlgorithmConfig


class Coefficients:
    """The two coefficients, from step to step; their state is part of checkpoints."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self.kl_coef = algorithm.kl_coef  # For the next update.
        # The controller's; an update uses entropy_coef_at.
        self.entropy_coef = algorithm.entropy_coef

    def entropy_coef_at(self, entropy: float | None) -> float:
        """The coefficient of this step's update; advances the controller. ``entropy``: mean entropy
        of the step's tokens before the update, in nats; required with a target."""
        settings = self._algorithm
        target = settings.entropy_target
        if target is None:
            return self.entropy_coef
        assert entropy is not None, "entropy_target requires the entropy"
        if not math.isfinite(entropy):
            return self.entropy_coef  # The update reports the error.
        active = active_entropy_coef(self.entropy_coef, entropy, target)
        self.entropy_coef = next_entropy_coef(
            self.entropy_coef,
            entropy,
            target,
            settings.entropy_coef_step,
            settings.entropy_coef_max,
        )
        return active

    def metrics(self, entropy_coef: float) -> dict[str, float]:
        """The coefficients of a step's update. ``entropy_coef``: from :meth:`entropy_coef_at`."""
        return {"train/kl_coef": self.kl_coef, "train/entropy_coef": entropy_coef}

    def update_kl(self, kl: float | None, samples: int) -> None:
        """Update the KL coefficient from the mean KL of a step's tokens, in nats."""
        settings = self._algorithm
        if settings.kl_target is not None and kl is not None and math.isfinite(kl):
            self.kl_coef = next_kl_coef(
                self.kl_coef, kl, settings.kl_target, settings.kl_horizon_samples, samples
            )

    def state_dict(self) -> dict[str, Any]:
        """The coefficients that have a target; the others come from the settings."""
        state = {}
        if self._algorithm.kl_target is not None:
            state["kl_coef"] = self.kl_coef
        if self._algorithm.entropy_target is not None:
            state["entropy_coef"] = self.entropy_coef
        return state

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The current :meth:`state_dict`."""
        state = self.state_dict()
        return lambda: state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore. A coefficient that had no target before starts from its setting."""
        if self._algorithm.kl_target is not None:
            self.kl_coef = float(state.get("kl_coef", self.kl_coef))
        if self._algorithm.entropy_target is not None:
            self.entropy_coef = float(state.get("entropy_coef", self.entropy_coef))
