"""A tiny model and problems that it can learn: the quickstart's material."""

from rlmath.model.tiny import make_tiny_model
from rlmath.quickstart.problems import make_problems

__all__ = ["make_problems", "make_tiny_model"]
