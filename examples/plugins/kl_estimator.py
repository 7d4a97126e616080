"""A KL estimator: k2 up to a difference of one nat, linear beyond.

rlmath train experiment=quickstart algorithm.kl_coef=0.01 \\
    algorithm.kl_estimator=examples/plugins/kl_estimator.py:huber
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlmath.algorithms.kl import KL_ESTIMATORS


@KL_ESTIMATORS.register("huber")
def huber(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """``d^2 / 2`` where ``|d| <= 1``, else ``|d| - 1/2``, with ``d = log pi - log pi_ref``."""
    difference = log_probs - ref_log_probs
    size = difference.abs()
    return torch.where(size <= 1.0, 0.5 * difference.square(), size - 0.5)
