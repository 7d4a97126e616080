"""A KL estimator: k2 up to a difference in nats, linear beyond.

rlmath train experiment=quickstart algorithm.kl_coef=0.01 \\
    algorithm.kl_estimator=examples/plugins/kl_estimator.py:huber algorithm.kl_options.limit=0.5
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.kl import KL_ESTIMATORS
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class HuberOptions(Options):
    limit: float = setting(1.0, "Difference from which it is linear, in nats.", above=0)


@KL_ESTIMATORS.register("huber", HuberOptions)
def huber(
    log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor, options: HuberOptions
) -> Tensor:
    """``d^2 / 2`` where ``|d| <= limit``, else ``limit (|d| - limit / 2)``."""
    size, limit = (log_probs - ref_log_probs).abs(), options.limit
    return torch.where(size <= limit, 0.5 * size.square(), limit * (size - 0.5 * limit))
