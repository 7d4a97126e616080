"""The plan's memory of a run's settings, in a few lines for ``--check``."""

from __future__ import annotations

from rlmath.commands.plan.colocated import settings_cache_tokens, settings_in_plan, settings_phases
from rlmath.commands.plan.engine_adapters import inbox_bytes
from rlmath.commands.plan.engine_memory import engine_sync_bytes, engine_weights_bytes
from rlmath.commands.plan.gpus import GPUS, Gpu
from rlmath.commands.plan.memory import GIB, Phase, actor_phases, usable_bytes
from rlmath.commands.plan.teacher import describe_teacher
from rlmath.config.rollout import Quantization
from rlmath.config.schema import Config, DType, Placement
from rlmath.config.settings import replace_values, value_of
from rlmath.errors import ConfigError
from rlmath.model.spec import ModelSpec

UPDATE_KEY, FORWARD_KEY = "actor.max_tokens_per_microbatch", "actor.max_tokens_per_forward"
# Tokens that budgets are multiples of.
UNIT = 1024
# Phases that do not depend on the card.
_SHOWN = ("log-probs", "logits", "training", "optimizer step", "weight sync")


def describe_memory(config: Config, spec: ModelSpec) -> list[str]:
    """The actor's peaks on the fullest GPU, and which cards hold them beside the engine. Raises
    ConfigError: no card that is known holds them."""
    if config.model.dtype is DType.float32:
        return [
            "memory   not planned: rlmath plan counts weights and activations of 16 bits, and "
            "model.dtype=float32 takes up to twice as much"
        ]
    colocated = config.cluster.placement is Placement.colocated
    phases = _phases(config, spec, 80.0)
    peaks = ", ".join(f"{p.name} {p.num_bytes / GIB:.1f}" for p in phases if p.name in _SHOWN)
    misses = {gpu.name: _miss(config, spec, gpu) for gpu in GPUS.values()}
    fitting = [name for name, miss in misses.items() if miss is None]
    if not fitting:
        largest = max(GPUS.values(), key=lambda gpu: gpu.memory_gib)
        raise ConfigError(
            f"these settings fit no known GPU; on the largest, {largest.name}: "
            f"{misses[largest.name]}. rlmath plan layout model.path={config.model.path} "
            f"cluster.nodes={config.cluster.nodes} finds settings that fit, and --write keeps them"
        )
    card = "h100" if "h100" in fitting else min(fitting, key=lambda name: GPUS[name].memory_gib)
    share = config.rollout.gpu_memory_utilization
    lines = [f"memory   GiB on the fullest GPU, as rlmath plan predicts: {peaks}"]
    beside = "" if colocated else " of separate GPUs"
    lines.append(
        f"         beside it the engines take {share:g}{beside} "
        f"(rollout.gpu_memory_utilization); fits {', '.join(fitting)}"
    )
    most = ", ".join(
        f"{_largest(config, spec, GPUS[card], key):,} ({key})" for key in (UPDATE_KEY, FORWARD_KEY)
    )
    lines.append(f"         largest micro-batches that fit an {card} so, in tokens: {most}")
    h100 = misses["h100"]
    if h100 is not None:
        lines.append(f"         an H100 is too small: {h100}")
    return lines + describe_teacher(config)


def _largest(config: Config, spec: ModelSpec, gpu: Gpu, key: str) -> int:
    """The largest token budget that fits a card, up to the tokens of a whole update, or of a whole
    step in a forward-only pass."""
    _, step = settings_in_plan(config, spec)
    budget = value_of(config, UPDATE_KEY)
    everything = step.microbatches * step.longest_tokens
    everything *= step.minibatches if key == FORWARD_KEY else 1
    # Memory grows with the budget.
    low, high = budget // UNIT, max(budget, everything) // UNIT + 1
    while high - low > 1:
        middle = (low + high) // 2
        larger = replace_values(config, {FORWARD_KEY: None, key: middle * UNIT})
        fits = _miss(larger, spec, gpu) is None
        low, high = (middle, high) if fits else (low, middle)
    return max(budget, low * UNIT)


def _phases(config: Config, spec: ModelSpec, gpu_gib: float) -> list[Phase]:
    if config.cluster.placement is Placement.colocated:
        return settings_phases(config, spec, gpu_gib)
    actor, step = settings_in_plan(config, spec)
    return [phase for phase in actor_phases(spec, actor, step) if phase.name != "state"]


def _miss(config: Config, spec: ModelSpec, gpu: Gpu) -> str | None:
    """Why these settings do not fit a card; ``None``: they do."""
    fullest = max(_phases(config, spec, gpu.memory_gib), key=lambda phase: phase.num_bytes)
    if fullest.num_bytes > usable_bytes(gpu.memory_gib):
        return f"{fullest.describe()}, of {usable_bytes(gpu.memory_gib) / GIB:.1f} GiB"
    if config.cluster.placement is Placement.separate:
        # The engine keeps its KV cache during a weight sync.
        share, (actor, step) = config.rollout.gpu_memory_utilization, settings_in_plan(config, spec)
        bucket, adapters = step.bucket_bytes, actor.engine_adapters
        tp, nccl = config.rollout.tensor_parallel, "nccl"
        buffers = (
            engine_sync_bytes(spec, bucket, tp, nccl)
            if adapters is None
            else inbox_bytes(spec, bucket, adapters)
        )
        left = usable_bytes(gpu.memory_gib) - share * gpu.memory_gib * GIB
        if buffers > left:
            return (
                f"beside rollout.gpu_memory_utilization={share:g} a weight sync takes "
                f"{buffers / GIB:.1f} GiB of an engine's GPU, and {max(0.0, left) / GIB:.1f} are "
                "left"
            )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    tokens = settings_cache_tokens(config, spec, gpu.memory_gib)
    if tokens < longest:
        in_fp8 = config.rollout.quantization is not Quantization.none
        weights = engine_weights_bytes(spec, config.rollout.tensor_parallel, in_fp8) / GIB
        return (
            f"beside {weights:.1f} GiB of weights an engine's KV cache holds "
            f"{max(0, int(tokens)):,} tokens, fewer than one sequence of {longest:,}"
        )
    return None
