"""Map this rank's Megatron parameters to table entries, checked against the model spec."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from torch import Tensor, nn

from rlmath.errors import WeightsError
from rlmath.model.families import Entry, When, family_of
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.weights.pieces import LocalTensor, local_tensor

# In the name of a low-rank adapter's parameters, see ``rlmath/weights/adapters.py``.
ADAPTER = ".adapter."


@dataclass(frozen=True)
class LocalParameter:
    """A Megatron parameter of this rank and its content."""

    name: str  # Megatron's name within its model chunk, with the chunk's own layer number.
    tensor: Tensor  # The parameter itself.
    layout: LocalTensor  # The Hugging Face tensors in it.
    entry: Entry  # Entry of the family's table.
    layer: int | None  # Global layer number from 0; None: not in a layer.
    expert: int | None = None  # Global expert number from 0; None: not in an expert.

    @property
    def is_copy(self) -> bool:
        """Whether it is the last stage's copy of a tied embedding."""
        return self.entry.when is When.tied


def local_parameters(
    model_chunks: Sequence[nn.Module],
    spec: ModelSpec,
    parallel: ParallelRank,
    skipped: Container[int] = (),
) -> list[LocalParameter]:
    """All parameters of this rank's model chunks except adapters, in module order. Raises
    WeightsError: a parameter is in no table or has a different shape, or a layer lacks one.

    Args:
        model_chunks: Megatron ``GPTModel``s of this pipeline stage, one per virtual stage, bare or
            wrapped (DDP, Float16Module).
        skipped: ``id`` of parameters that are in no table, to leave out.
    """
    result: list[LocalParameter] = []
    for wrapped in model_chunks:
        chunk = unwrap(wrapped)
        numbers = _global_layers(chunk)
        seen: dict[int | None, set[Entry]] = {number: set() for number in numbers}
        for name, parameter in _tensors(chunk):
            if id(parameter) in skipped:
                continue
            entry, layer, expert = _find(name, spec, numbers, parallel)
            is_expert = entry.per_expert
            layout = local_tensor(
                entry,
                spec,
                parallel.expert_tp_rank if is_expert else parallel.tp_rank,
                parallel.expert_tp_size if is_expert else parallel.tp_size,
                parameter.shape[0] * parallel.tp_size,
                layer,
                expert,
            )
            if tuple(parameter.shape) != layout.shape:
                raise WeightsError(
                    f"Megatron's {name} (global layer {layer}) has shape "
                    f"{tuple(parameter.shape)} on tensor rank {parallel.tp_rank} of "
                    f"{parallel.tp_size}; {spec.architecture} needs {layout.shape}"
                )
            seen.setdefault(layer, set()).add(entry)
            result.append(LocalParameter(name, parameter, layout, entry, layer, expert))
        _check_layers_whole(seen, spec)
    return result


def _tensors(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the files, and the routers' expert bias, which is never trained."""
    yield from (item for item in chunk.named_parameters() if ADAPTER not in item[0])
    yield from ((name, one) for name, one in chunk.named_buffers() if name.endswith("expert_bias"))


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside Megatron's wrappers, whose attribute is always ``module``."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def _global_layers(chunk: nn.Module) -> list[int]:
    """Global number, from 0, of each decoder layer of the chunk.

    Megatron's layers know their number (from 1) in any pipeline layout.
    """
    layers = chunk.get_submodule("decoder.layers").children()
    return [cast(int, layer.layer_number) - 1 for layer in layers]


@lru_cache(maxsize=8)
def _patterns(architecture: str) -> tuple[tuple[re.Pattern[str], Entry], ...]:
    result = []
    for entry in family_of(architecture).entries:
        for name in entry.megatron:
            pattern = re.escape(name)
            for number in ("layer", "expert"):
                pattern = pattern.replace(re.escape(f"{{{number}}}"), rf"(?P<{number}>\d+)")
            result.append((re.compile(pattern), entry))
    return tuple(result)


def _find(
    name: str, spec: ModelSpec, layers: list[int], parallel: ParallelRank
) -> tuple[Entry, int | None, int | None]:
    """The entry of a parameter, with its global layer and expert."""
    for pattern, entry in _patterns(spec.architecture):
        match = pattern.fullmatch(name)
        if match is None:
            continue
        found = match.groupdict()
        layer = layers[int(found["layer"])] if "layer" in found else None
        if not spec.has(entry, layer):
            continue
        expert = None
        if "expert" in found:
            expert = parallel.ep_rank * (spec.experts // parallel.ep_size) + int(found["expert"])
        return entry, layer, expert
    raise WeightsError(
        f"Megatron's parameter {name} is in no table of {spec.architecture} for this model "
        f"(qkv_bias={spec.qkv_bias}, qk_norm={spec.qk_norm.value}, tied={spec.tied}, "
        f"experts={spec.experts}); see rlmath/model/families.py"
    )


def _check_layers_whole(seen: dict[int | None, set[Entry]], spec: ModelSpec) -> None:
    """Raise if a layer lacks a parameter: it would silently train without it."""
    entries = spec.family.entries
    for layer, found in seen.items():
        if layer is None:
            continue
        for entry in entries:
            if entry.per_layer and spec.has(entry, layer) and entry not in found:
                raise WeightsError(
                    f"Megatron's layer {layer} has no {' or '.join(entry.megatron)} "
                    f"({spec.architecture} holds {entry.hf[0].name} in it)"
                )
