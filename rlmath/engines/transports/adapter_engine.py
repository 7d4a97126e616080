"""Adapters (LoRA) in a vLLM worker that computes them unmerged.

vLLM keeps the base model from its start. The tensors of a sync are collected until all have
arrived, and then put into vLLM's adapter slot at once, in memory: an engine whose sync is
interrupted computes without adapters. ``B`` already includes ``alpha / rank``, so an engine has
exactly the tensors that were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from rlmath.engines.transports.engine_parts import UNSENT
from rlmath.errors import WeightsError
from rlmath.model.lora import lora_a, lora_b
from rlmath.weights.fingerprint import fingerprint

# Id in vLLM's requests and in its slot.
ADAPTER_ID = 1
_PREFIX = "base_model.model."


class Inbox:
    """Replaces the model while adapters arrive: it keeps a copy of each tensor."""

    def __init__(self) -> None:
        # Tensors by the names of rlmath.model.lora.adapter_shapes.
        self.tensors: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Same interface as vLLM's models. Copies, because the tensors' memory is reused."""
        given = {name: tensor.clone() for name, tensor in weights}
        self.tensors |= given
        return set(given)


class ReceivesAdapters:
    """Mixin for a weight transfer engine of vLLM: nothing is loaded into the model."""

    model: Any
    inbox: Inbox | None = None

    def start_weight_update(self) -> None:
        self.inbox = self.model = Inbox()

    def finish_weight_update(self) -> None:
        """No-op; :func:`put_in_force` uses the collected tensors."""


def finish_with_adapters(worker: Any) -> None:
    """Runs in a vLLM worker: end an update, and replace the adapters.

    vLLM drops all adapters when a weight update ends, so they follow afterwards, without a step in
    between.
    """
    worker.finish_weight_update()
    put_in_force(worker)


def put_in_force(worker: Any) -> None:
    """Replace the current adapters by the collected ones. Raises WeightsError: the trainer sent
    none, or a matrix here has no adapter or half of one."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    receiver = worker.weight_transfer_engine
    inbox, receiver.inbox = receiver.inbox, None
    manager = worker.model_runner.lora_manager._adapter_manager
    manager.remove_all_adapters()
    if inbox is None or not inbox.tensors:
        raise WeightsError(f"{UNSENT} the engine without adapters: the actor sent none")
    rank = _check_pairs(inbox.tensors)
    # B already includes alpha / rank.
    config = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    adapters = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        {_PREFIX + name: tensor for name, tensor in inbox.tensors.items()},
        config,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_rename(manager.model),
    )
    manager.add_adapter(adapters)
    manager.activate_adapter(ADAPTER_ID)
    held = _held_adapters(manager)
    lost = sorted(set(inbox.tensors) - {name for name, *_ in held})
    if lost:
        raise WeightsError(f"{UNSENT} vLLM without a place for {', '.join(lost[:5])}")


def adapter_fingerprints(worker: Any) -> dict[str, int | None]:
    """Runs in a vLLM worker: this worker's shares of the active adapters, by the names of
    ``rlmath.model.lora.adapter_shapes``; empty if none are active."""
    manager = worker.model_runner.lora_manager._adapter_manager
    return {
        name: fingerprint(values, *corner) if counts else 0
        for name, values, corner, counts in _held_adapters(manager)
    }


def _check_pairs(tensors: Mapping[str, Tensor]) -> int:
    """The rank of adapters, after checking that each has an ``A`` and a ``B``."""
    of_a = {name for name in tensors if ".lora_A." in name}
    half = sorted(of_a ^ {name.replace(".lora_B.", ".lora_A.") for name in set(tensors) - of_a})
    if half:
        raise WeightsError(f"{UNSENT} half of an adapter, which the actor did not send: {half[0]}")
    (rank,) = {tensors[name].shape[0] for name in of_a}
    return int(rank)


def _rename(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _held_adapters(manager: Any) -> list[tuple[str, Tensor, tuple[int, int], bool]]:
    """For each active ``A`` and ``B`` of a worker: name, this worker's part, first row and column
    in the whole, and whether no earlier worker has the same part."""
    if manager.lora_index_to_id != [ADAPTER_ID]:
        return []
    adapters = manager._registered_adapters.get(ADAPTER_ID)
    if adapters is None:
        return []
    return [
        one
        for path, module in manager.modules.items()
        if path in adapters.loras
        for one in _of_module(path, module, adapters.loras[path], adapters.rank)
    ]


def _of_module(
    path: str, module: Any, given: Any, rank: int
) -> Iterator[tuple[str, Tensor, tuple[int, int], bool]]:
    from vllm.lora.layers import RowParallelLinearWithLoRA

    stem, _, last = path.rpartition(".")
    names = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }.get(last, (last,))
    of_a = given.lora_a if isinstance(given.lora_a, list) else [given.lora_a]
    base, first = module.base_layer, module.tp_rank == 0
    for place, name in enumerate(names):
        if of_a[place] is None:
            continue  # A matrix without an adapter, fused with others that have one.
        a = module.lora_a_stacked[place][0, 0, :rank]
        b = module.lora_b_stacked[place][0, 0, :, :rank]
        full = f"{stem}.{name}.weight"
        if isinstance(module, RowParallelLinearWithLoRA):
            yield lora_a(full), a, (0, module.tp_rank * a.shape[1]), True
            yield lora_b(full), b, (0, 0), first
            continue
        # With more ranks than key-value heads, several ranks have the same head.
        copies = base.num_kv_head_replicas if name in ("k_proj", "v_proj") else 1
        row = module.tp_rank // copies * b.shape[0]
        yield lora_a(full), a, (0, 0), first
        yield lora_b(full), b, (row, 0), module.tp_rank % copies == 0
