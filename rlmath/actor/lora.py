"""Low-rank adapters (LoRA, arXiv:2106.09685) in Megatron's linear layers.

``y = W x + alpha / rank * B A x``, with ``W`` frozen. Under tensor parallelism ranks exchange only
``A x``, a few numbers per token:

- ``W`` sharded by rows: every rank has ``A`` and computes ``A x`` of its tokens; ``B`` is sharded
  like ``W``, and the gradient of ``A x`` is summed over ranks.
- ``W`` sharded by columns: ``A`` is sharded like ``W``, and the ranks' ``A x`` are summed; every
  rank has ``B``.

An expert's layer gets the tokens of all of its tensor ranks, and Megatron's dispatcher sums their
outputs afterwards, so ranks exchange nothing for the adapter. Each rank computes a part of the
gradient of the parameter that all of them have.

Under sequence parallelism that parameter is applied to the rank's own tokens, so its gradient is
partial; Megatron sums it because of the mark ``sequence_parallel``.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlmath.model.families import Rule
from rlmath.model.lora import MERGED_ELEMENTS, Lora
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.weights.adapters import AdapterLayout, adapter_layout, local_adapters
from rlmath.weights.parameters import local_parameters
from rlmath.weights.peft_folder import load_adapters


class Adapter(nn.Module):
    """The adapter of one linear layer (see ``rlmath/weights/adapters.py`` for its parameters).
    ``enabled``: whether it is applied; otherwise the layer is the base model's.

    Args:
        layout: Layout of the rank's adapter.
        like: The matrix.
        sequence_parallel: Tensor ranks have parts of the tokens outside of matrices.
        expert_ranks: Number of ranks that share an expert's matrix; 0: not in an expert.
    """

    mask: Tensor | None

    def __init__(
        self,
        layout: AdapterLayout,
        lora: Lora,
        like: Tensor,
        sequence_parallel: bool,
        expert_ranks: int = 0,
    ) -> None:
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes as mark

        super().__init__()
        self.layout, self.scale, self.enabled = layout, lora.scale, True
        self.by_columns, self.sequence_parallel = layout.rule is Rule.row, sequence_parallel
        self.a = nn.Parameter(like.new_empty(layout.a.shape))
        self.b = nn.Parameter(like.new_empty(layout.b.shape))
        self.is_expert = expert_ranks > 0
        split, on_all = (self.a, self.b) if self.by_columns else (self.b, self.a)
        mark(split, is_parallel=True, dim=1 if self.by_columns else 0, stride=1)
        if expert_ranks == 1:
            # No other rank has it, so this rank counts it in the gradient norm.
            mark(on_all, is_parallel=True, dim=0, stride=1)
        # Megatron then sums its gradient over tensor ranks, which are those that share an expert.
        partial = expert_ranks > 1 if self.is_expert else sequence_parallel
        on_all.sequence_parallel = partial  # type: ignore[attr-defined]
        for one in (self.a, self.b):
            # Whether all data-parallel ranks have it, or only those with the same experts.
            one.allreduce = getattr(like, "allreduce", True)  # type: ignore[attr-defined]
        mask = _owners(layout)
        if not bool(mask.any(1).all()):
            # Others belong to matrices without an adapter, and get no gradient.
            used = mask.any(1).nonzero().flatten().to(like.device)
            self.b.used_rows = used  # type: ignore[attr-defined]
        mask = None if bool(mask.all()) else mask.to(like.device, like.dtype)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the adapter's output to the layer's, in one new tensor. ``x``: ``[s, b, in]``, the
        layer's input; for an expert ``[tokens, in]``. ``output``: the layer's own output, with
        ``out`` instead of ``in``."""
        from megatron.core import tensor_parallel as tp

        low = F.linear(x, self.a) * self.scale
        if self.is_expert:
            pass
        elif self.by_columns:
            if self.sequence_parallel:
                low = tp.reduce_scatter_to_sequence_parallel_region(low)
            else:
                low = tp.reduce_from_tensor_model_parallel_region(low)
        elif self.sequence_parallel:
            low = tp.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        else:
            low = tp.copy_to_tensor_model_parallel_region(low)
        wide = self._wide(self.b)
        flat, low = output.flatten(0, -2), low.flatten(0, -2)
        return torch.addmm(flat, low, wide.t()).view_as(output)

    def _wide(self, b: Tensor, rows: slice = slice(None)) -> Tensor:
        """``[out, matrices * rank]``: each row of ``b`` at the columns of its ``A``."""
        if self.mask is None:
            return b
        return (self.mask[rows, :, None] * b[:, None, :]).flatten(1)

    @torch.no_grad()
    def merge(self, values: Tensor, a: Tensor, b: Tensor, dim: int, start: int) -> Tensor:
        """Rows or columns of the rank's matrix with the adapter merged.

        Computed in float32 and rounded once, to the type of ``values``.

        Args:
            values: Consecutive rows (``dim`` 0) or columns (``dim`` 1) of the matrix.
            a: The values of ``a``, on the same device as ``b`` and ``values``.
            b: The values of ``b``.
            dim: As for ``values``.
            start: Index of the first row or column.
        """
        first = start if dim == 0 else 0
        a = a.float() if dim == 0 else a.narrow(1, start, values.size(1)).float()
        result = torch.empty_like(values)
        step = max(1, MERGED_ELEMENTS // values.size(1))
        for low in range(0, values.size(0), step):
            part = values[low : low + step]
            rows = slice(first + low, first + low + len(part))
            wide = self._wide(b[rows], rows).float()
            result[low : low + step] = torch.addmm(part.float(), wide, a, alpha=self.scale)
        return result

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """For Megatron's checkpoints."""
        from megatron.core import parallel_state
        from megatron.core.ssm import gated_delta_net
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        if self.is_expert:
            tensor_ranks = parallel_state.get_expert_tensor_parallel_group()
            copies = parallel_state.get_expert_data_parallel_group()
        else:
            tensor_ranks = parallel_state.get_tensor_model_parallel_group()
            copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
        found = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"a": 1} if self.by_columns else {"b": 0},
            sharded_offsets,
            tp_group=tensor_ranks,
            dp_cp_group=copies,
        )
        if self.layout.rule is Rule.gate_up:
            # Each rank has its slice of gate, then its slice of up.
            key = f"{prefix}b"
            found[key] = apply_swiglu_sharded_factory(found[key], sharded_offsets)
        elif len(self.layout.b.sections) > 1:
            # Megatron's own way for the sections of linear attention's matrix.
            key, sections = f"{prefix}b", list(self.layout.b.sections)
            names = list(map(str, range(len(sections))))
            found[key] = gated_delta_net._split_tensor_factory(found[key], sections, names, 0)
        return found


