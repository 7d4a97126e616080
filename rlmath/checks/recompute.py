from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.actor import Recompute
from rlmath.config.recompute import MODULES, possible_modules
from rlmath.config.schema import Config
from rlmath.model.spec import ModelSpec
from rlmath.utils.close_names import did_you_mean

_KEY = "actor.recompute_modules"
# Modules that Megatron can recompute and rlmath refuses, with the reason.
_REFUSED = {
    "layernorm": (
        "Megatron-core 0.16.1 needs Transformer Engine for it, whose matrices have the norms within"
    ),
    "moe_act": "needs Transformer Engine's grouped experts, with which it is not proven; use moe",
    "mla_up_proj": "not proven with the one family that has it (DeepSeek-V3); use mlp or moe",
}


def recompute_problems(config: Config) -> Iterator[str]:
    chosen = config.actor.recompute_modules
    if config.actor.recompute is not Recompute.selective or chosen is None:
        return
    if not chosen:
        yield f"{_KEY}=[]: nothing would be recomputed; give some, or use actor.recompute=none"
    for name in chosen:
        if name in _REFUSED:
            yield f"{_KEY}: {name}: {_REFUSED[name]}"
        elif name not in MODULES:
            known = f"there are {', '.join(MODULES)}{did_you_mean(name, MODULES)}"
            yield f"{_KEY}: there is no {name}; {known}"
    if {"moe", "shared_experts"} <= set(chosen):
        yield f"{_KEY}: moe computes the shared experts again as well; leave out shared_experts"


def recompute_model(config: Config, model: ModelSpec) -> Iterator[str]:
    chosen = config.actor.recompute_modules
    if config.actor.recompute is not Recompute.selective or chosen is None:
        return
    possible = possible_modules(model)
    missing = [name for name in dict.fromkeys(chosen) if name in MODULES and name not in possible]
    if missing:
        yield (
            f"{_KEY}: the model has no {', '.join(f'{one} ({MODULES[one]})' for one in missing)}; "
            f"use some of {', '.join(possible)}, or null"
        )
