"""The value model on one Megatron rank: the expected reward at each token.

The transformer of the policy's folder with one number per position instead of the logits. It
has the policy's layout, lives in the same processes, and has its own optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlmath.actor.context import all_gather_context
from rlmath.actor.loss_fields import LossFields
from rlmath.actor.model_base import RankModel
from rlmath.actor.packing import PackedMicroBatch
from rlmath.actor.plan import StepPlan
from rlmath.actor.schedule import OnOutput
from rlmath.actor.step_probe import StepFindings
from rlmath.algorithms.value import value_losses
from rlmath.batching.shards import Shard, Share
from rlmath.types import TrainingBatch
from rlmath.weights.tensor_prints import TensorPrints

# Positions whose hidden states are in float32 at once.
_HEAD_ROWS = 1024


class ValueHead(nn.Module):
    """Maps hidden states to values, in place of the output layer.

    Zero at first, so that the first advantages are the rewards themselves, on every layout. All
    tensor ranks hold all of it and see the whole sequence, so its gradient is the same on all.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__()
        self._split = config.sequence_parallel
        self.weight = nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """``[s, 1, h]`` (under sequence parallelism this rank's part of ``s``) to ``[s, 1, 1]``.

        The other arguments and the second result are those of Megatron's output layer.
        """
        if self._split:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # All ranks compute the same from here, so the gradient is split, not summed.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        if hidden.dtype == torch.float32:
            return F.linear(hidden, self.weight, self.bias), None
        return _InFloat32.apply(hidden, self.weight, self.bias), None


class _InFloat32(torch.autograd.Function):
    """The head of a model in 16 bits: values in float32, of which GAE takes small differences.

    In bfloat16 values between 4 and 8 lie 0.03 apart. A few rows at a time, so that no second copy
    of the hidden states is made or kept.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        parts = (rows.float() for rows in hidden.split(_HEAD_ROWS))
        return torch.cat([F.linear(rows, weight.float(), bias.float()) for rows in parts])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (gradient,) = gradients
        hidden, weight = ctx.saved_tensors
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight).float()
        pieces = zip(
            gradient.split(_HEAD_ROWS),
            hidden.split(_HEAD_ROWS),
            to_hidden.split(_HEAD_ROWS),
            strict=True,
        )
        for one, rows, result in pieces:
            result.copy_(one * weight.float())
            to_weight += one.flatten(0, -2).t() @ rows.flatten(0, -2).float()
        to_bias = gradient.sum().reshape(1)
        return to_hidden, to_weight.to(weight.dtype), to_bias.to(weight.dtype)


class ValueModel(RankModel):
    """This process's part of the value model. ``step_findings``: findings of the last update."""

    _prints: TensorPrints | None = None
    step_findings: StepFindings = ()

    def build_stage(self) -> list[Any]:
        chunks = super().build_stage()
        for chunk in chunks:
            if chunk.post_process:
                chunk.output_layer = ValueHead(chunk.config, self.platform.torch_device)
            # Only the first stage reads tied embeddings now.
            chunk.share_embeddings_and_output_weights = False
        return chunks

    def own_head(self) -> dict[str, Tensor]:
        heads = [chunk.output_layer for chunk in self.chunks if chunk.post_process]
        return {
            f"value_head.{name}": one for head in heads for name, one in head.named_parameters()
        }

    def weight_prints(self) -> dict[str, int]:
        """Fingerprint of each tensor of the model. Collective."""
        self.load_parameters()
        self._prints = self._prints or self.tensor_prints()
        self._prints.add_weights()
        return self._prints.take()

    @torch.no_grad()
    def shard_values(self, shard: Shard) -> Tensor | None:
        """Values before each response token of the shard. Returns ``[R]`` float32 in units of the
        reward and in the shard's order, on all ranks of the last stage; else ``None``."""

        def keep(one: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor]:
            values = _at_rows(one, output)
            return values.sum(), values

        kept = self.forward(self.micro_batches(shard.forward_share()), keep)
        return torch.cat(kept).cpu() if self.is_last_stage else None

    def update(self, batch: TrainingBatch, plan: StepPlan, seed: int) -> list[dict[str, float]]:
        """Optimizer steps from a batch that all ranks have; ``seed``: of the split into
        minibatches."""
        return self.update_shard(self.shard_of(batch, plan, seed), plan)

    def update_shard(self, shard: Shard, plan: StepPlan) -> list[dict[str, float]]:
        """Optimizer steps towards the returns of the ranks' shards, one per minibatch. Returns
        metrics of each minibatch, equal on all ranks. ``shard``: with ``values`` and ``returns``;
        only ranks of the last stage read them. ``plan``: plan of the step."""
        metrics, findings = [], []
        for one in shard.shares():
            metrics.append(self._update_minibatch(one, plan))
            findings.append(self.step_finding)
        self.step_findings = self.worst_findings(findings)
        return metrics

    def _update_minibatch(self, share: Share, plan: StepPlan) -> dict[str, float]:
        batch, micro_batches = share.batch, self.micro_batches(share)
        fields = LossFields(
            micro_batches,
            self.platform.torch_device,
            {
                "old": batch.values,
                "returns": batch.returns,
                "mask": batch.loss_mask,
                "weights": share.weights,
            },
        )
        kept = self.forward_backward(micro_batches, value_loss(fields, plan.value_clip))
        loss, tokens, moved, clipped, _ = self._totals(kept)
        # Before its first update the head is 0, and nothing below it has a gradient.
        judged = batch.values is not None and bool(batch.values.any())
        self.check_given([one[-1] for one in kept] if judged else [], len(micro_batches))
        grad_norm = self.gradient_norm()
        # Non-finite gradients would ruin the weights; without a gradient a step is only momentum.
        discard = not math.isfinite(loss + grad_norm) or grad_norm == 0.0
        lr = self.finish_minibatch(discard)
        return {
            "loss": loss,
            "clip_fraction": clipped / max(tokens, 1.0),
            "mean_abs_move": moved / max(tokens, 1.0),
            "grad_norm": grad_norm,
            "lr": lr,
            "discarded": float(discard),
        }

    def _totals(self, kept: Sequence[Tensor]) -> list[float]:
        """Sums over micro-batches and ranks, from one all-gather: the same order everywhere."""
        own = torch.zeros(5, dtype=torch.float64)
        if self.reports and kept:
            own = torch.stack(list(kept)).cpu().sum(0)
        total: list[float] = self.all_gather(own).sum(0).tolist()
        return total


