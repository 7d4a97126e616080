"""Another choice's update of a batch, against the run's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlmath.actor.observer import ObservedUpdate, Products
from rlmath.batching.shards import response_rows
from rlmath.commands.replay.redo import Both, Redone
from rlmath.data import load_tokenizer

# Metrics that are always shown, and those that are where they differ.
_MAIN = (
    *("train/loss", "train/policy_loss", "train/kl_loss", "train/entropy_loss"),
    *("train/grad_norm", "train/clip_fraction", "train/discarded_minibatches", "correction/"),
)
_SHOWN = ("train/", "value/")
# Around a token, of the decoded response.
_BEFORE, _AFTER = 6, 3


def alternative(redone: Redone, both: Both, model_path: str, tokens: int) -> dict[str, Any]:
    """Compare the two updates. ``tokens``: number of tokens to name on either side.

    Returns:
        JSON values. ``minibatches``: metrics of each, of the run's ``own`` update and the ``other``
        one. ``gradients``: of each minibatch that both looked at the norms before clipping and the
        cosine (``None``: one is 0); only the first is taken at the same weights; empty: their
        minibatches are of other sequences. ``weights_change``: the same of the whole step.
        ``metrics``: by name, loss terms, shares of clipped, masked and rejected tokens, and what
        else differs. ``equal_pulls``: share of the tokens of the loss that both pull at alike.
        ``gain``, ``lose``: tokens that the other update makes likelier or less likely than the
        run's did, most first, with their ``sample`` (``PROBLEM/INDEX``), ``position`` in the
        response, from 0, and pulls: above 0, the update makes the token likelier.
    """
    own = redone.digests.numbers["gradient"]
    looked_at = min(len(own), len(both.minibatches)) if both.same_split else 0
    found = both.other[0]
    pulls, other = (_pulls(both, side) for side in (both.own, both.other))
    mask = _batch(both).loss_mask
    equal = (pulls == other)[mask].double().mean() if bool(mask.any()) else torch.tensor(1.0)
    gain, lose = _most(both, pulls, other, model_path, tokens)
    return {
        "minibatches": {"own": list(own), "other": list(both.minibatches)},
        "gradients": [_norms(one) for one in found.gradients[:looked_at]],
        "weights_change": None if found.change is None else _norms(found.change),
        "metrics": _metrics(redone.metrics, both.metrics),
        "equal_pulls": float(equal),
        "gain": gain,
        "lose": lose,
    }


def _norms(found: Products) -> dict[str, float | None]:
    return {"own_norm": found.earlier**0.5, "other_norm": found.own**0.5, "cosine": found.cosine}


def _batch(both: Both) -> Any:
    return both.kept.batch.sequences


def _metrics(
    own: Mapping[str, float], other: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    names = [name for name in own if name in other] + [name for name in other if name not in own]
    names += [name for name in own if name not in other]
    return {
        name: {"own": own.get(name), "other": other.get(name)}
        for name in dict.fromkeys(names)
        if name.startswith(_MAIN) or (name.startswith(_SHOWN) and own.get(name) != other.get(name))
    }


def _pulls(both: Both, observed: Sequence[ObservedUpdate]) -> Tensor:
    """``[R]`` float32 in the step's order; 0 where a minibatch was not looked at."""
    lengths = _batch(both).response_lengths
    found = torch.zeros(int(lengths.sum()))
    for rank in observed:
        for one in rank.pulls:
            found[response_rows(one.places, lengths)] = one.values
    return found


def _most(
    both: Both, own: Tensor, other: Tensor, model_path: str, count: int
) -> list[list[dict[str, Any]]]:
    change = other - own
    top = [change.topk(min(count, change.numel())), (-change).topk(min(count, change.numel()))]
    rows = [
        [i for i, v in zip(t.indices.tolist(), t.values.tolist(), strict=True) if v > 0]
        for t in top
    ]
    tokenizer = load_tokenizer(model_path) if any(rows) else None
    return [[_token(both, row, own, other, tokenizer) for row in one] for one in rows]


def _token(both: Both, row: int, own: Tensor, other: Tensor, tokenizer: Any) -> dict[str, Any]:
    batch = _batch(both)
    ends = torch.cumsum(batch.response_lengths, 0)
    place = int(torch.searchsorted(ends, row, right=True))
    position = row - int(ends[place] - batch.response_lengths[place])
    last = int(torch.cumsum(batch.sequence_lengths, 0)[place])
    response = batch.tokens[last - int(batch.response_lengths[place]) : last].tolist()
    around = {
        "before": response[max(0, position - _BEFORE) : position],
        "text": response[position : position + 1],
        "after": response[position + 1 : position + 1 + _AFTER],
    }
    return {
        "sample": both.kept.batch.keys[place],
        "position": position,
        "own": float(own[row]),
        "other": float(other[row]),
        **{k: tokenizer.decode(ids, skip_special_tokens=False) for k, ids in around.items()},
    }


def lines(found: Mapping[str, Any], step: int) -> Iterator[str]:
    yield f"step {step}, the run's update and the other one, on the same batch and weights"
    for number, one in enumerate(found["gradients"], start=1):
        later = "" if number == 1 else " (after each one's own earlier minibatches)"
        yield f"  gradient of minibatch {number}: {_format_figures(one)}{later}"
    if not found["gradients"]:
        counts = " and ".join(str(len(one)) for one in found["minibatches"].values())
        yield f"  {counts} minibatches: their gradients are of other sequences"
    if found["weights_change"] is not None:
        yield f"  change of the weights: {_format_figures(found['weights_change'])}"
    for name, values in found["metrics"].items():
        own, other = ("none" if one is None else f"{one:.6g}" for one in values.values())
        yield f"  {name:<40} {own:>12} {other:>12}"
    yield f"  tokens of the loss that both pull at alike: {found['equal_pulls']:.2%}"
    for title in ("gain", "lose"):
        if found[title]:
            yield f"  tokens that {title} most (pull of the run's update -> of the other)"
        for one in found[title]:
            yield (
                f"    {one['own']:+.3e} -> {one['other']:+.3e}  {step}/{one['sample']} token "
                f"{one['position']}: {one['before']!r} >>{one['text']!r}<< {one['after']!r}"
            )


def _format_figures(one: Mapping[str, float | None]) -> str:
    cosine = one["cosine"]
    said = "none (one is 0)" if cosine is None else f"{cosine:.6f}"
    return f"norm {one['own_norm']:.6g} and {one['other_norm']:.6g}, cosine {said}"