def _owners(layout: AdapterLayout) -> Tensor:
    """``[out, matrices]`` bool: the ``A`` of each row of ``b``."""
    owners = torch.zeros(layout.b.shape[0], len(layout.parts), dtype=torch.bool)
    for place, runs in enumerate(layout.rows):
        for first, length in runs:
            owners[first : first + length, place] = True
    return owners


def attach_adapters(
    module: nn.Module, spec: ModelSpec, parallel: ParallelRank, lora: Lora
) -> list[Adapter]:
    """Freeze a rank's stage and add trainable adapters to its linear layers. Returns the rank's
    adapters.

    Args:
        module: Megatron's ``GPTModel``, bare, with its weights.
    """
    module.requires_grad_(False)
    config: Any = module.config
    found = []
    for matrix in local_parameters([module], spec, parallel):
        layout = adapter_layout(matrix, lora)
        if layout is None:
            continue
        linear = module.get_submodule(matrix.name.removesuffix(".weight"))
        sharing = parallel.expert_tp_size if matrix.entry.per_expert else 0
        adapter = Adapter(layout, lora, matrix.tensor, config.sequence_parallel, sharing)
        initialize(adapter, spec.size(matrix.entry.hf[0].dims[1]), lora)
        attach_adapter(linear, adapter)
        found.append(adapter)
    if lora.init_from is not None:
        own = local_adapters([module], spec, parallel, lora)
        load_adapters(own, lora.init_from, lora, spec)
    if config.recompute_granularity is not None and getattr(module, "embedding", None) is not None:
        # Recomputed modules whose input needs no gradient would not train their parameters.
        module.embedding.register_forward_hook(_need_gradient)
    if getattr(module, "output_layer", None) is not None:
        module.output_layer.register_forward_hook(_fold_gradient)
    return found


