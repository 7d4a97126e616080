"""Inputs of an update for each token of a few sequences, and its pull on them.

The pull of a token is minus the derivative of the minibatch's loss with respect to the token's
log-prob: above 0, the update makes the token likelier. It is recomputed for these sequences alone,
on the CPU: the loss is a sum over sequences that includes their weights, so nothing else is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.losses import LossInputs
from rlmath.algorithms.objective import policy_objective
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.batching.shards import Share

# Fields of a TrainingBatch by response token.
_OF_BATCH = (
    *("engine_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs"),
    *("values", "returns", "advantages", "policy_factors", "loss_mask"),
)


@dataclass(frozen=True)
class TokenTrace:
    place: int  # Index in the step.
    minibatch: int  # Index from 0.
    discarded: bool  # Whether the minibatch changed no weight.
    weight: float  # Weight of each of its tokens in the minibatch's loss.
    # [n] each, by name: token_ids; the fields of TrainingBatch that exist; log_probs and entropy of
    # the policy in the update; pulls, with the KL term and without the entropy's; clipped: the
    # policy term's derivative with respect to this token's log-prob is 0, though its advantage,
    # weight and factor are not.
    values: Mapping[str, Tensor]


def traces_of(
    share: Share,
    found: TokenValues,
    settings: ObjectiveSettings,
    wanted: Collection[int],
    minibatch: int,
    discarded: bool,
) -> Iterator[TokenTrace]:
    """Traces of the wanted sequences of a share.

    Args:
        found: Values of the share's tokens in the update.
        wanted: Indices in the step.
        minibatch: Index from 0.
        discarded: Whether it changed no weight.
    """
    batch = share.batch
    here = [index for index, place in enumerate(share.places.tolist()) if place in wanted]
    if not here:
        return
    log_probs, entropy = (torch.empty(batch.loss_mask.numel()) for _ in range(2))
    log_probs[found.response_rows.cpu()] = found.log_probs.float().cpu()
    entropy[found.response_rows.cpu()] = found.entropy.float().cpu()
    ends = torch.cumsum(batch.response_lengths, 0).tolist()
    token_ends = torch.cumsum(batch.sequence_lengths, 0).tolist()
    for index in here:
        count = int(batch.response_lengths[index])
        rows = slice(ends[index] - count, ends[index])
        values = {name: getattr(batch, name) for name in _OF_BATCH}
        own = {name: one[rows].clone() for name, one in values.items() if one is not None}
        own["token_ids"] = batch.tokens[token_ends[index] - count : token_ends[index]].clone()
        own |= {"log_probs": log_probs[rows].clone(), "entropy": entropy[rows].clone()}
        weights = share.weights[rows]
        own["pulls"], own["clipped"] = _pulls(own, weights, settings)
        weight = float(weights.max()) if count else 0.0
        yield TokenTrace(int(share.places[index]), minibatch, discarded, weight, own)


def _pulls(
    own: Mapping[str, Tensor], weights: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """``[n]`` pulls, and whether the policy term ignores each token."""
    log_probs = own["log_probs"].detach().clone().requires_grad_()
    # Without a pass before the update the policy is its own old policy.
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=own.get("old_log_probs", own["log_probs"]),
        engine_log_probs=own["engine_log_probs"],
        advantages=own["advantages"],
        mask=own["loss_mask"],
        weights=weights,
        sequence_ids=torch.zeros(len(log_probs), dtype=torch.int64),
        ref_log_probs=own.get("ref_log_probs"),
        entropy=own["entropy"],
        policy_factors=own.get("policy_factors"),
        num_sequences=1,
    )
    pulls = _slopes(inputs, settings)
    policy = _slopes(inputs, dataclasses.replace(settings, kl_coef=0.0))
    moving = own["loss_mask"] & (own["advantages"] != 0) & (weights != 0)
    if "policy_factors" in own:
        moving &= own["policy_factors"] != 0
    return pulls, moving & (policy == 0)


def _slopes(inputs: LossInputs, settings: ObjectiveSettings) -> Tensor:
    with torch.enable_grad():
        loss = policy_objective(inputs, settings).loss
        (found,) = torch.autograd.grad(loss, inputs.log_probs)
    return -found.float()
