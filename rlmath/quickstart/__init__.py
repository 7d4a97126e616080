"""A tiny model and problems that it can learn: the quickstart's material."""

from rlmath.model.tiny import make_tiny_model
from rlmath.quickstart.problems import make_problems
from rlmath.quickstart.products import make_products

__all__ = ["EXPERIMENTS", "make_problems", "make_products", "make_tiny_model"]

# Experiments that begin with a model and problems that are made for them.
EXPERIMENTS = ("experiment=quickstart", "experiment=quickstart_tools")
