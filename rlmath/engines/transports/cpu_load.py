"""Load new weights into a vLLM worker on a CPU: one pass from the segment to their destination.

vLLM's own reload copies a layer's tensors, packs the copy for the CPU's kernels, and copies again.
Here each packed matrix is packed from the segment itself, several at once, and everything else is
copied in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlmath.engines.transports.engine_parts import Part, parts_of

MAX_THREADS = 4


@dataclass
class _Layer:
    """A layer's parts, and their state during an update."""

    module: Any  # vLLM's module.
    # Parts of its packed matrix in row order; empty if none is packed.
    parts: list[Part] = field(default_factory=list)
    in_place: list[Part] = field(default_factory=list)  # All its other parts.
    output: Any = None  # The output layer that computes with a packed copy of this matrix, if any.
    # Parts of the matrix that arrived before the others, by name.
    waiting: dict[str, Tensor] = field(default_factory=dict)


class CpuLoader:
    """Loads whole tensors into a worker's model.

    Args:
        model: vLLM's model, already started.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers: dict[int, _Layer] = {}
        self._by_name: dict[str, _Layer] = {}
        known = set()
        for part in parts_of(model):
            layer = self._layers.setdefault(id(part.module), _Layer(part.module))
            (layer.parts if part.is_packed else layer.in_place).append(part)
            self._by_name[part.name] = layer
            known.add(id(getattr(part.module, part.key)))
        everything = {id(parameter) for parameter in model.parameters()}
        self._complete = (
            known == everything
            and all(len({part.key for part in layer.parts}) < 2 for layer in self._layers.values())
            # vLLM's reload also makes the products of this matrix that latent attention uses.
            and not any("kv_b_proj" in name for name in self._by_name)
        )
        for layer in self._layers.values():
            layer.output = _output_layer(model, layer)
        self.missing: set[str] = set()  # Names of the tensors that have not arrived since begin.

    @property
    def takes_all(self) -> bool:
        """Whether it can load every parameter; it cannot load experts and latent attention."""
        return self._complete

    def begin(self) -> None:
        """Start an update, which has every tensor once."""
        self.missing = set(self._by_name)
        for layer in self._layers.values():
            layer.waiting.clear()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors; they are not referenced afterwards. Raises KeyError: the model has no such
        tensor."""
        given = dict(tensors)
        unknown = sorted(given.keys() - self._by_name)
        if unknown:
            raise KeyError(f"the model has no place for {', '.join(unknown[:5])}")
        self.missing -= given.keys()
        # Largest first, so the threads end at about the same time.
        bytes_of: dict[int, int] = {}
        for name, tensor in given.items():
            layer = id(self._by_name[name].module)
            bytes_of[layer] = bytes_of.get(layer, 0) + tensor.nbytes
        order = [self._layers[layer] for layer in sorted(bytes_of, key=bytes_of.__getitem__)[::-1]]
        # The packing kernels use one thread each and release the GIL.
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda layer: _load(layer, given), order))


@torch.inference_mode()
def _load(layer: _Layer, given: Mapping[str, Tensor]) -> None:
    for part in layer.in_place:
        if part.name in given:
            part.read().copy_(part.of(given[part.name]))
    if layer.parts:
        here = {part.name: given[part.name] for part in layer.parts if part.name in given}
        have = layer.waiting | here
        if len(have) < len({part.name for part in layer.parts}):
            # The segment is overwritten before the others arrive.
            layer.waiting |= {name: tensor.clone() for name, tensor in here.items()}
            return
        layer.waiting.clear()
        _pack(layer.module, layer.parts[0].key, [part.of(have[part.name]) for part in layer.parts])
    if layer.output is not None:
        layer.output.cpu_linear = None
        layer.output.quant_method.process_weights_after_loading(layer.output)


def _pack(module: Any, key: str, runs: list[Tensor]) -> None:
    """Let vLLM pack a matrix again from these runs of rows."""
    # Free the old one before the new one is allocated.
    module.cpu_linear = None
    joined = _join(runs) if runs[0].ndim == 2 else torch.cat(runs)
    setattr(module, key, torch.nn.Parameter(joined, requires_grad=False))
    module.quant_method.process_weights_after_loading(module)
    if getattr(module, key).numel() and joined.ndim == 2:
        raise RuntimeError(f"vLLM did not pack the matrix of {type(module).__name__} again")


def _join(runs: list[Tensor]) -> Tensor:
    """Concatenate the runs; a view if they are contiguous in memory and vLLM can pack it."""
    first = runs[0]
    rows = sum(run.shape[0] for run in runs)
    if not first.is_contiguous() and not _packs_with_gaps(rows, first):
        return torch.cat(runs)
    end = first.data_ptr()
    for run in runs:
        if run.data_ptr() != end or run.stride() != first.stride() or run.stride(1) != 1:
            return torch.cat(runs)
        end += run.shape[0] * run.stride(0) * run.itemsize
    return first.as_strided((rows, first.shape[1]), first.stride())


def _packs_with_gaps(rows: int, part: Tensor) -> bool:
    """Whether vLLM packs a matrix of this many rows with oneDNN, which supports gaps between rows.

    Its other ways (small matrices in bfloat16, AMD's library) do not.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel
    from vllm.platforms import current_platform

    return bool(
        ops._supports_onednn
        and not current_platform.is_zen_cpu()
        and not check_cpu_sgl_kernel(rows, part.shape[1], part.dtype)
    )


def _output_layer(model: torch.nn.Module, layer: _Layer) -> Any:
    """The output layer with this layer's matrix: its own, or shared with the embedding.

    vLLM packs it and also keeps the matrix.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    own = {id(parameter) for parameter in layer.module.parameters(recurse=False)}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in own:
            return module
    return None
