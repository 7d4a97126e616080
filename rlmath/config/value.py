"""Settings of ``value``: the value model."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmath.config.optimizer import SupervisedOptimizerConfig
from rlmath.utils.setting import setting


@dataclass
class ValueConfig:
    """The value model of algorithm.advantage=gae; it begins with the policy's weights."""

    gamma: float = setting(1.0, "Discount per token.", above=0, most=1)
    lam: float = setting(
        1.0,
        "Lambda of GAE: 1 uses rewards only (Monte Carlo), 0 bootstraps from the value model only.",
        least=0,
        most=1,
    )
    clip: float | None = setting(
        None,
        "Maximum change of a value per step, in units of the reward; null: unbounded.",
        above=0,
    )
    whiten_advantages: bool = setting(
        True, "Normalize the advantages of a step to mean 0 and standard deviation 1."
    )
    warmup_steps: int = setting(
        0, "Steps at the start in which only the value model is trained.", least=0
    )
    optimizer: SupervisedOptimizerConfig = field(default_factory=SupervisedOptimizerConfig)
