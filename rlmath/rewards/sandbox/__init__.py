"""Where programs written by the model run.

``get_provider("local")`` needs nothing; ``piston`` talks to a Piston server; ``e2b`` and ``morph``
need their own package and account. A further one is a class with two methods: see
:class:`~rlmath.rewards.sandbox.provider.CodeProvider`.
"""

from rlmath.rewards.sandbox.provider import (
    CodeProvider,
    Execution,
    Limits,
    PreparedProgram,
    Program,
    ProviderError,
    get_provider,
)

__all__ = [
    "CodeProvider",
    "Execution",
    "Limits",
    "PreparedProgram",
    "Program",
    "ProviderError",
    "get_provider",
]
