"""Settings of an optimizer: Adam and its learning-rate schedule, in several sections."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlmath.utils.setting import setting

Schedule = StrEnum("Schedule", ["constant", "linear", "cosine"])


@dataclass
class OptimizerConfig:
    lr: float = setting(1e-6, "Peak learning rate.", least=0, common=True)
    min_lr: float = setting(0.0, "Final learning rate of linear and cosine schedules.", least=0)
    schedule: Schedule = setting(Schedule.constant, "Learning-rate schedule after warm-up.")
    warmup_steps: int | None = setting(
        None,
        "Optimizer steps of linear warm-up from 0; null: 10, or a tenth of the run's if that is "
        "less.",
        least=0,
    )
    decay_steps: int | None = setting(
        None,
        "Optimizer steps until a decaying schedule reaches min_lr; null: the whole run.",
        least=1,
    )
    adam_beta1: float = setting(0.9, "Adam's beta1.", least=0, below=1)
    adam_beta2: float = setting(0.95, "Adam's beta2.", least=0, below=1)
    adam_eps: float = setting(1e-8, "Adam's epsilon.", above=0)
    weight_decay: float = setting(0.05, "Decoupled weight decay (AdamW).", least=0)
    clip_grad_norm: float = setting(1.0, "Maximum global gradient norm.", above=0)

    def warmup_of(self, steps: int) -> int:
        """Optimizer steps of warm-up in a run of ``steps``."""
        return min(10, steps // 10) if self.warmup_steps is None else self.warmup_steps


@dataclass
class SupervisedOptimizerConfig(OptimizerConfig):
    """For a model that is fitted to given targets: values, or worked examples."""

    lr: float = setting(1e-5, "Peak learning rate.", least=0, common=True)
