"""The experts that an engine sent a sample's tokens to, out of what vLLM returns.

vLLM gives, with each step's tokens, a row for every token that went through the model since the
last answer: ``[rows, layers, experts of a token]``, of all layers, in which those without experts
are 0. Rows follow each other without gaps from ``SamplingParams.routed_experts_prompt_start`` on,
those of a cached prefix included. The last token that was sampled has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlmath.model.spec import ModelSpec


# Where a token has one expert, a layer without routes has expert 0 everywhere. No router sends as
# many tokens as this to one expert alone.
_MANY_ROWS = 256


@dataclass(frozen=True)
class RouteSpec:
    """What of a model's routes comes with a sample.

    Attributes:
        layers: Those with experts, from 0.
        experts: Of a layer.
        experts_per_token: That a token goes to.
    """

    layers: tuple[int, ...]
    experts: int
    experts_per_token: int

    @classmethod
    def of(cls, model: ModelSpec) -> RouteSpec:
        """Of a MoE."""
        layers = tuple(filter(model.is_moe_layer, range(model.layers)))
        return cls(layers, model.experts, model.experts_per_token)

    @property
    def dtype(self) -> Any:
        """Of ``Sample.routes``."""
        return np.uint8 if self.experts <= 256 else np.int16

    def taken(
        self, begun: NDArray[Any] | None, rows: Sequence[NDArray[Any]], tokens: int
    ) -> NDArray[Any] | None:
        """``Sample.routes``.

        Args:
            begun: What earlier parts of the sample have.
            rows: From vLLM, of the tokens behind those; none: it computed none.
            tokens: Of prompt and response.

        Returns:
            Of all tokens but the last; ``begun`` if those that came are of another number of
            tokens.

        Raises:
            RuntimeError: They are not what this module knows of vLLM.
        """
        new = [self._of_layers(np.concatenate(rows))] if rows else []
        pieces = new if begun is None else [begun, *new]
        if not rows or sum(map(len, pieces)) != tokens - 1:
            # Whose the others are is not known: they count as missing.
            return begun
        return np.concatenate(pieces)

    def _of_layers(self, rows: NDArray[Any]) -> NDArray[Any]:
        wanted = (self.layers[-1] + 1, self.experts_per_token)
        if rows.ndim != 3 or rows.shape[1] < wanted[0] or rows.shape[2] != wanted[1]:
            raise RuntimeError(
                f"vLLM returned routes of shape {list(rows.shape)}, but a row needs {list(wanted)} "
                "(layers, experts per token)"
            )
        found = rows[:, self.layers]
        # A layer that nothing was captured of has the same expert in every place. Not of what is
        # cast, where any number would be an expert's.
        ends = np.sort(found[[0, -1]], axis=-1)
        is_range = ends.min() >= 0 and ends.max() < self.experts
        if not is_range or (np.diff(ends, axis=-1) == 0).any():
            raise RuntimeError(
                f"vLLM returned {ends.tolist()} as routes of the first and last token: a token "
                f"needs {self.experts_per_token} different experts of {self.experts} in each layer "
                f"of {list(self.layers)}"
            )
        if self.experts_per_token == 1 and len(found) >= _MANY_ROWS:
            silent = [n for n, used in zip(self.layers, found.any((0, 2)), strict=True) if not used]
            if silent:
                raise RuntimeError(
                    f"vLLM returned expert 0 for all {len(found)} tokens in layers {silent}, which "
                    "means that it captured no routes"
                )
        return found.astype(self.dtype)
