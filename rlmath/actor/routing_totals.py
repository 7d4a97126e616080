"""Totals of routers in a step: tokens per expert, and tokens whose experts changed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Maximum of ``routing/engine_missing_share`` beyond one token per sequence.
MAX_MISSING_SHARE = 0.1


@dataclass(frozen=True)
class RoutingTotals:
    """Sums over tokens. Totals of several ranks add up."""

    # [layers, 2 + experts] float64: tokens whose routes were compared, tokens whose experts differ,
    # and the recorded tokens of each expert.
    counts: Tensor
    # [layers, 3] float64: tokens, tokens with routes of the engine, and those of them that the
    # actor's router would route differently.
    engine: Tensor
    # [3] float64: tokens in the loss, and their sums of |difference| of log-probs with and without
    # the replayed routes.
    mismatch: Tensor

    @classmethod
    def zeros(cls, layers: int, experts: int, device: torch.device) -> RoutingTotals:
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        return cls(zeros(layers, 2 + experts), zeros(layers, 3), zeros(3))

    def add_load(self, layer: int, chosen: Tensor, is_text: Tensor) -> None:
        """Count the tokens of each expert.

        Args:
            layer: Layer from 0.
            chosen: ``[tokens, k]`` int64, experts.
            is_text: ``[tokens]`` bool: not padding, which is not counted.
        """
        of_tokens = is_text.to(self.counts.dtype)[:, None].expand(chosen.shape)
        self.counts[layer, 2:].scatter_add_(0, chosen.flatten(), of_tokens.flatten())

    def add_compared(self, layer: int, before: Tensor, now: Tensor, is_text: Tensor) -> None:
        """Count the tokens that are routed to different experts, in any order.

        Args:
            layer: Layer from 0.
            before: ``[tokens, k]`` int64.
            now: ``[tokens, k]`` int64.
            is_text: As in :meth:`add_load`.
        """
        self.counts[layer, 0] += is_text.sum()
        self.counts[layer, 1] += (_differs(before, now) & is_text).sum()

    def add_engine(
        self, layer: int, routes: Tensor, own: Tensor, is_known: Tensor, is_text: Tensor
    ) -> None:
        """Count the tokens with routes of the engine, and those that are rerouted by them.

        Args:
            layer: Layer from 0.
            routes: ``[tokens, k]`` int64, the engine's where known.
            own: ``[tokens, k]`` int64, the router's choice.
            is_known: ``[tokens]`` bool.
            is_text: As in :meth:`add_load`.
        """
        known = is_known & is_text
        self.engine[layer, 0] += is_text.sum()
        self.engine[layer, 1] += known.sum()
        self.engine[layer, 2] += (_differs(routes, own) & known).sum()

    def add_mismatch(self, before: Tensor, replayed: Tensor, free: Tensor, mask: Tensor) -> None:
        """Count |differences| of log-probs.

        Args:
            before: ``[R]`` log-probs to compare with.
            replayed: ``[R]`` log-probs with the replayed routes.
            free: ``[R]`` log-probs without.
            mask: ``[R]`` bool, tokens of the loss.
        """
        self.mismatch[0] += mask.sum()
        for place, values in ((1, replayed), (2, free)):
            apart = (values.double().cpu() - before.double().cpu()).abs()
            self.mismatch[place] += apart[mask.cpu()].sum()

    def metrics(self, is_moe: list[bool]) -> dict[str, float]:
        """``routing/...``, by the names in ``docs/metrics.md``. ``is_moe``: whether each layer is
        MoE."""
        return self._of_recorded(is_moe) | self._of_engine(is_moe) | self._of_mismatch()

    def _of_mismatch(self) -> dict[str, float]:
        tokens, replayed, free = self.mismatch.tolist()
        if not tokens:
            return {}
        return {
            "routing/mismatch": replayed / tokens,
            "routing/mismatch_without_replay": free / tokens,
        }

    def _of_engine(self, is_moe: list[bool]) -> dict[str, float]:
        """Metrics of tokens routed as the engine did."""
        tokens, known, changed = self.engine.sum(dim=0).tolist()
        if not tokens:
            return {}
        found = {
            "routing/engine_missing_share": 1 - known / tokens,
            "routing/engine_changed_share": changed / known if known else 0.0,
        }
        for layer, (_, of_layer, elsewhere) in enumerate(self.engine.tolist()):
            if is_moe[layer]:
                share = elsewhere / of_layer if of_layer else 0.0
                found[f"routing/engine_changed_share/layer_{layer}"] = share
        return found

    def _of_recorded(self, is_moe: list[bool]) -> dict[str, float]:
        rows = self.counts.tolist()
        # Nothing is compared if the update is the pass that records.
        total, found = sum(row[0] for row in rows), {}
        if total:
            found["routing/changed_share"] = sum(row[1] for row in rows) / total
        for layer, (compared, changed, *load) in enumerate(rows):
            if not is_moe[layer]:
                continue
            mean = sum(load) / len(load)
            figures = {"changed_share": changed / compared} if compared else {}
            figures |= {
                "max_load": max(load) / mean if mean else 0.0,
                "min_load": min(load) / mean if mean else 0.0,
            }
            found |= {f"routing/{name}/layer_{layer}": value for name, value in figures.items()}
        return found

    def all_reduce(self) -> None:
        """Add up over all ranks. Collective."""
        parts = (self.counts, self.engine, self.mismatch)
        joined = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(joined)
        sums = joined.split([part.numel() for part in parts])
        for part, of_all in zip(parts, sums, strict=True):
            part.copy_(of_all.view_as(part))


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """``[tokens]`` bool, whether experts ``[tokens, k]`` differ as sets."""
    return (one.sort(dim=1).values != other.sort(dim=1).values).any(dim=1)
