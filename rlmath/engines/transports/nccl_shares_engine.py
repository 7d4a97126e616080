"""Engine's side of ``nccl``: runs in each vLLM worker.

If one trainer rank serves worker ``w`` of every engine (``nccl_shares.py``), a worker connects to
its sender and receives only its part of each expert. vLLM's loader reads whole tensors, so each
part is put into a tensor that is NaN elsewhere, which the loader ignores. Experts that this worker
does not keep are not sent. The rest is vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from rlmath.engines.transports.engine_parts import expert_share
from rlmath.errors import WeightsError
from rlmath.weights.expert_shares import ExpertShare
from rlmath.weights.runs import Run


@dataclass(kw_only=True)
class SharesInitInfo(NCCLWeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's init info, plus a sender for each worker of an engine."""

    # Address and port of each worker's sender; None: rank 0 sends to all.
    senders: list[list[Any]] | None = None
    # Share of the experts of each worker, as fields of ExpertShare.
    shares: list[list[Any]] | None = None
    experts: dict[str, list[int]] | None = None  # Expert and split dimension of each expert tensor.


class SharesEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's receiver; with its own sender, it receives this worker's share of the experts."""

    init_info_cls = SharesInitInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._share: ExpertShare | None = None
        self._experts: Mapping[str, list[int]] = {}

    def init_transfer_engine(self, init_info: SharesInitInfo) -> None:
        """Connect to the sender. Raises WeightsError: the trainer assumes a different share than
        this worker's."""
        self._share, self._experts = None, {}
        own = {one.name: getattr(init_info, one.name) for one in fields(NCCLWeightTransferInitInfo)}
        if init_info.senders is not None:
            assert init_info.shares is not None and init_info.experts is not None
            worker, workers = self.parallel_config.rank, len(init_info.senders)
            held, part, parts = init_info.shares[worker]
            share = ExpertShare(None if held is None else frozenset(held), part, parts)
            found = expert_share(self.model)
            if found != share:
                raise WeightsError(
                    f"worker {worker} keeps {found} of the experts, and the actor would send it "
                    f"{share}"
                )
            self._share, self._experts = share, init_info.experts
            own["master_address"], own["master_port"] = init_info.senders[worker]
            # vLLM adds the worker's number; one worker of each engine connects to this sender.
            own["rank_offset"] = 1 + (own["rank_offset"] - 1) // workers - worker
        super().init_transfer_engine(NCCLWeightTransferInitInfo(**own))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive all tensors, and load them as they arrive. ``update_info``: metadata of whole
        tensors."""
        if self._share is None:
            super().receive_weights(update_info)
            return
        shapes = dict(zip(update_info.names, update_info.shapes, strict=True))
        types = dict(zip(update_info.names, update_info.dtype_names, strict=True))
        parts = {name: self._part(name, shape) for name, shape in shapes.items()}
        come = {
            name: shape if part is None else list(part.shape)
            for (name, shape), part in zip(shapes.items(), parts.values(), strict=True)
            if part is not None or name not in self._experts
        }
        model: Any = self.model
        self.model: Any = _Widened(model, shapes, parts)
        try:
            super().receive_weights(
                NCCLWeightTransferUpdateInfo(
                    names=list(come),
                    dtype_names=[types[name] for name in come],
                    shapes=list(come.values()),
                )
            )
        finally:
            self.model = model

    def _part(self, name: str, shape: list[int]) -> Run | None:
        """The received part of an expert's tensor; ``None``: nothing, or not an expert's."""
        if name not in self._experts:
            return None
        assert self._share is not None
        expert, dim = self._experts[name]
        return self._share.of_whole(name, dim, shape, expert)


class _Widened:
    """Replaces the model while parts arrive.

    Args:
        model: Model that loads whole tensors.
        shapes: Shapes of whole tensors.
        parts: Received parts of experts' tensors.
    """

    def __init__(
        self, model: Any, shapes: Mapping[str, list[int]], parts: Mapping[str, Run | None]
    ) -> None:
        self._model, self._shapes, self._parts = model, shapes, parts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Same interface as vLLM's models."""
        return self._model.load_weights(self._whole(weights))

    def _whole(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """One at a time: an engine's workers have room for few whole tensors."""
        for name, tensor in weights:
            part = self._parts[name]
            if part is not None and list(part.shape) != list(self._shapes[name]):
                whole = torch.full(
                    self._shapes[name], math.nan, dtype=tensor.dtype, device=tensor.device
                )
                part.of(whole).copy_(tensor)
                tensor = whole
            yield name, tensor
