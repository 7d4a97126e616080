"""Engine's side of ``nccl``: runs in each vLLM worker.

Where one trainer rank serves worker ``w`` of every engine (``nccl_shares.py``), a worker joins its
sender, and what comes of an expert is its own part. vLLM's loader reads whole tensors, so each part
is put in one that is NaN elsewhere, as the loader takes it. An expert that this worker does not
keep does not come. Otherwise, all is vLLM's.
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

from rlmath.errors import WeightsError
from rlmath.weights.expert_shares import ExpertShare
from rlmath.weights.runs import Run
from rlmath.weights.transports.engine_parts import expert_share


@dataclass(kw_only=True)
class SharesInitInfo(NCCLWeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's, and where each worker of an engine has its own sender:

    Attributes:
        senders: Address and port of each worker's; ``None``: rank 0 sends to all.
        shares: What each worker keeps of the experts, as the fields of ``ExpertShare``.
        experts: Of each expert's tensor, the expert and the dimension along which it is cut.
    """

    senders: list[list[Any]] | None = None
    shares: list[list[Any]] | None = None
    experts: dict[str, list[int]] | None = None


class SharesEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's receiver, of this worker's share of the experts where it has its own sender."""

    init_info_cls = SharesInitInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._share: ExpertShare | None = None
        self._experts: Mapping[str, list[int]] = {}

    def init_transfer_engine(self, init_info: SharesInitInfo) -> None:
        """Join the sender.

        Raises:
            WeightsError: The trainer takes this worker to keep other experts than it does.
        """
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
            # vLLM adds the worker's number, and of each engine one worker joins this sender.
            own["rank_offset"] = 1 + (own["rank_offset"] - 1) // workers - worker
        super().init_transfer_engine(NCCLWeightTransferInitInfo(**own))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive all tensors, and load them as they come.

        Args:
            update_info: Of whole tensors.
        """
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
        """What comes of an expert's tensor; ``None``: nothing, or it is no expert's."""
        if name not in self._experts:
            return None
        assert self._share is not None
        expert, dim = self._experts[name]
        return self._share.of_whole(name, dim, shape, expert)


class _Widened:
    """What stands in for the model while parts arrive.

    Args:
        model: That loads whole tensors.
        shapes: Of these.
        parts: Of an expert's tensors, what comes.
    """

    def __init__(
        self, model: Any, shapes: Mapping[str, list[int]], parts: Mapping[str, Run | None]
    ) -> None:
        self._model, self._shapes, self._parts = model, shapes, parts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """As vLLM's models have it."""
        return self._model.load_weights(self._whole(weights))

    def _whole(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """One at a time: an engine's workers hold few whole tensors at once."""
        for name, tensor in weights:
            part = self._parts[name]
            if part is not None and list(part.shape) != list(self._shapes[name]):
                whole = torch.full(
                    self._shapes[name], math.nan, dtype=tensor.dtype, device=tensor.device
                )
                part.of(whole).copy_(tensor)
                tensor = whole
            yield name, tensor
