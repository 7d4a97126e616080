"""Parts of a run that are chosen by name, and the user's own code among them.

A :class:`~rlmath.plugins.registry.Registry` has the functions of one kind. A user's file or package
registers further ones when it is imported, which happens first in each process of a run
(:mod:`rlmath.plugins.loading`). See docs/extending.md.
"""

from rlmath.plugins.registry import NoTraits, Registry
from rlmath.plugins.source import PluginError

__all__ = ["NoTraits", "PluginError", "Registry"]
