"""Every setting of a run. Hydra composes ``conf/`` onto these.

Each section is a file in this folder, or is part of the component that takes it.
``MISSING`` (``???`` in a file) has to be given. Combinations are checked in ``rlmath/checks/``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlmath.config.actor import ActorConfig, Layers, Logits, Recompute
from rlmath.config.algorithm import AlgorithmConfig, OldLogProbs
from rlmath.config.alignment import AlignmentConfig, OnMisalignment
from rlmath.config.cluster import ClusterConfig, Device, Placement
from rlmath.config.collapse import CollapseConfig
from rlmath.config.data import DataConfig, MalformedRow, OverlongPrompt
from rlmath.config.eval import BenchmarkItem, EvalConfig
from rlmath.config.model import DType, ModelConfig
from rlmath.config.optimizer import OptimizerConfig, Schedule
from rlmath.config.precision import PrecisionConfig
from rlmath.config.reward import CompletionFormat, OnRewardError, RewardConfig, RewardItem
from rlmath.config.rollout import RolloutConfig, RolloutSchedule
from rlmath.config.runner import RunnerConfig
from rlmath.config.sft import SftConfig
from rlmath.config.teacher import TeacherConfig
from rlmath.config.value import ValueConfig
from rlmath.config.watchdog import WatchdogConfig
from rlmath.config.weights import WeightsConfig
from rlmath.utils.setting import setting


@dataclass
class Config:
    plugins: list[str] = setting(
        list,
        "Your own code: Python files and packages that register a loss, an estimator or another "
        "part, such as [my_pkg, path/to/file.py]; imported first in each process. A part may also "
        "be named directly, algorithm.loss=my_file.py:my_loss. See docs/extending.md.",
    )
    plugin_hashes: dict[str, str] = setting(
        dict,
        "Hashes of the source files of plugins, of parts named by file or package, and of rewards, "
        "by file; filled in at the start. A given hash has to match.",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    collapse: CollapseConfig = field(default_factory=CollapseConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
