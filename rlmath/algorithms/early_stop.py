"""Whether to discard a whole optimizer minibatch: no step, no momentum, no weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["keep", "early_stop", "no_signal"]


@dataclass(frozen=True)
class Decision:
    # keep; early_stop: discard, because the policy has moved too far or a number is not finite;
    # no_signal: discard, because the gradient is exactly 0 and a step would only apply old momentum
    # and weight decay.
    kind: Kind
    reason: str = ""  # Why it is discarded; empty if kept.

    @property
    def discard(self) -> bool:
        return self.kind != "keep"


def decide(sums: Mapping[str, float], threshold: float | None) -> Decision:
    """Decide from a minibatch's totals over all ranks and micro-batches.

    Every rank gets the same totals from one all-reduce, so all ranks decide alike.

    Args:
        sums: Totals of ``policy_objective``'s ``metric_sums``. Other numbers that must be finite,
            such as the gradient norm, may be added under their own names.
        threshold: Maximum mean importance ratio over the minibatch's response tokens; ``None``:
            only non-finite numbers stop it.

    Returns:
        The decision. A mean equal to the threshold is kept.
    """
    broken = [f"{name} = {value}" for name, value in sums.items() if not math.isfinite(value)]
    nonfinite, tokens = sums["count/nonfinite"], sums["count/token"]
    if nonfinite:
        broken.insert(0, f"{nonfinite:.0f} of {tokens:.0f} tokens are not finite")
    if broken:
        return Decision("early_stop", "not finite: " + "; ".join(broken))
    if not tokens:
        return Decision("no_signal", "no response token takes part in the loss")
    ratio = sums["token/importance_ratio"] / tokens
    if threshold is not None and ratio > threshold:
        return Decision(
            "early_stop",
            f"mean importance ratio {ratio:.4g} over {tokens:.0f} tokens is above "
            f"early_stop_ratio = {threshold:g}",
        )
    if not sums["weighted/signal"]:
        return Decision("no_signal", f"all advantages of {tokens:.0f} tokens are 0")
    return Decision("keep")
