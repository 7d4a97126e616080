"""rlmath trains language models to reason about mathematics with reinforcement learning.

``Run`` and ``Step`` drive a run from Python (docs/python.md); the public API is listed in
docs/api.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmath.api.run import Run as Run
    from rlmath.api.run import Step as Step

__version__ = "0.1.0"
__all__ = ["Run", "Step"]


def __getattr__(name: str) -> Any:
    # Imported late: the verifier needs neither torch nor Ray.
    if name in __all__:
        from rlmath import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
