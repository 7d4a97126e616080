"""Policy losses by name; each is one file."""

from rlmath.algorithms.losses import ppo_clip as _ppo_clip  # noqa: F401
from rlmath.algorithms.losses.base import (
    LOSSES,
    LossInputs,
    LossOutput,
    PolicyLoss,
    metric_means,
)

__all__ = ["LOSSES", "LossInputs", "LossOutput", "PolicyLoss", "get_loss", "metric_means"]


def get_loss(name: str) -> PolicyLoss:
    """The policy loss called ``name``; ``ValueError`` with the known names if there is none."""
    return LOSSES.get(name)
