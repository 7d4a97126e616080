"""Settings that multi-head latent attention (DeepSeek-V3) has not been proven with."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.schema import Device
from rlmath.model.spec import ModelSpec

# Width of a token's cache in a layer, the only one that vLLM's CPU kernel supports.
CPU_WIDTH = 576
ON_CPU_ALONE = (
    "trains only on CPU (cluster.device=cpu): Transformer Engine's layers keep its down "
    "projections whole on every tensor rank and its latent norms inside the up projections, which "
    "rlmath's weight tables do not have"
)


def latent_problems(model: ModelSpec, device: Device, command: str) -> Iterator[str]:
    """GPUs, and widths that CPU engines lack; nothing of other models."""
    if model.latent is None:
        return
    what = "model.path: multi-head latent attention"
    if command != "evaluate" and device is Device.cuda:
        yield f"{what} {ON_CPU_ALONE}"
    width = model.latent.kv_rank + model.latent.rotary_dim
    if command != "sft" and device is Device.cpu and width != CPU_WIDTH:
        yield (
            f"{what} with kv_lora_rank={model.latent.kv_rank} + qk_rope_head_dim="
            f"{model.latent.rotary_dim} = {width}: vLLM's CPU kernel supports only {CPU_WIDTH}"
        )
