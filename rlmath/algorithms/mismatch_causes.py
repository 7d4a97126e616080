"""Patterns in the difference between two programs' log-probs, as hints at the cause."""

from __future__ import annotations

from rlmath.utils.lazy_torch import Tensor, torch

# Share of the difference that a cause must explain to be named.
EXPLAINED = 0.8
_LEAST_TOKENS = 16


def likely_cause(
    actor: Tensor, engine: Tensor, entropy: Tensor, response_lengths: Tensor, noise: float
) -> str:
    """A sentence with the evidence for the likely cause; empty if none fits.

    Args:
        actor: ``[R]`` log-probs, sequences concatenated.
        engine: ``[R]``, for the same tokens.
        entropy: ``[R]``, entropy of the actor's distributions, in nats.
        response_lengths: ``[N]`` int64.
        noise: Largest difference that rounding alone explains, in nats.
    """
    ours, theirs = actor.double(), engine.double()
    usable = ours.isfinite() & theirs.isfinite()
    if int(usable.sum()) < _LEAST_TOKENS or not bool(usable.all()):
        return ""
    off = theirs - ours
    size = float(off.abs().mean())
    if not size:
        return ""
    return (
        _find_shift(ours, theirs, response_lengths, size)
        or _find_rounding(engine, actor)
        or _find_truncation(off, noise, size)
        or _another_prompt(off.abs(), response_lengths)
        or _temperature(ours, theirs, entropy, size)
    )


def _find_shift(ours: Tensor, theirs: Tensor, lengths: Tensor, size: float) -> str:
    """Each log-prob belongs to the neighboring token."""
    ends = torch.cumsum(lengths, 0)
    inner = torch.ones(len(ours), dtype=torch.bool)
    inner[ends[lengths > 0] - 1] = False
    inner = inner[:-1]  # Positions t and t + 1 are in the same sequence.
    for mine, other, word in (
        (ours[1:], theirs[:-1], "after"),
        (ours[:-1], theirs[1:], "before"),
    ):
        if not inner.any():
            return ""
        left = float((mine - other)[inner].abs().mean())
        if left < (1 - EXPLAINED) * size:
            return (
                f"A shift by one token: the rollout log-prob of a token is the actor's of the one "
                f"{word} it (mean difference {left:.3g} instead of {size:.3g} nats)"
            )
    return ""


def _find_rounding(engine: Tensor, actor: Tensor) -> str:
    """Every log-prob of one side is a bfloat16 number."""
    exact = [bool((one.float() == one.bfloat16().float()).all()) for one in (engine, actor)]
    if exact == [True, False]:
        return (
            "Rounding to bfloat16: each rollout log-prob is a bfloat16 number, and the "
            "actor's are not: the engine's logits or log-probs are not computed in float32"
        )
    return ""


def _find_truncation(off: Tensor, noise: float, size: float) -> str:
    """The engine renormalizes over fewer tokens, so no log-prob of a sampled token decreases."""
    lowest = float(off.min())
    if lowest >= -2 * noise and float(off.mean()) > max(4 * noise, EXPLAINED * size):
        return (
            "Truncated sampling (top-p, top-k or min-p): no log-prob of the engine is lower than "
            f"the actor's (lowest difference {lowest:.3g}, mean {float(off.mean()):.3g} nats)"
        )
    return ""


def _another_prompt(off: Tensor, lengths: Tensor) -> str:
    """Sequences differ most at their start, because the influence of the prompt fades."""
    starts = torch.cumsum(lengths, 0) - lengths
    first, last = [], []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        quarter = length // 4
        if quarter:
            first.append(off[start : start + quarter])
            last.append(off[start + length - quarter : start + length])
    if not first:
        return ""
    begin, end = (float(torch.cat(one).mean()) for one in (first, last))
    if begin > 5 * end:
        return (
            f"Another prompt: responses differ by {begin:.3g} nats in their first quarter and by "
            f"{end:.3g} in their last"
        )
    return ""


def _temperature(ours: Tensor, theirs: Tensor, entropy: Tensor, size: float) -> str:
    """Differences are proportional to ``log p + H``, the derivative of a log-prob with respect to
    the inverse temperature."""
    slope = ours + entropy.double()
    inverse = 1 + float((slope @ (theirs - ours)) / (slope @ slope).clamp(min=1e-12))
    left = float((theirs - ours - (inverse - 1) * slope).abs().mean())
    if inverse > 0.05 and abs(inverse - 1) > 0.01 and left < 0.5 * size:
        return (
            f"Another temperature: {1 / inverse:.2f} times rollout.temperature in the engine "
            f"explains all but {left:.3g} of a mean difference of {size:.3g} nats"
        )
    return ""
