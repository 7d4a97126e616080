"""Settings of ``sft``: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmath.config.optimizer import SupervisedOptimizerConfig
from rlmath.utils.setting import setting


@dataclass
class SftConfig:
    train_paths: list[str] = setting(
        list, "Files with worked examples, read with data.prompt_key and response_key."
    )
    response_key: str = setting("response", "Field with the worked solution.")
    steps: int = setting(300, "Optimizer steps.", least=1)
    sequences_per_step: int = setting(64, "Sequences per optimizer step.", least=1)
    save_every: int = setting(
        0,
        "Save a checkpoint to sft_checkpoints every N steps and after the last, and resume from "
        "the newest according to runner.resume; 0: no checkpoints.",
        least=0,
    )
    optimizer: SupervisedOptimizerConfig = field(default_factory=SupervisedOptimizerConfig)