def value_loss(fields: LossFields, clip: float | None) -> OnOutput[Tensor]:
    """The value model's loss of a micro-batch, for ``run_schedule``. Stays on the device.
    ``fields``: ``old`` values, ``returns``, ``mask`` and ``weights``. ``clip``: see
    ``value_losses``.

    Returns:
        A function that keeps ``[5]`` float64: loss, tokens, sum of moves, clipped tokens, and the
        size of the gradient by the values, which the backward pass fills in.
    """

    def objective(one: PackedMicroBatch, output: Tensor) -> tuple[Tensor, Tensor]:
        given = fields.of(one)
        old, mask = given["old"], given["mask"]
        values = _at_rows(one, output)
        losses = value_losses(values, old, given["returns"], mask, clip)
        loss = (given["weights"] * losses).sum()
        # Masked with where: selecting tokens would make the host count them.
        moved = torch.where(mask, (values.detach() - old).abs(), 0.0)
        clipped = (moved > clip).sum() if clip else torch.zeros_like(loss)
        sums = [loss.detach(), mask.sum(), moved.sum(), clipped, torch.zeros_like(loss)]
        kept = torch.stack([x.detach().double() for x in sums])

        def receive(gradient: Tensor) -> None:
            kept[-1] = gradient.abs().sum()

        if values.requires_grad:
            values.register_hook(receive)
        return loss, kept

    return objective


def _at_rows(one: PackedMicroBatch, output: Tensor) -> Tensor:
    """``[r]`` float32 of the micro-batch's positions from which response tokens are predicted."""
    return all_gather_context(output[one.rows, 0].float(), one.context)
