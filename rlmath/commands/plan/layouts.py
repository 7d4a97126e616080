"""The search: every layout that the settings allow, what it holds, how long it takes, why not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from rlmath.commands.plan.colocated import (
    beside_sleeping_engine,
    engine_fixed_terms,
    resident_bytes,
    with_awake_engine,
)
from rlmath.commands.plan.engine_adapters import asleep_bytes
from rlmath.commands.plan.engine_memory import engine_weights_bytes, kv_bytes
from rlmath.commands.plan.memory import (
    GIB,
    MIB,
    ActorShape,
    Phase,
    Step,
    engine_share,
    host_bytes,
    moved_bytes,
    usable_bytes,
)
from rlmath.commands.plan.time import (
    Decoding,
    actor_time_s,
    decoding,
    offload_time_s,
    weight_sync_time_s,
)
from rlmath.commands.plan.wish import Wish
from rlmath.config.actor import Offload, RoutingReplay
from rlmath.errors import UserError
from rlmath.model.fp8_training import size_problems
from rlmath.model.parallel import Layout, even_stages
from rlmath.model.spec import ModelSpec

# Context-parallel ranks that are tried.
CONTEXT_CHOICES = [1, 2, 4, 8]
# Predictions that are no further apart say nothing of which is faster.
EQUAL_SHARE = 0.03
# Columns of an expert on a rank, below which its matrices keep a GPU waiting: whole experts are
# shared out instead.
LEAST_EXPERT_WIDTH = 512
# Tried where rollout.max_running_sequences is not given.
RUNNING_CHOICES = (64, 128, 256, 512, 1024)
# Of a micro-batch, beyond which more tokens make nothing faster.
BUSY_TOKENS = 16384
# Models up to this size, and those with experts, get at least that many if they fit.
SMALL_PARAMETERS = 3e9


@dataclass(frozen=True)
class Plan:
    """A layout that fits: actor and engines take turns on all GPUs.

    Attributes:
        actor: Layout of the actor.
        engine_tp: Tensor-parallel ranks of an engine.
        engines: How many.
        engine_share: ``rollout.gpu_memory_utilization``.
        cache_tokens: That an engine's KV cache holds.
        max_running: ``rollout.max_running_sequences``.
        running: Sequences that an engine runs at once, on average.
        phases: What a GPU holds in each, the fullest one.
        seconds: Of each phase.
        host_bytes: Host memory that the ranks of a node take at most for tensors.
    """

    actor: ActorShape
    engine_tp: int
    engines: int
    engine_share: float
    cache_tokens: int
    max_running: int
    running: int
    phases: tuple[Phase, ...]
    seconds: dict[str, float]
    host_bytes: float

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.num_bytes)


def with_least_offload(wish: Wish) -> tuple[Wish, list[Plan]]:
    """Every layout that fits with the least that has to leave the GPUs for it, and the wish with
    that ``offload`` and ``offload_in_backward``.

    Raises:
        UserError: Nothing fits; see :func:`find_plans`.
    """
    error: UserError | None = None
    for offload, in_backward in _offloads(wish):
        one = dataclasses.replace(wish, offload=offload, offload_in_backward=in_backward)
        try:
            return one, find_plans(one)
        except UserError as refused:
            error = refused
    assert error is not None
    raise error


def _offloads(wish: Wish) -> Iterator[tuple[str, bool]]:
    """``offload`` and ``offload_in_backward`` as wished, from the least to the most that is moved:
    within a step once, then once for each minibatch."""
    offloads = [one.value for one in Offload] if wish.offload is None else [wish.offload]
    asked = wish.offload_in_backward
    if wish.offload == Offload.none.value:
        asked = bool(asked)
    for in_backward in (False, True) if asked is None else (asked,):
        for offload in offloads:
            # Without an offload it does nothing; asked for so, the settings' check says it.
            if wish.offload is not None or not in_backward or offload != Offload.none.value:
                yield offload, in_backward


def find_plans(wish: Wish) -> list[Plan]:
    """Every layout that fits, the fastest first; see :func:`_ordered`.

    Raises:
        UserError: None does; the message has the reason of each kind, nearest miss first.
    """
    plans: list[Plan] = []
    misses: list[_Miss] = []
    for actor in _actor_splits(wish):
        try:
            plans.append(_plan(wish, actor))
        except _Miss as miss:
            misses.append(miss)
    if plans:
        return _ordered(plans)
    reasons = sorted(misses, key=lambda miss: miss.excess)[:4]
    raise UserError(
        f"no layout of this model fits {wish.gpus} GPUs of {wish.gpu.memory_gib:g} GiB "
        f"(of which {usable_bytes(wish.gpu.memory_gib) / GIB:.1f} are planned with):\n  - "
        + "\n  - ".join(map(str, reasons))
    )


def _ordered(plans: list[Plan]) -> list[Plan]:
    """The fastest first; of those that may as well be, those with fewer kinds of parallelism."""
    limit = (1 + EQUAL_SHARE) * min(plan.step_s for plan in plans)

    def order(plan: Plan) -> tuple[bool, int, float]:
        slower = plan.step_s > limit
        layout = plan.actor.layout
        # Expert parallelism is how an MoE is laid out, no further kind.
        sizes = (layout.pipeline_parallel, layout.context_parallel)
        kinds = sum(size > 1 for size in sizes)
        return slower, 0 if slower else kinds, plan.step_s

    return sorted(plans, key=order)


class _Miss(Exception):
    """A layout that does not work; ``excess`` orders how far from it."""

    def __init__(self, message: str, excess: float) -> None:
        super().__init__(message)
        self.excess = excess


def _splits(spec: ModelSpec, tp: int) -> bool:
    """As :func:`rlmath.checks.layout.model_splits` says, for many at once."""
    heads = spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0
    return spec.heads % tp == 0 and spec.ffn % tp == 0 and heads


def _engine_splits(spec: ModelSpec, tp: int) -> bool:
    return _splits(spec, tp) and spec.moe_ffn % tp == 0


def _actor_splits(wish: Wish) -> Iterator[ActorShape]:
    """Tensor ranks of one node, stages of one layer or more, copies that use every GPU."""
    node, spec, gpus = min(wish.gpus, wish.gpus_per_node), wish.spec, wish.gpus
    tensor = [wish.tp] if wish.tp else [n for n in range(1, node + 1) if node % n == 0]
    stages = [wish.pp] if wish.pp else list(range(1, min(spec.layers, gpus) + 1))
    contexts = [wish.cp] if wish.cp else CONTEXT_CHOICES
    found = False
    for pp, cp, tp in itertools.product(stages, contexts, tensor):
        if gpus % (tp * pp * cp) or pp > spec.layers or not _splits(spec, tp):
            continue
        virtual = wish.virtual_stages
        # Of what can be trained, only chunks of one size are planned.
        if virtual > 1 and (pp == 1 or any(n % virtual for n in even_stages(spec.layers, pp))):
            continue
        dp = gpus // (tp * pp * cp)
        for ep in _expert_shares(wish, tp, cp, dp):
            found = True
            yield ActorShape(
                Layout(tp, pp, dp, context_parallel=cp, expert_parallel=ep, virtual_stages=virtual),
                0,
                wish.longest_microbatch,
                wish.layers,
                lora=wish.lora,
                unmerged=wish.unmerged,
                fp8=wish.fp8,
                recompute_modules=wish.recompute_modules,
                overlap_gradients=wish.overlap_gradients and dp * cp > 1,
                overlap_param_gather=wish.overlap_param_gather
                and dp * cp > 1
                and wish.work.minibatches > 1,
            )
    if not found:
        asked = {
            "actor.tensor_parallel": wish.tp,
            "actor.pipeline_parallel": wish.pp,
            "actor.context_parallel": wish.cp,
            "actor.expert_parallel": wish.ep,
            **({"actor.virtual_stages": wish.virtual_stages} if wish.virtual_stages > 1 else {}),
        }
        raise UserError(
            " ".join(f"{key}={value or 'any'}" for key, value in asked.items())
            + f": of {gpus} GPUs in nodes of {node}, {spec.heads} heads, {spec.kv_heads} "
            f"key-value heads, {spec.layers} layers and {spec.experts} experts nothing divides so"
        )


def _expert_shares(wish: Wish, tp: int, cp: int, dp: int) -> list[int]:
    """Expert-parallel ranks: 1 of a dense model; none where an MoE cannot be laid out so."""
    spec = wish.spec
    if not spec.experts:
        choices = [1]
    elif cp > 1:
        choices = []  # An MoE takes whole sequences.
    else:
        narrow = tp > 1 and spec.moe_ffn / tp < LEAST_EXPERT_WIDTH and wish.ep is None
        cut = [] if narrow or spec.moe_ffn % tp else [1]
        whole = range(2, tp * dp + 1)
        choices = cut + [n for n in whole if spec.experts % n == 0 and tp * dp % n == 0]
    return [n for n in choices if wish.ep in (None, n)]


def _plan(wish: Wish, split: ActorShape) -> Plan:
    work, spec, dp, name = wish.work, wish.spec, split.layout.data_parallel, str(split)
    if work.sequences % (work.minibatches * dp):
        raise _Miss(
            f"{name}: {work.sequences} sequences / {work.minibatches} minibatches / {dp} copies = "
            f"{work.sequences / work.minibatches / dp:g} does not divide",
            float("inf"),
        )
    if wish.fp8 is not None and (sizes := [*size_problems(spec, split.layout, wish.fp8)]):
        raise _Miss(f"{name}: actor.fp8_recipe={wish.fp8.recipe}: {'; '.join(sizes)}", float("inf"))
    actor, phases = _with_least_recompute(wish, split)
    if wish.max_tokens is None:
        actor, phases = _with_more_sequences(wish, actor, phases)
    share = engine_share(wish.gpu.memory_gib, resident_bytes(phases))
    engine_tp, max_running, cache_tokens, decoded = _best_engine(wish, share, name)
    engine_bytes = share * wish.gpu.memory_gib * GIB
    step = _step(wish, actor)
    adapters = actor.engine_adapters
    together = with_awake_engine(spec, phases, step, engine_tp, engine_bytes, adapters)
    for phase in together:
        if phase.name == "weight sync":
            _refuse_if_full(wish, phase, name)
    log_probs_s, update_s = actor_time_s(
        spec, actor, work, wish.gpu, wish.efficiency, wish.gpus_per_node
    )
    ranks = min(wish.gpus, wish.gpus_per_node)
    host = host_bytes(spec, actor, step, ranks)
    if adapters is None:
        expert_part = actor.layout.pipeline_parallel / engine_tp
        weight_sync_s = weight_sync_time_s(
            spec, actor.layout, wish.gpu, wish.efficiency, wish.gpus_per_node, expert_part
        )
    else:
        # What is sent is small; the base model goes to host memory and comes back.
        asleep = asleep_bytes(spec, engine_tp, adapters)
        weight_sync_s = offload_time_s(asleep, wish.efficiency)
        host += ranks * asleep
    return Plan(
        actor=actor,
        engine_tp=engine_tp,
        engines=wish.gpus // engine_tp,
        engine_share=share,
        cache_tokens=int(cache_tokens),
        max_running=max_running,
        running=decoded.running,
        phases=tuple(together),
        host_bytes=host,
        seconds={
            "generate": decoded.seconds,
            "log_probs": log_probs_s,
            "update": update_s,
            "weight_sync": weight_sync_s,
            "offload": offload_time_s(moved_bytes(spec, actor, step), wish.efficiency),
        },
    )


def _refuse_if_full(wish: Wish, phase: Phase, name: str) -> None:
    excess = phase.num_bytes - usable_bytes(wish.gpu.memory_gib)
    if excess > 0:
        raise _Miss(f"{name}: {phase.describe()}", excess)


def _with_least_recompute(wish: Wish, split: ActorShape) -> tuple[ActorShape, list[Phase]]:
    """The fewest recomputed layers of a stage with which every phase of the actor fits."""
    per_stage, name = max(split.layout.stage_sizes(wish.spec.layers)), str(split)
    if wish.recompute_layers is not None and not 0 <= wish.recompute_layers <= per_stage:
        raise _Miss(
            f"{name}: actor.recompute_num_layers={wish.recompute_layers}, but a stage has "
            f"{per_stage}",
            float("inf"),
        )
    wanted = wish.recompute_layers
    for layers in range(0, per_stage + 1, wish.virtual_stages) if wanted is None else [wanted]:
        actor = dataclasses.replace(split, recompute_layers=layers)
        phases = beside_sleeping_engine(wish.spec, actor, _step(wish, actor))
        peak = max(phases, key=lambda one: one.num_bytes)
        if peak.num_bytes <= usable_bytes(wish.gpu.memory_gib):
            return actor, phases
    _refuse_if_full(wish, peak, f"{name}, {layers} of {per_stage} layers recomputed")
    raise AssertionError("a phase that does not fit is refused")


def _with_more_sequences(
    wish: Wish, actor: ActorShape, phases: list[Phase]
) -> tuple[ActorShape, list[Phase]]:
    """The number of longest sequences in a micro-batch with which the actor is fastest.

    Short sequences alone leave the GPU waiting for the host. Nothing more is recomputed for it.
    """
    work, longest = wish.work, actor.max_tokens
    minibatch = work.sequences // work.minibatches // actor.layout.data_parallel

    def seconds(one: ActorShape) -> float:
        spec, gpu = wish.spec, wish.gpu
        return sum(actor_time_s(spec, one, work, gpu, wish.efficiency, wish.gpus_per_node))

    launch_bound = wish.spec.experts > 0 or wish.spec.num_parameters <= SMALL_PARAMETERS
    counts = -(-BUSY_TOKENS // longest) if launch_bound else BUSY_TOKENS // longest
    gain = 0.0 if launch_bound else EQUAL_SHARE
    best = actor, phases
    for count in range(2, min(minibatch, counts) + 1):
        more = dataclasses.replace(actor, max_tokens=count * longest)
        needed = beside_sleeping_engine(wish.spec, more, _step(wish, more))
        if max(one.num_bytes for one in needed) > usable_bytes(wish.gpu.memory_gib):
            break
        if seconds(more) <= (1 - gain) * seconds(best[0]):
            best = more, needed
    return best


def _step(wish: Wish, actor: ActorShape) -> Step:
    ranks, longest = actor.layout.data_parallel, wish.work.longest_tokens
    minibatches = wish.work.minibatches * ranks
    replayed = -(-wish.work.sequences // ranks) * longest if wish.replays else 0
    return Step(
        # At most one sequence each.
        microbatches=max(1, -(-wish.work.sequences // minibatches)),
        longest_tokens=longest,
        bucket_bytes=wish.bucket_size_mib * MIB,
        reference=wish.reference,
        value_model=wish.value_model,
        whole_logits=wish.whole_logits,
        triton_logits=wish.triton_logits,
        offload=wish.offload or "none",
        offload_in_backward=bool(wish.offload_in_backward),
        minibatches=wish.work.minibatches,
        replayed_tokens=replayed,
        sampled_routes=wish.routing_replay is RoutingReplay.engine,
        quantized=wish.quantized,
    )


def most_tokens(wish: Wish, actor: ActorShape, step: int = 1024) -> int:
    """The largest micro-batch that fits when every layer is recomputed.

    Args:
        actor: A layout that fits as it is.
        step: The result is a multiple of it, or the present length.
    """
    per_stage = max(actor.layout.stage_sizes(wish.spec.layers))

    def fits(tokens: int) -> bool:
        one = dataclasses.replace(
            actor, recompute_layers=per_stage, recompute_modules=(), max_tokens=tokens
        )
        peak = max(
            phase.num_bytes for phase in beside_sleeping_engine(wish.spec, one, _step(wish, one))
        )
        return peak <= usable_bytes(wish.gpu.memory_gib)

    # Memory grows with the length, so what fits ends somewhere below the first that does not.
    low = actor.max_tokens // step
    high = low + 1
    while fits(high * step):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return max(actor.max_tokens, low * step)


def _best_engine(wish: Wish, share: float, name: str) -> tuple[int, int, float, Decoding]:
    """Tensor ranks and running sequences of the engines with which sampling is fastest, and tokens
    of a cache."""
    spec, work = wish.spec, wish.work
    node = min(wish.gpus, wish.gpus_per_node)
    ranks = [wish.engine_tp] if wish.engine_tp else range(1, node + 1)
    counts = RUNNING_CHOICES if wish.max_running is None else (wish.max_running,)
    best: tuple[int, int, float, Decoding] | None = None
    misses = []
    for tp, most in itertools.product(ranks, counts):
        if node % tp or not _engine_splits(spec, tp):
            continue
        adapters = wish.lora if wish.unmerged else None
        fixed = engine_fixed_terms(spec, tp, most, adapters, wish.quantized)
        room = share * wish.gpu.memory_gib * GIB - sum(fixed.values())
        tokens = room / kv_bytes(spec, tp, wish.kv_cache_in_fp8)
        if tokens < work.longest_tokens:
            one = work.longest_tokens * kv_bytes(spec, tp, wish.kv_cache_in_fp8)
            needed = Phase(f"engine TP {tp}", fixed | {"cache of one sequence": one})
            misses.append(
                _Miss(
                    f"{name}: {needed.describe()}, but the actor leaves it "
                    f"{max(0.0, share * wish.gpu.memory_gib):.1f} GiB",
                    one - room,
                )
            )
            continue
        engines = wish.gpus // tp
        weights = engine_weights_bytes(spec, tp, wish.quantized)
        decoded = decoding(
            spec,
            engines,
            tp,
            tokens,
            most,
            work,
            wish.gpu,
            wish.efficiency,
            weights,
            kv_bytes(spec, tp, wish.kv_cache_in_fp8),
        )
        # More sequences at once have to be worth it; other ranks need no more of anything.
        worth = 1 - EQUAL_SHARE if best is not None and best[0] == tp else 1
        if best is None or decoded.seconds < worth * best[3].seconds:
            best = (tp, most, tokens, decoded)
    if best is not None:
        return best
    if not misses:
        raise _Miss(
            f"{name}: no engine of {wish.engine_tp} ranks: {spec.heads} heads, "
            f"{spec.kv_heads} key-value heads, nodes of {node} GPUs",
            float("inf"),
        )
    raise min(misses, key=lambda miss: miss.excess)
