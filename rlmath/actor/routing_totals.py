"""What routers did in a step: how many tokens each expert got, and whose experts changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutingTotals:
    """Sums over tokens; those of several ranks add up.

    Attributes:
        counts: ``[layers, 2 + experts]`` float64: tokens whose routes were compared, those whose
            experts differ, and the recorded tokens of each expert.
    """

    counts: Tensor

    @classmethod
    def zeros(cls, layers: int, experts: int, device: torch.device) -> RoutingTotals:
        """Of no tokens."""
        return cls(torch.zeros(layers, 2 + experts, dtype=torch.float64, device=device))

    def add_load(self, layer: int, chosen: Tensor, is_text: Tensor) -> None:
        """Count the tokens of each expert.

        Args:
            layer: From 0.
            chosen: ``[tokens, k]`` int64, experts.
            is_text: ``[tokens]`` bool: not padding, which does not count.
        """
        of_tokens = is_text.to(self.counts.dtype)[:, None].expand(chosen.shape)
        self.counts[layer, 2:].scatter_add_(0, chosen.flatten(), of_tokens.flatten())

    def add_compared(self, layer: int, before: Tensor, now: Tensor, is_text: Tensor) -> None:
        """Count the tokens that go to other experts, in any order.

        Args:
            layer: From 0.
            before: ``[tokens, k]`` int64.
            now: The same.
            is_text: See :meth:`add_load`.
        """
        differs = (before.sort(dim=1).values != now.sort(dim=1).values).any(dim=1)
        self.counts[layer, 0] += is_text.sum()
        self.counts[layer, 1] += (differs & is_text).sum()

    def metrics(self, is_moe: list[bool]) -> dict[str, float]:
        """``routing/...``, by the names that ``docs/metrics.md`` explains.

        Args:
            is_moe: Of each layer.
        """
        rows = self.counts.tolist()
        found = {"routing/changed_share": self._share(sum(r[0] for r in rows), rows)}
        for layer, (compared, changed, *load) in enumerate(rows):
            if not is_moe[layer]:
                continue
            mean = sum(load) / len(load)
            figures = {
                "changed_share": changed / compared if compared else 0.0,
                "max_load": max(load) / mean if mean else 0.0,
                "min_load": min(load) / mean if mean else 0.0,
            }
            found |= {f"routing/{name}/layer_{layer}": value for name, value in figures.items()}
        return found

    @staticmethod
    def _share(compared: float, rows: list[list[float]]) -> float:
        return sum(row[1] for row in rows) / compared if compared else 0.0
