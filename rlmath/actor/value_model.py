"""One Megatron rank of the value model: what reward each token's state is worth.

The transformer of the policy's folder with one number per position in the place of the logits. It
has the policy's layout, lives in the same processes, and has an optimizer of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rlmath.actor.context import together
from rlmath.actor.loss_fields import LossFields
from rlmath.actor.model import build_model
from rlmath.actor.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from rlmath.actor.packing import Pack, pack_share
from rlmath.actor.parallel import Layout
from rlmath.actor.schedule import OnOutput, run_schedule
from rlmath.actor.settings import ActorSettings, ValueUpdateSettings
from rlmath.algorithms.aggregation import token_weights
from rlmath.algorithms.value import value_losses
from rlmath.batching import minibatches
from rlmath.device import Platform
from rlmath.types import TrainingBatch


@dataclass(frozen=True)
class ShareOfValues:
    """Values before the response tokens of one data-parallel share.

    Attributes:
        response_rows: ``[r]`` int64, which of the batch's ``R`` response tokens they are.
        values: ``[r]`` float32, in units of the reward.
    """

    response_rows: Tensor
    values: Tensor


class ValueHead(nn.Module):
    """From hidden states to values; stands where the model has its output layer.

    Zero at first, so that the first advantages are the rewards themselves, on every layout. All
    tensor ranks hold it whole and see the whole sequence, so its gradient is the same on all.
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

            # Each rank goes on with the same whole, so its gradient is cut, not summed.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden, self.weight, self.bias), None


