"""Removed settings and values, with their replacements: giving one is an error."""

from __future__ import annotations

_OVERLAP = (
    "cluster.placement=colocated, or rollout.schedule=pipelined or continuous with "
    "cluster.placement=separate"
)

REMOVED = {
    "algorithm.filter.high": "high of algorithm.filter.options",
    "algorithm.filter.low": "low of algorithm.filter.options",
    "algorithm.overlap_log_probs": _OVERLAP,
    "algorithm.overlap_update": _OVERLAP,
    "rollout.carry_over_tokens": "rollout.cut_after_tokens",
    "rollout.arrays": "more memory for the driver: it has 8 bytes per token in Ray's shared memory",
}

# By key, removed values.
REMOVED_VALUES = {
    "weights.transport": {
        "nccl_m2n": "nccl",
        "object_store": "shared_memory, with ranks and engines on one machine",
    }
}


def removed_setting(key: str) -> str | None:
    """The end of a message about an unknown setting; ``None``: it was never one."""
    return f": it was removed; use {REMOVED[key]}" if key in REMOVED else None


def removed_value(key: str, value: str) -> str | None:
    """The end of a message about a value that a setting does not take; ``None``: it never did."""
    instead = REMOVED_VALUES.get(key, {}).get(value)
    return None if instead is None else f": {value} was removed; use {instead}"
