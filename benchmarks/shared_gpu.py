"""A KV cache of a given size, for engines of several runs on one GPU; see ``real_model.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmath.config.engine_arguments import ENGINE_ARGUMENTS
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class KvCacheOptions(Options):
    gib: float = setting(4.0, "KV cache of the engine, in GiB.", above=0)


@ENGINE_ARGUMENTS.register("kv_cache", KvCacheOptions)
def kv_cache(device: str, options: KvCacheOptions) -> dict[str, Any]:
    return {"kv_cache_memory_bytes": int(options.gib * 2**30)} if device == "cuda" else {}
