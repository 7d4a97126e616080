"""The Python API: a run driven from a script or a notebook. See docs/python.md."""

from rlmath.api.run import Run, Step

__all__ = ["Run", "Step"]
