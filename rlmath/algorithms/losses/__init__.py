"""Policy losses by name, one per file."""

from rlmath.algorithms.losses.base import (
    LOSSES,
    LossInputs,
    LossOutput,
    LossTraits,
    PolicyLoss,
    metric_means,
    policy_loss,
)
from rlmath.algorithms.losses.cispo import cispo
from rlmath.algorithms.losses.dppo import dppo
from rlmath.algorithms.losses.gmpo import gmpo
from rlmath.algorithms.losses.gspo import gspo
from rlmath.algorithms.losses.gspo_token import gspo_token
from rlmath.algorithms.losses.ppo_clip import ppo_clip
from rlmath.algorithms.losses.reinforce import reinforce
from rlmath.algorithms.losses.sapo import sapo

__all__ = [
    "LOSSES",
    "LossInputs",
    "LossOutput",
    "LossTraits",
    "PolicyLoss",
    "cispo",
    "dppo",
    "get_loss",
    "gmpo",
    "gspo",
    "gspo_token",
    "metric_means",
    "policy_loss",
    "ppo_clip",
    "reinforce",
    "sapo",
]


def get_loss(name: str) -> PolicyLoss:
    """The policy loss named ``name``; ``ValueError`` with the known names if there is none."""
    return LOSSES.get(name)
