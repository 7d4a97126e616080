"""Estimators of advantages by name; each is one file."""

from rlmath.algorithms.advantages import grpo as _grpo  # noqa: F401
from rlmath.algorithms.advantages.base import ADVANTAGES, Advantage

__all__ = ["ADVANTAGES", "Advantage", "get_advantage"]


def get_advantage(name: str) -> Advantage:
    """The estimator called ``name``; ``ValueError`` with the known names if there is none."""
    return ADVANTAGES.get(name)
