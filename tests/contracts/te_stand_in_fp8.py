"""Transformer Engine's FP8 as far as Megatron and the project meet it: the context, copies of
weights, first micro-batches and recomputation.

The products round to fewer bits, so that being in the context shows in the values. What is copied
of Transformer Engine's rules is held to its source by ``tests/cuda_wheels/test_fp8_contracts.py``.
"""

import contextlib
import enum
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class _Recipe:
    fp8_format: Format
    fp8_dpa: bool = False


class Float8CurrentScaling(_Recipe): ...


class Float8BlockScaling(_Recipe): ...


class MXFP8BlockScaling(_Recipe): ...


class FP8GlobalStateManager:
    """Global state of the process, as Transformer Engine's."""

    recipe: _Recipe | None = None

    @classmethod
    def is_fp8_enabled(cls):
        return cls.recipe is not None


@contextlib.contextmanager
def fp8_autocast(enabled=True, fp8_recipe=None, fp8_group=None):
    before = FP8GlobalStateManager.recipe
    FP8GlobalStateManager.recipe = fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


def checkpoint(
    function,
    *args,
    distribute_saved_activations=False,
    get_rng_state_tracker=None,
    tp_group=None,
    **kwargs,
):
    """Runs again in the context that it ran in."""
    recipe = FP8GlobalStateManager.recipe

    def again(*given):
        with fp8_autocast(recipe is not None, recipe):
            return function(*given, **kwargs)

    return torch_checkpoint(again, *args, use_reentrant=True)


def get_cpu_offload_context(*_, **__):
    """Nothing is offloaded."""
    return contextlib.nullcontext(), None


@dataclass(frozen=True)
class Product:
    """Record of a layer's multiplication.

    Attributes:
        recipe: The context's; ``None``: there was none.
        is_first: Megatron's flag of the first micro-batch.
        rows: Rows of the input.
    """

    layer: str
    recipe: str | None
    is_first: bool | None
    rows: int


PRODUCTS = []


def round_to_fp8(values):
    """To four bits of the mantissa; gradients pass as they are."""
    mantissa, exponent = torch.frexp(values.detach().float())
    found = torch.ldexp((mantissa * 16).round() / 16, exponent).to(values.dtype)
    return values + (found - values.detach())


def product_weight(layer, weight, rows, is_first):
    """Weight that a layer multiplies by: ``TransformerEngineBaseModule.get_weight_workspace``."""
    recipe = FP8GlobalStateManager.recipe
    name = None if recipe is None else type(recipe).__name__
    PRODUCTS.append(Product(type(layer).__name__, name, is_first, rows))
    if recipe is None:
        return weight
    copies = layer._fp8_workspaces
    if is_first is None:
        return round_to_fp8(weight)
    if is_first or "weight" not in copies:
        copies["weight"] = round_to_fp8(weight).detach()
    return weight + (copies["weight"] - weight.detach())


NAMES = {
    one.__name__: one
    for one in (
        Format,
        Float8CurrentScaling,
        Float8BlockScaling,
        MXFP8BlockScaling,
        FP8GlobalStateManager,
        fp8_autocast,
        checkpoint,
        get_cpu_offload_context,
    )
}
