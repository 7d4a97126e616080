"""``torch`` for modules whose names and options are read before torch is needed.

    from rlmath.utils.lazy_torch import Tensor, torch

Importing torch takes seconds. A mistake in the settings has to be reported sooner, and what the
settings may be is declared beside the losses and estimators. Such a module uses ``torch`` inside
functions only, and ``Tensor`` in annotations only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        """Imports torch when one of its attributes is asked for."""

        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)  # The next time it is found without this function.
            return value

    torch = _Torch()
    Tensor = Any
