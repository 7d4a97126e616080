"""What another choice would have done to a batch, against what the run's own update did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class TokenChange:
    """A token that the other update pulls at otherwise.

    Attributes:
        sample: ``PROBLEM/INDEX``.
        position: In the response, from 0.
        own: Pull of the run's update: above 0, it makes the token likelier.
        other: Of the other one.
    """

    sample: str
    position: int
    own: float
    other: float
    before: str
    text: str
    after: str


@dataclass(frozen=True)
class Gradients:
    """Norms of a minibatch before clipping, and the cosine; ``None``: one of them is 0."""

    own_norm: float
    other_norm: float
    cosine: float | None

    @classmethod
    def of(cls, found: Products) -> Gradients:
        return cls(found.earlier**0.5, found.own**0.5, found.cosine)


@dataclass(frozen=True)
class Alternative:
    """The two updates.

    Attributes:
        minibatches: Metrics of each minibatch of the run's update.
        other_minibatches: Of the other's.
        metrics: Loss terms, shares of clipped, masked and rejected tokens, and what else differs,
            by name; of the run's update and of the other.
        gradients: Of each minibatch that both looked at; only the first is taken at the same
            weights. Empty: their minibatches are of other sequences.
        change: Of the weights by the whole step.
        gain: Tokens that the other update makes likelier than the run's did, most first.
        lose: Tokens that it makes less likely.
        equal_pulls: Share of the tokens of the loss that both pull at alike.
    """

    minibatches: Sequence[Mapping[str, float]]
    other_minibatches: Sequence[Mapping[str, float]]
    metrics: Mapping[str, tuple[float | None, float | None]]
    gradients: tuple[Gradients, ...]
    change: Gradients | None
    gain: tuple[TokenChange, ...]
    lose: tuple[TokenChange, ...]
    equal_pulls: float


def alternative(redone: Redone, both: Both, model_path: str, tokens: int) -> Alternative:
    """Compare the two.

    Args:
        tokens: How many of those that gain most to name, and of those that lose most.
    """
    own = redone.digests.numbers["gradient"]
    looked_at = min(len(own), len(both.minibatches)) if both.same_split else 0
    found = both.other[0]
    pulls, other = (_pulls(both, side) for side in (both.own, both.other))
    gain, lose = _most(both, pulls, other, model_path, tokens)
    mask = _batch(both).loss_mask
    equal = (pulls == other)[mask].double().mean() if bool(mask.any()) else torch.tensor(1.0)
    return Alternative(
        own,
        both.minibatches,
        _metrics(redone.metrics, both.metrics),
        tuple(map(Gradients.of, found.gradients[:looked_at])),
        None if found.change is None else Gradients.of(found.change),
        gain,
        lose,
        float(equal),
    )


def _batch(both: Both) -> Any:
    return both.kept.batch.sequences


def _metrics(
    own: Mapping[str, float], other: Mapping[str, float]
) -> dict[str, tuple[float | None, float | None]]:
    names = [name for name in own if name in other] + [name for name in other if name not in own]
    names += [name for name in own if name not in other]
    return {
        name: (own.get(name), other.get(name))
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
) -> tuple[tuple[TokenChange, ...], tuple[TokenChange, ...]]:
    change = other - own
    top = [change.topk(min(count, change.numel())), (-change).topk(min(count, change.numel()))]
    rows = [
        [i for i, v in zip(t.indices.tolist(), t.values.tolist(), strict=True) if v > 0]
        for t in top
    ]
    tokenizer = load_tokenizer(model_path) if any(rows) else None
    gain, lose = (tuple(_token(both, row, own, other, tokenizer) for row in one) for one in rows)
    return gain, lose


def _token(both: Both, row: int, own: Tensor, other: Tensor, tokenizer: Any) -> TokenChange:
    batch = _batch(both)
    ends = torch.cumsum(batch.response_lengths, 0)
    place = int(torch.searchsorted(ends, row, right=True))
    position = row - int(ends[place] - batch.response_lengths[place])
    last = int(torch.cumsum(batch.sequence_lengths, 0)[place])
    response = batch.tokens[last - int(batch.response_lengths[place]) : last].tolist()
    around = (
        response[max(0, position - _BEFORE) : position],
        response[position : position + 1],
        response[position + 1 : position + 1 + _AFTER],
    )
    texts = [tokenizer.decode(piece, skip_special_tokens=False) for piece in around]
    key = both.kept.batch.keys[place]
    return TokenChange(key, position, float(own[row]), float(other[row]), *texts)


def lines(found: Alternative, step: int) -> Iterator[str]:
    yield f"step {step}, the run's update and the other one, on the same batch and weights"
    if found.gradients:
        for number, one in enumerate(found.gradients, start=1):
            later = "" if number == 1 else " (after each one's own earlier minibatches)"
            yield (
                f"  gradient of minibatch {number}: norm {one.own_norm:.6g} and "
                f"{one.other_norm:.6g}, cosine {_cosine(one.cosine)}{later}"
            )
    else:
        yield (
            f"  {len(found.minibatches)} and {len(found.other_minibatches)} minibatches: their "
            "gradients are of other sequences"
        )
    if found.change is not None:
        yield (
            f"  change of the weights: norm {found.change.own_norm:.6g} and "
            f"{found.change.other_norm:.6g}, cosine {_cosine(found.change.cosine)}"
        )
    for name, (own, other) in found.metrics.items():
        yield f"  {name:<40} {_number(own):>12} {_number(other):>12}"
    yield f"  tokens of the loss that both pull at alike: {found.equal_pulls:.2%}"
    for title, tokens in (("gain", found.gain), ("lose", found.lose)):
        if tokens:
            yield f"  tokens that {title} most (pull of the run's update -> of the other)"
        for token in tokens:
            yield (
                f"    {token.own:+.3e} -> {token.other:+.3e}  {step}/{token.sample} token "
                f"{token.position}: {token.before!r} >>{token.text!r}<< {token.after!r}"
            )


def _cosine(value: float | None) -> str:
    return "none (one is 0)" if value is None else f"{value:.6f}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def as_json(found: Alternative) -> dict[str, Any]:
    return {
        "minibatches": {"own": list(found.minibatches), "other": list(found.other_minibatches)},
        "gradients": [dict(vars(one)) for one in found.gradients],
        "weights_change": None if found.change is None else dict(vars(found.change)),
        "metrics": {
            name: {"own": own, "other": other} for name, (own, other) in found.metrics.items()
        },
        "equal_pulls": found.equal_pulls,
        "gain": [dict(vars(one)) for one in found.gain],
        "lose": [dict(vars(one)) for one in found.lose],
    }
