"""rlmath trains language models to reason about mathematics with reinforcement learning."""

__version__ = "0.1.0"
