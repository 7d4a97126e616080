"""The experts to which an engine routed a sample's tokens, from vLLM's output.

With each step's tokens vLLM returns a row for every token that went through the model since the
last output: ``[rows, layers, experts per token]``, for all layers, with 0 for those without
experts. Rows are contiguous from ``SamplingParams.routed_experts_prompt_start`` on, including those
of a cached prefix. The last sampled token has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlmath.model.spec import ModelSpec


# If a token has one expert, a layer without routes has expert 0 everywhere. No router sends this
# many tokens to a single expert.
_MANY_ROWS = 256


@dataclass(frozen=True)
class RouteSpec:
    """The part of a model's routes that is returned with a sample."""

    layers: tuple[int, ...]  # Layers with experts, from 0.
    experts: int  # Experts per layer.
    experts_per_token: int  # Experts per token.

    @classmethod
    def of(cls, model: ModelSpec) -> RouteSpec:
        layers = tuple(filter(model.is_moe_layer, range(model.layers)))
        return cls(layers, model.experts, model.experts_per_token)

    @property
    def dtype(self) -> Any:
        """Type of ``Sample.routes``."""
        return np.uint8 if self.experts <= 256 else np.int16

    def assemble(
        self, begun: NDArray[Any] | None, rows: Sequence[NDArray[Any]], tokens: int
    ) -> NDArray[Any] | None:
        """Compute ``Sample.routes``. Returns routes of all tokens except the last; ``begun`` if the
        number of rows does not match the tokens. Raises RuntimeError: the rows are not in the
        expected format.

        Args:
            begun: Routes of earlier parts of the sample.
            rows: vLLM's rows for the following tokens; empty if it computed none.
            tokens: Length of prompt plus response.
        """
        new = [self._of_layers(np.concatenate(rows))] if rows else []
        pieces = new if begun is None else [begun, *new]
        if not rows or sum(map(len, pieces)) != tokens - 1:
            # The tokens of the other rows are unknown: they count as missing.
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
        # A layer without captured routes has the same expert everywhere. Checked before the cast,
        # after which any number would be a valid expert.
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