class ValueModel:
    """This process's part of the value model. All ranks call the same methods alike.

    Has what ``rlmath.checkpoint.actor_state`` saves of an actor: module, optimizer, scheduler,
    settings, spec and layout.

    Args:
        settings: Of the value model: its folder, its optimizer.
    """

    def __init__(self, settings: ActorSettings, layout: Layout, platform: Platform) -> None:
        from megatron.core import parallel_state

        from rlmath.model.rank_layout import ParallelRank
        from rlmath.model.spec import read_model_spec
        from rlmath.weights.megatron import load_from_hf

        assert settings.optimizer is not None, "a value model is there to be trained"
        self.settings, self.layout, self.platform = settings, layout, platform
        self.spec = read_model_spec(settings.model_path)
        parallel = ParallelRank.from_megatron()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.cp_rank = parallel_state.get_context_parallel_rank()
        last = parallel_state.is_pipeline_last_stage()
        self.reports = last and parallel.tp_rank == 0 and self.cp_rank == 0
        module: Any = build_model(
            self.spec,
            layout,
            platform,
            settings.model,
            settings.max_sequence_length,
        )
        load_from_hf([module], settings.model_path, self.spec, parallel)
        if parallel_state.is_pipeline_last_stage():
            module.output_layer = ValueHead(module.config, platform.torch_device)
        # Tied embeddings are read by the first stage only now.
        module.share_embeddings_and_output_weights = False
        self.module = module
        self.model = wrap_data_parallel(module, settings.optimizer.distributed)
        self.optimizer = build_optimizer(self.model, settings.optimizer, settings.model.dtype)
        self.scheduler = build_scheduler(self.optimizer, settings.optimizer)

    @torch.no_grad()
    def values(self, batch: TrainingBatch) -> ShareOfValues | None:
        """Values of the states in which the batch's response tokens were chosen.

        Returns:
            This data-parallel share's on the rank that reports, else ``None``.
        """
        self.model.eval()

        def keep(one: Pack, output: Tensor) -> tuple[Tensor, ShareOfValues]:
            values = _at_rows(one, output)
            return values.sum(), ShareOfValues(one.response_rows, values)

        kept = run_schedule(self.model, self._packs(batch), keep, backward=False)
        if not self.reports:
            return None
        return ShareOfValues(
            torch.cat([one.response_rows for one in kept]),
            torch.cat([one.values for one in kept]).cpu(),
        )

    def update(
        self, batch: TrainingBatch, settings: ValueUpdateSettings, seed: int
    ) -> list[dict[str, float]]:
        """Optimizer steps towards the batch's returns, one per minibatch.

        Args:
            batch: With ``values`` and ``returns``; the same on all ranks.
            settings: The loss.
            seed: Of the cut into minibatches.

        Returns:
            Metrics of each minibatch, equal on all ranks.
        """
        cut = minibatches(batch.group_ids.tolist(), settings.minibatches, seed)
        return [self._update_minibatch(batch.select(members), settings) for members in cut]

    def _update_minibatch(
        self, batch: TrainingBatch, settings: ValueUpdateSettings
    ) -> dict[str, float]:
        assert batch.values is not None and batch.returns is not None
        weights = token_weights(
            settings.aggregation,
            batch.loss_mask,
            batch.response_lengths,
            batch.group_ids,
            constant_length=settings.constant_length,
        )

        packs = self._packs(batch)
        fields = LossFields(
            packs,
            self.platform.torch_device,
            {
                "old": batch.values,
                "returns": batch.returns,
                "mask": batch.loss_mask,
                "weights": weights,
            },
        )
        self.model.train()
        self._clear_gradients()
        kept = run_schedule(self.model, packs, value_loss(fields, settings), backward=True)
        loss, tokens, moved, clipped = self._totals(kept)
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        # What is not finite would spoil the weights; without a gradient a step is only momentum.
        discard = not math.isfinite(loss + grad_norm) or grad_norm == 0.0
        if not discard:
            self.optimizer.step()
            self.scheduler.step(1)
        self._clear_gradients()
        return {
            "loss": loss,
            "clip_fraction": clipped / max(tokens, 1.0),
            "mean_abs_move": moved / max(tokens, 1.0),
            "grad_norm": grad_norm,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "discarded": float(discard),
        }

    def _clear_gradients(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _totals(self, kept: Sequence[Tensor]) -> list[float]:
        """Sums over micro-batches and ranks, from one all-gather: the same order everywhere."""
        own = torch.zeros(4, dtype=torch.float64)
        if self.reports and kept:
            own = torch.stack(list(kept)).cpu().sum(0)
        mine = own.to(self.platform.torch_device)
        flat = mine.new_empty(dist.get_world_size() * mine.numel())
        dist.all_gather_into_tensor(flat, mine)
        total: list[float] = flat.view(-1, mine.numel()).cpu().sum(0).tolist()
        return total

    def _packs(self, batch: TrainingBatch) -> list[Pack]:
        budget = self.settings.max_tokens_per_microbatch
        return pack_share(batch, self.layout, self.dp_rank, self.cp_rank, budget, self.platform)


def value_loss(fields: LossFields, settings: ValueUpdateSettings) -> OnOutput[Tensor]:
    """The value model's loss of a micro-batch, for ``run_schedule``. Stays on the device.

    Args:
        fields: ``old`` values, ``returns``, ``mask`` and ``weights``.

    Returns:
        A function that keeps ``[4]`` float64: loss, tokens, sum of moves, clipped tokens.
    """

    def objective(one: Pack, output: Tensor) -> tuple[Tensor, Tensor]:
        given = fields.of(one)
        old, mask = given["old"], given["mask"]
        values = _at_rows(one, output)
        losses = value_losses(values, old, given["returns"], mask, settings.clip)
        loss = (given["weights"] * losses).sum()
        # Masked by a product: picking tokens out would have the host count them.
        moved = torch.where(mask, (values.detach() - old).abs(), 0.0)
        clipped = (moved > settings.clip).sum() if settings.clip else torch.zeros_like(loss)
        sums = [loss.detach(), mask.sum(), moved.sum(), clipped]
        return loss, torch.stack([x.detach().double() for x in sums])

    return objective


def _at_rows(one: Pack, output: Tensor) -> Tensor:
    """``[r]`` float32 of the pack's positions from which response tokens are predicted."""
    return together(output[one.rows, 0].float(), one.context)
