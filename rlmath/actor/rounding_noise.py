"""Size of the difference between two correct programs: the model's log-probs with other rounding.

Engine and actor compute the same function with different kernels, so each activation is rounded
differently. The effect on a log-prob depends on the model: on its depth, on how wide its logits
are, on how often a router's choice is close. Here the same model runs again with every activation
changed randomly by up to half a unit in the last place, as a different kernel would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Parts of the class names of modules whose output is rounded: matrix products, norms and the
# embedding, Megatron's own and Transformer Engine's.
_ROUNDED = ("Linear", "Norm", "Embedding", "GroupedMLP", "Router")
_ELEMENTS_AT_ONCE = 1 << 24
# Both sides compute the same angles in float32.
_EXACT = "Rotary"


def rounded_modules(module: nn.Module) -> list[nn.Module]:
    """The modules that round; the innermost of nested ones, so none counts twice."""
    found = [part for part in module.modules() if _rounds(part)]
    return [part for part in found if not any(_rounds(p) for p in part.modules() if p is not part)]


def _rounds(part: nn.Module) -> bool:
    name = type(part).__name__
    return _EXACT not in name and any(word in name for word in _ROUNDED)


@contextlib.contextmanager
def rounding_noise(module: nn.Module, seed: int) -> Iterator[None]:
    """Change every activation by up to half a unit in the last place. ``module``: a rank's stage.
    ``seed``: equal on tensor ranks, so their common values stay equal."""
    generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def move(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        generator = generators.get(value.device)
        if generator is None:
            generator = torch.Generator(value.device).manual_seed(seed)
            generators[value.device] = generator
        # In place, one part at a time: the output layer's logits may fill much of the memory.
        flat = value.contiguous().view(-1)
        for part in flat.split(_ELEMENTS_AT_ONCE):
            factor = torch.empty(part.shape, dtype=torch.float32, device=part.device)
            factor.uniform_(-0.5, 0.5, generator=generator)
            factor.mul_(torch.finfo(value.dtype).eps).add_(1)
            part.copy_(factor.mul_(part))  # Rounded to the value's own type, up or down.
        return flat.view(value.shape)

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return move(output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (move(output[0]), *output[1:])
        return output

    handles = [part.register_forward_hook(hook) for part in rounded_modules(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