def attach_adapter(linear: Any, adapter: Adapter) -> None:
    """Let a linear layer add its adapter's output, and save it by the adapter's own rules."""
    linear.adapter = adapter
    # A norm after the product must include the adapter.
    name = "product" if hasattr(linear, "product") else "forward"
    multiply: Callable[..., Any] = getattr(linear, name)
    describe: Callable[..., Any] = linear.sharded_state_dict

    def with_adapter(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = multiply(x, *args, **kwargs)
        return (adapter(x, output) if adapter.enabled else output), bias

    def sharded_state(
        prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        own = f"{prefix}adapter."
        found = describe(prefix, sharded_offsets, metadata)
        found = {key: value for key, value in found.items() if not key.startswith(own)}
        return found | adapter.sharded_state_dict(own, sharded_offsets, metadata)

    setattr(linear, name, with_adapter)
    linear.sharded_state_dict = sharded_state


def _need_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _fold_gradient(_: Any, __: Any, output: tuple[Tensor, Any]) -> None:
    """Give the gradient of whole logits ``[t, 1, v]`` the strides of a matrix. Megatron's are those
    of a transposed ``[1, t, v]``, which torch multiplies with a frozen weight row by row: minutes
    for a vocabulary of 49,152 on a CPU, where one product takes 0.15 s."""
    logits, _ = output
    if logits.requires_grad:
        logits.register_hook(lambda grad: grad.flatten(0, 1).view(grad.shape))


@torch.no_grad()
def initialize(adapter: Adapter, columns: int, lora: Lora) -> None:
    """``B = 0`` and ``A`` uniform in ``+-1/sqrt(in)``, as in PEFT; the same on every layout.

    Args:
        columns: Columns of the whole matrix.
    """
    adapter.b.zero_()
    for piece in adapter.layout.a.pieces:
        # The whole matrix is drawn; this rank may have some of its columns.
        seed = zlib.crc32(f"{lora.seed} {piece.hf_name}".encode())
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(lora.rank, columns).uniform_(-1, 1, generator=generator)
        drawn /= math.sqrt(columns)
        target = adapter.a.narrow(piece.dim, piece.local_start, piece.length)
        target.copy_(drawn.narrow(piece.dim, piece.hf_start, piece.length))


def has_adapters(module: nn.Module) -> bool:
    """Whether a rank's stage has adapters."""
    return any(isinstance(one, Adapter) for one in module.modules())


@contextlib.contextmanager
def base_model(adapters: list[Adapter]) -> Iterator[None]:
    """Disable the adapters in this block."""
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


class Merger:
    """Merges adapters into matrices, for :class:`rlmath.weights.gather.BucketGatherer`.

    Args:
        module: A stage after ``attach_adapters``.
        read: Returns the values of a parameter that is not on the device, from host memory.
        device: Device for the computation.
    """

    def __init__(
        self, module: nn.Module, read: Callable[[Tensor], Tensor], device: torch.device
    ) -> None:
        self._read, self._device = read, device
        self._adapters = {
            id(one.weight): one.adapter
            for one in module.modules()
            if isinstance(getattr(one, "adapter", None), Adapter)
        }

    def __call__(self, parameter: Tensor, values: Tensor, dim: int, start: int) -> Tensor:
        """Some rows (``dim`` 0) or columns (``dim`` 1) of a parameter, from ``start`` on."""
        adapter: Any = self._adapters.get(id(parameter))
        if adapter is None:
            return values
        a, b = (self._read(one.detach()).to(self._device) for one in (adapter.a, adapter.b))
        merged: Tensor = adapter.merge(values.to(self._device), a, b, dim, start)
        return merged
