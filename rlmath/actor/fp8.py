"""Matrix products in FP8 (``actor.fp8``), computed by Transformer Engine within Megatron.

Weights are parameters in the model's type. Transformer Engine quantizes them at a layer's first
product and keeps the copy on the layer (``_fp8_workspaces``). Here a copy lives for one run of the
schedule, in which weights do not change: the next run makes new copies of the weights at that time
(after an optimizer step, of a reference model, merged with adapters). A copy left by a pass without
gradients would also lack data for the backward pass: Transformer Engine 2.11 remakes blockwise
copies only for a first micro-batch.

No micro-batch is marked as first here, because that would also overwrite the existing gradient
(``ctx.fuse_wgrad_accumulation and not ctx.is_first_microbatch``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from rlmath.errors import UserError
from rlmath.model.fp8_training import Fp8Training

_COPIES = "_fp8_workspaces"
_FLAG = "is_first_microbatch"


def fp8_settings(fp8: Fp8Training | None, on_te: bool) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig``; empty without FP8. ``on_te``: whether the layers
    are Transformer Engine's. Raises UserError: they are not, and Megatron would silently compute in
    the model's type."""
    if fp8 is None:
        return {}
    if not on_te:
        raise UserError(
            f"actor.fp8={fp8.format}: needs Transformer Engine, but the layers here are "
            "Megatron's own; set actor.fp8=none"
        )
    # Attention (fp8_dot_product_attention), parameters (fp8_param) and all layers, including the
    # first and the last, keep Megatron's defaults.
    return {"fp8": fp8.format, "fp8_recipe": fp8.recipe}


def prepare_for_fp8(models: Iterable[Any]) -> None:
    """Mark no micro-batch as first; see the module docstring. ``models``: the argument of
    Megatron's schedule, and the chunks in it."""
    for one in models:
        # Megatron's ``set_is_first_microbatch`` collects the layers once, in this list.
        one.modules_with_is_first_microbatch = []
        for part in one.modules():
            if hasattr(part, _FLAG):
                setattr(part, _FLAG, False)


@contextlib.contextmanager
def copies_of_weights(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Release copies of weights quantized in this block at its end, and use no older ones."""
    _release(chunks)
    try:
        yield
    finally:
        _release(chunks)


def _release(chunks: Sequence[nn.Module]) -> None:
    for chunk in chunks:
        for part in chunk.modules():
            copies = getattr(part, _COPIES, None)
            if copies:
                copies.clear()


@contextlib.contextmanager
def without_fp8(module: nn.Module) -> Iterator[None]:
    """Multiply in the model's type in this block, like an engine. ``module``: a rank's stage. Its
    parts share Megatron's configuration, or have copies of it."""
    configs: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "fp8", None) is not None:
            configs[id(config)] = config
    before = [(config, config.fp8) for config in configs.values()]
    for config, _ in before:
        config.fp8 = None
    try:
        yield
    finally:
        for config, fp8 in before:
            config.fp8 = fp8
