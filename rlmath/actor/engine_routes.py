"""The engine's routes of a micro-batch, arranged like the tokens that a rank's routers see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.device import Platform
from rlmath.types import MicroBatch, TrainingBatch


@dataclass(frozen=True)
class EngineRoutes:
    """Routes of the tokens of one micro-batch on one tensor rank."""

    routes: Tensor  # [tokens, MoE layers, experts per token], as in samples.
    is_known: Tensor  # [tokens] bool: whether the engine returned this token's; false for padding.


class UploadedRoutes:
    """The engine's routes of a pass, with those of the current micro-batch on the device: one copy
    for the routers of all layers, from page-locked memory, so the host does not wait. ``engine``:
    routes of each micro-batch, in host memory. ``platform``: platform of this process."""

    def __init__(self, engine: Sequence[EngineRoutes], platform: Platform) -> None:
        self._engine = [
            EngineRoutes(platform.page_locked(one.routes), platform.page_locked(one.is_known))
            for one in engine
        ]
        self._device = platform.torch_device
        self._at_hand: tuple[int, EngineRoutes] | None = None

    def of(self, index: int) -> EngineRoutes:
        if self._at_hand is None or self._at_hand[0] != index:
            one = self._engine[index]
            uploaded = EngineRoutes(
                one.routes.to(self._device, non_blocking=True),
                one.is_known.to(self._device, non_blocking=True),
            )
            self._at_hand = index, uploaded
        return self._at_hand[1]


def engine_routes(
    batch: TrainingBatch, micro_batch: MicroBatch, places: range, layers: int, topk: int
) -> EngineRoutes:
    """Arrange the routes of a micro-batch's samples. Raises ValueError: the routes belong to a
    different model or different sequences.

    Args:
        batch: The batch that ``micro_batch.sequences`` index.
        micro_batch: Packed without padding between its sequences.
        places: Positions of this rank's tokens in the packed row.
        layers: Number of MoE layers of the model.
        topk: Experts per token.
    """
    lengths = batch.sequence_lengths.tolist()
    known = [0] * len(lengths) if batch.route_lengths is None else batch.route_lengths.tolist()
    found = batch.routes
    if found is None:
        found = torch.zeros(0, layers, topk, dtype=torch.uint8)
    if found.shape[1:] != (layers, topk):
        raise ValueError(
            f"actor.routing_replay=engine: the samples' routes have {found.shape[1]} layers and "
            f"{found.shape[2]} experts per token, but the model has {layers} and {topk}"
        )
    if any(own > length for own, length in zip(known, lengths, strict=True)):
        raise ValueError("a sequence has routes for more tokens than it has")
    # Only this rank's part of the row is copied.
    routes = torch.zeros(len(places), layers, topk, dtype=found.dtype)
    is_known = torch.zeros(len(places), dtype=torch.bool)
    starts = [0]
    for count in known:
        starts.append(starts[-1] + count)
    offset = 0
    for i in micro_batch.sequences:
        first = max(offset, places.start)
        end = min(offset + known[i], places.stop)
        if first < end:
            own = slice(first - places.start, end - places.start)
            begin = starts[i] + first - offset
            routes[own] = found[begin : begin + end - first]
            is_known[own] = True
        offset += lengths[i]
    return EngineRoutes(routes, is_known)
