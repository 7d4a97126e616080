"""The function that vLLM calls in each of its processes."""

from rlmath.engines.patches.register import register

__all__ = ["register"]
