"""Sandboxes for programs that the model wrote.

``get_provider("local")`` needs nothing; ``piston`` uses a Piston server; ``e2b`` and ``morph`` need
their package and an account. To add a provider, implement the two methods of
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
