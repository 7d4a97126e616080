"""The arithmetic of advantages that differ from token to token, with the numbers of the update:
a value model's, and a KL in the reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlmath.algorithms.advantages import gae
from rlmath.algorithms.distillation import distill
from rlmath.algorithms.kl_control import kl_in_reward
from rlmath.commands.why.batch import Step
from rlmath.config.algorithm import KlPlace
from rlmath.monitor.token_files import read_tokens
from rlmath.monitor.writer import STEP

# Tokens that are shown on either end of a response.
_SHOWN = 4
# Of what is computed again against what the update used, relative to the largest of them.
_TOLERANCE = 1e-5


def traced(step: Step) -> Mapping[str, Tensor] | None:
    """What the step kept of each token of the sample; ``None``: it is not among those that
    ``runner.token_samples`` keeps."""
    if step.update.step is None:
        return None
    for sample, values in read_tokens(step.files.folder, step.update.step):
        if sample.key == step.address.key:
            return as_tensors(values)
    return None


def as_tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of arrays on memory that nobody writes to."""
    return {name: torch.from_numpy(value.copy()) for name, value in values.items()}


def token_lines(
    step: Step, values: Mapping[str, Tensor], advantage: float | None, whitened: bool
) -> Iterator[str]:
    """How the advantage of each token came about, and whether that is what the update used.

    Args:
        values: See :func:`traced`.
        advantage: Of the sequence, from rewards alone; ``None``: it comes from values.
        whitened: The step's advantages were.
    """
    config = step.update.config
    count, mask = len(values["token_ids"]), values["loss_mask"]
    kl_coef = _kl_coef(step) if config.algorithm.kl_in is KlPlace.reward else None
    costs = torch.zeros(count)
    if kl_coef is not None:
        kl = values["old_log_probs"] - values["ref_log_probs"]
        costs = torch.where(mask, kl, 0.0)
        yield (
            f"KL in the reward (k1: actor minus reference, before the update): "
            f"{float(costs.double().sum()):+.6g} nats over its tokens, times a coefficient of "
            f"{kl_coef:.6g}"
        )
    lengths = torch.tensor([count])
    if config.algorithm.distill_coef > 0:
        taught = _taught(step, values, lengths)
        yield (
            "the teacher adds algorithm.distill_coef="
            f"{config.algorithm.distill_coef:g} × (teacher less actor, within "
            f"{config.algorithm.distill_clip:g} nats), whatever is whitened: "
            f"{float(taught.double().sum()):+.6g} over its tokens"
        )
        values = {**values, "advantages": values["advantages"] - taught}
    if advantage is None:
        yield from _gae_lines(step, values, costs, kl_coef or 0.0, lengths, whitened)
        return
    before = torch.full((count,), advantage, dtype=torch.float64).float()
    if kl_coef is not None:
        before = before + (kl_coef * kl_in_reward(costs, mask, lengths, 1.0))
        yield "a token's advantage is the sequence's, less the KL cost of it and those after it"
        yield from _table(values, {"KL": costs, "advantage": before})
    yield from _compared(before, values["advantages"], mask, whitened)


def _taught(step: Step, values: Mapping[str, Tensor], lengths: Tensor) -> Tensor:
    algorithm = step.update.config.algorithm
    return distill(
        values["old_log_probs"],
        values["teacher_log_probs"],
        values["loss_mask"],
        lengths,
        coef=algorithm.distill_coef,
        clip=algorithm.distill_clip,
    ).advantages


def _gae_lines(
    step: Step,
    values: Mapping[str, Tensor],
    costs: Tensor,
    kl_coef: float,
    lengths: Tensor,
    whitened: bool,
) -> Iterator[str]:
    settings = step.update.config.value
    reward = step.row.get("reward")
    rewards = -kl_coef * costs
    rewards[-1] += 0.0 if reward is None else float(reward)
    advantages, returns = gae(
        rewards, values["values"], lengths, gamma=settings.gamma, lam=settings.lam
    )
    after = torch.cat([values["values"][1:], torch.zeros(1)])
    deltas = rewards + settings.gamma * after - values["values"]
    yield (
        f"delta = reward + {settings.gamma:g} × next value - value; advantage = delta + "
        f"{settings.gamma:g} × {settings.lam:g} × next advantage; the sample's reward is at its "
        "last token"
    )
    columns = {"reward": rewards, "value": values["values"], "delta": deltas}
    yield from _table(values, columns | {"advantage": advantages, "return": returns})
    yield from _compared(advantages, values["advantages"], values["loss_mask"], whitened)


def _table(values: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Iterator[str]:
    count = len(values["token_ids"])
    yield "token  " + "".join(f"{name:>12}" for name in columns)
    for place in _ends(count):
        if place is None:
            yield f"  ... {count - 2 * _SHOWN} more"
        else:
            numbers = "".join(f"{float(one[place]):>12.5g}" for one in columns.values())
            yield f"{place:>5}  {numbers}"


def _ends(count: int) -> Sequence[int | None]:
    if count <= 2 * _SHOWN + 1:
        return list(range(count))
    return [*range(_SHOWN), None, *range(count - _SHOWN, count)]


def _compared(found: Tensor, used: Tensor, mask: Tensor, whitened: bool) -> Iterator[str]:
    """Whether the advantages are those of the update: equal, or whitened over its step, which is
    one shift and one scale for all of its tokens."""
    own, theirs = found[mask].double(), used[mask].double()
    if not len(own):
        return
    size = max(float(own.abs().max()), float(theirs.abs().max()), 1e-30)
    if float((own - theirs).abs().max()) <= _TOLERANCE * size:
        equal = "bit by bit" if torch.equal(found[mask], used[mask]) else "up to rounding"
        yield f"equal to what the update used, {equal}, at each of its {len(own)} tokens"
        return
    if not whitened:
        off = float((own - theirs).abs().max())
        yield f"NOT what the update used: they differ by up to {off:.3g}"
        return
    spread = own - own.mean()
    if float(spread.abs().max()) <= _TOLERANCE * size:
        off = float((theirs - theirs.mean()).abs().max())
        if off > 10 * _TOLERANCE * size:
            yield f"NOT what the update used: that differs from token to token, by up to {off:.3g}"
            return
        yield (
            f"whitened over the step: {float(own.mean()):.6g} became {float(theirs.mean()):.6g} at "
            f"each of its {len(own)} tokens"
        )
        return
    scale = float((spread * theirs).sum() / spread.square().sum())
    shift = float(theirs.mean()) - scale * float(own.mean())
    off = float((scale * own + shift - theirs).abs().max())
    if scale > 0 and off <= 10 * _TOLERANCE * size * max(scale, 1.0):
        yield (
            f"whitened over the step: {scale:.6g} × advantage {shift:+.6g}, at each of its "
            f"{len(own)} tokens up to {off:.1g}"
        )
    else:
        yield f"NOT what the update used: they differ by up to {off:.3g}"


def _kl_coef(step: Step) -> float:
    """Of the step's update: an adaptive one is in its metrics."""
    for line in step.files.metrics:
        if line[STEP] == step.update.step and line.get("train/kl_coef") is not None:
            return float(line["train/kl_coef"])
    return step.update.config.algorithm.kl_coef
