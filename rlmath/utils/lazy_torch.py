"""``torch`` for modules whose names and options are read before torch is needed.

    from rlmath.utils.lazy_torch import Tensor, torch

Importing torch takes seconds, and a mistake in the settings should be reported sooner; the possible
settings are declared beside the losses and estimators. Such a module uses ``torch`` only inside
functions, and ``Tensor`` only in annotations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        """Imports torch when an attribute is accessed."""

        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)  # Later accesses bypass this function.
            return value

    torch = _Torch()
    Tensor = Any
