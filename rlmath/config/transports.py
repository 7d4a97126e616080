"""Weight transports by name, which ``weights.transport`` chooses. rlmath's own, and the class that
they extend, are in ``rlmath/engines/transport.py``."""

from __future__ import annotations

from typing import Any

from rlmath.plugins import NoTraits, Registry

TRANSPORTS: Registry[Any, NoTraits] = Registry("weights.transport", NoTraits)
