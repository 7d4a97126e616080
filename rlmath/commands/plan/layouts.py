"""The search: each layout that the settings allow, with its memory and time, or why it fails."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmath.checks.linear_attention import linear_layout_problems
from rlmath.commands.plan.colocated import (
    beside_sleeping_engine,
    engine_fixed_terms,
    resident_bytes,
    settings_in_plan,
    with_awake_engine,
)
from rlmath.commands.plan.engine_adapters import asleep_bytes
from rlmath.commands.plan.engine_memory import engine_weights_bytes, kv_bytes
from rlmath.commands.plan.memory import (
    GIB,
    ActorShape,
    Phase,
    Step,
    engine_share,
    host_bytes,
    moved_bytes,
    usable_bytes,
)
from rlmath.commands.plan.request import OVERLAPS, PINNED, PlanRequest
from rlmath.commands.plan.time import (
    Decoding,
    decoding,
    offload_time_s,
    weight_sync_time_s,
    with_calls_s,
)
from rlmath.config.actor import Offload, Recompute
from rlmath.config.command_line import Given
from rlmath.config.schema import Config
from rlmath.config.settings import value_of
from rlmath.errors import UserError
from rlmath.model.fp8_training import size_problems
from rlmath.model.lora import Lora
from rlmath.model.parallel import even_stages
from rlmath.model.spec import ModelSpec

_SIZES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
# Context-parallel ranks that are tried.
CONTEXT_CHOICES = [1, 2, 4, 8]
# Predictions that differ by less do not tell which is faster.
EQUAL_SHARE = 0.03
# Columns of an expert on a rank, below which its matrices keep a GPU waiting: whole experts are
# shared out instead.
LEAST_EXPERT_WIDTH = 512
# Tried where rollout.max_running_sequences is not given.
RUNNING_CHOICES = (64, 128, 256, 512, 1024)
# Tokens of a micro-batch beyond which more tokens make nothing faster.
BUSY_TOKENS = 16384
# Micro-batches of the update that a forward-only pass takes as one, at most.
MOST_JOINED = 4
# Models up to this size (those called 3B), and those with experts, get at least that many if they
# fit and no prediction says that fewer are faster.
SMALL_PARAMETERS = 3.5e9


@dataclass(frozen=True)
class Plan:
    """A layout that fits: actor and engines take turns on all GPUs."""

    actor: ActorShape
    step: Step
    engine_tp: int  # Tensor-parallel ranks of an engine.
    engines: int
    engine_share: float  # rollout.gpu_memory_utilization.
    cache_tokens: int
    max_running: int  # rollout.max_running_sequences.
    running: int  # Sequences that an engine runs at once, on average.
    phases: tuple[Phase, ...]  # Memory of the fullest GPU in each phase.
    seconds: dict[str, float]
    tail_s: float  # Seconds of sampling after the mean response.
    host_bytes: float  # Host memory that the ranks of a node take at most for tensors.

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.num_bytes)

    def settings(self, config: Config) -> dict[str, Any]:
        actor, layout = self.actor, self.actor.layout
        values: dict[str, Any] = {key: value_of(config, key) for key in PINNED}
        values["actor.tensor_parallel"] = layout.tensor_parallel
        values["actor.pipeline_parallel"] = layout.pipeline_parallel
        if layout.context_parallel > 1:
            values["actor.context_parallel"] = layout.context_parallel
        if layout.expert_parallel > 1:
            values["actor.expert_parallel"] = layout.expert_parallel
        values["actor.sequence_parallel"] = layout.tensor_parallel > 1
        if not actor.recompute_modules:
            values["actor.recompute"] = Recompute.full if actor.recompute_layers else Recompute.none
            values["actor.recompute_num_layers"] = actor.recompute_layers or None
        for key in OVERLAPS:
            if value_of(config, key):
                values[key] = getattr(actor, key.removeprefix("actor."))
        if actor.fp8 is not None:
            values["actor.fp8_recipe"] = config.actor.fp8_recipe
        values["actor.max_tokens_per_microbatch"] = actor.max_tokens
        values["actor.max_tokens_per_forward"] = actor.in_forward.max_tokens
        values["rollout.tensor_parallel"] = self.engine_tp
        values["rollout.max_running_sequences"] = self.max_running
        values["rollout.gpu_memory_utilization"] = self.engine_share
        return values


def with_least_offload(request: PlanRequest) -> tuple[PlanRequest, list[Plan]]:
    """Every layout that fits, with the least offload that it needs, and the request with
    that ``offload`` and ``offload_in_backward``. Raises UserError: nothing fits; see
    :func:`find_plans`."""
    error: UserError | None = None
    for offload, in_backward in _offloads(request.given):
        moved = {"actor.offload": offload} if offload is not Offload.none else {}
        often = {"actor.offload_in_backward": True} if in_backward else {}
        one = request.with_settings({**moved, **often})
        try:
            return one, find_plans(one)
        except UserError as refused:
            error = refused
    assert error is not None
    raise error


def _offloads(given: Given) -> Iterator[tuple[Offload, bool]]:
    """``offload`` and ``offload_in_backward`` as given, from the least to the most that is moved:
    within a step once, then once for each minibatch."""
    asked, in_backward = given.get("actor.offload"), given.get("actor.offload_in_backward")
    if asked is Offload.none:
        in_backward = bool(in_backward)
    for often in (False, True) if in_backward is None else (in_backward,):
        for offload in Offload if asked is None else (asked,):
            # Without an offload it has no effect, as the settings' check reports.
            if asked is not None or not often or offload is not Offload.none:
                yield offload, often


def find_plans(request: PlanRequest) -> list[Plan]:
    """Every layout that fits, the fastest first; see :func:`_order`. Raises UserError: none does;
    the message has the reason of each kind, nearest miss first."""
    plans: list[Plan] = []
    misses: list[_Miss] = []
    for actor, step in _actor_splits(request):
        try:
            plans.append(_plan(request, actor, step))
        except _Miss as miss:
            misses.append(miss)
    if plans:
        return _order(plans)
    reasons = sorted(misses, key=lambda miss: miss.excess)[:4]
    raise UserError(
        f"no layout of this model fits {request.gpus} GPUs of {request.gpu.memory_gib:g} GiB "
        f"(of which {usable_bytes(request.gpu.memory_gib) / GIB:.1f} are planned with):\n  - "
        + "\n  - ".join(map(str, reasons))
    )


def _order(plans: list[Plan]) -> list[Plan]:
    """Order plans by time; among equally fast ones, fewer kinds of parallelism come first."""
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
    linear = spec.linear is None or spec.linear.key_heads % tp == 0
    return spec.heads % tp == 0 and spec.ffn % tp == 0 and heads and linear


def _actor_splits(request: PlanRequest) -> Iterator[tuple[ActorShape, Step]]:
    """Tensor ranks of one node, stages of one layer or more, copies that use every GPU."""
    node, spec, gpus = request.gpus_per_node, request.spec, request.gpus
    asked = {key: request.given.get(f"actor.{key}") for key in _SIZES}
    wanted_tp, wanted_pp, wanted_cp, wanted_ep = asked.values()
    tensor = [wanted_tp] if wanted_tp else [n for n in range(1, node + 1) if node % n == 0]
    stages = [wanted_pp] if wanted_pp else list(range(1, min(spec.layers, gpus) + 1))
    contexts = [wanted_cp] if wanted_cp else CONTEXT_CHOICES
    virtual = request.config.actor.virtual_stages
    found = False
    for pp, cp, tp in itertools.product(stages, contexts, tensor):
        if gpus % (tp * pp * cp) or pp > spec.layers or not _splits(spec, tp):
            continue
        if next(linear_layout_problems(spec, tp, cp), None):
            continue
        # Only chunks of one size are planned, although others can be trained.
        if virtual > 1 and (pp == 1 or any(n % virtual for n in even_stages(spec.layers, pp))):
            continue
        dp = gpus // (tp * pp * cp)
        for ep in _expert_shares(spec, tp, cp, dp, wanted_ep):
            found = True
            yield settings_in_plan(_with_layout(request, tp, pp, cp, ep, dp), spec)
    if not found:
        sizes = asked | ({"virtual_stages": virtual} if virtual > 1 else {})
        raise UserError(
            " ".join(f"actor.{key}={value or 'any'}" for key, value in sizes.items())
            + f": of {gpus} GPUs in nodes of {node}, {spec.heads} heads, {spec.kv_heads} "
            f"key-value heads, {spec.layers} layers and {spec.experts} experts nothing divides so"
        )


def _with_layout(request: PlanRequest, tp: int, pp: int, cp: int, ep: int, dp: int) -> Config:
    """The settings of a run in a layout, with nothing recomputed but modules."""
    actor = request.config.actor
    several, minibatches = dp * cp > 1, request.work.minibatches
    modules = actor.recompute is Recompute.selective
    return request.layout_config(
        {
            **{f"actor.{key}": n for key, n in zip(_SIZES, (tp, pp, cp, ep), strict=True)},
            "actor.sequence_parallel": tp > 1,
            "actor.recompute": Recompute.selective if modules else Recompute.none,
            # One copy has no gradients to add up, one minibatch no later pass to gather in.
            "actor.overlap_gradients": actor.overlap_gradients and several,
            "actor.overlap_param_gather": actor.overlap_param_gather
            and several
            and minibatches > 1,
            "actor.max_tokens_per_microbatch": request.given.get("actor.max_tokens_per_microbatch")
            or request.work.longest_tokens,
        }
    )


def _expert_shares(spec: ModelSpec, tp: int, cp: int, dp: int, asked: int | None) -> list[int]:
    """Expert-parallel ranks: 1 of a dense model; none where an MoE cannot be laid out so."""
    if not spec.experts:
        choices = [1]
    elif cp > 1:
        choices = []  # An MoE takes whole sequences.
    else:
        narrow = tp > 1 and spec.moe_ffn / tp < LEAST_EXPERT_WIDTH and asked is None
        cut = [] if narrow or spec.moe_ffn % tp else [1]
        whole = range(2, tp * dp + 1)
        choices = cut + [n for n in whole if spec.experts % n == 0 and tp * dp % n == 0]
    return [n for n in choices if asked in (None, n)]


def _plan(request: PlanRequest, split: ActorShape, step: Step) -> Plan:
    work, spec, dp, name = request.work, request.spec, split.layout.data_parallel, str(split)
    if work.sequences % (work.minibatches * dp):
        raise _Miss(
            f"{name}: {work.sequences} sequences / {work.minibatches} minibatches / {dp} copies = "
            f"{work.sequences / work.minibatches / dp:g} does not divide",
            float("inf"),
        )
    if split.fp8 is not None and (sizes := [*size_problems(spec, split.layout, split.fp8)]):
        raise _Miss(
            f"{name}: actor.fp8_recipe={split.fp8.recipe}: {'; '.join(sizes)}", float("inf")
        )
    actor, phases = _with_least_recompute(request, split, step)
    if "actor.max_tokens_per_microbatch" not in request.given.keys:
        actor, phases = _with_more_sequences(request, actor, step, phases)
    if "actor.max_tokens_per_forward" not in request.given.keys:
        actor, phases = _with_joined_micro_batches(request, actor, step, phases)
    share = engine_share(request.gpu.memory_gib, resident_bytes(phases))
    engine_tp, max_running, cache_tokens, decoded = _best_engine(
        request, share, name, actor.engine_adapters
    )
    engine_bytes = share * request.gpu.memory_gib * GIB
    adapters = actor.engine_adapters
    together = with_awake_engine(spec, phases, step, engine_tp, engine_bytes, adapters)
    for phase in together:
        if phase.name == "weight sync":
            _refuse_if_full(request, phase, name)
    log_probs_s, update_s = request.actor_time_s(actor)
    ranks = request.gpus_per_node
    host = host_bytes(spec, actor, step, ranks)
    if adapters is None:
        expert_part = actor.layout.pipeline_parallel / engine_tp
        weight_sync_s = weight_sync_time_s(
            spec, actor.layout, request.gpu, request.efficiency, request.gpus_per_node, expert_part
        )
    else:
        # Little is sent; the base model goes to host memory and comes back.
        asleep = asleep_bytes(spec, engine_tp, adapters)
        weight_sync_s = offload_time_s(asleep, request.efficiency)
        host += ranks * asleep
    return Plan(
        actor=actor,
        step=step,
        engine_tp=engine_tp,
        engines=request.gpus // engine_tp,
        engine_share=share,
        cache_tokens=int(cache_tokens),
        max_running=max_running,
        running=decoded.running,
        phases=tuple(together),
        tail_s=decoded.tail_s,
        host_bytes=host,
        seconds={
            "generate": with_calls_s(decoded.seconds, request.work),
            "log_probs": log_probs_s,
            "update": update_s,
            "weight_sync": weight_sync_s,
            "offload": offload_time_s(moved_bytes(spec, actor, step), request.efficiency),
        },
    )


def _refuse_if_full(request: PlanRequest, phase: Phase, name: str) -> None:
    excess = phase.num_bytes - usable_bytes(request.gpu.memory_gib)
    if excess > 0:
        raise _Miss(f"{name}: {phase.describe()}", excess)


def _with_least_recompute(
    request: PlanRequest, split: ActorShape, step: Step, least: int = 0
) -> tuple[ActorShape, list[Phase]]:
    """The fewest recomputed layers of a stage, ``least`` or more, with which every phase of the
    actor fits."""
    per_stage, name = max(split.layout.stage_sizes(request.spec.layers)), str(split)
    wanted = _recomputed_layers(request.given)
    if wanted is not None and not 0 <= wanted <= per_stage:
        raise _Miss(
            f"{name}: actor.recompute_num_layers={wanted}, but a stage has {per_stage}",
            float("inf"),
        )
    by = split.layout.virtual_stages
    for layers in range(least, per_stage + 1, by) if wanted is None else [wanted]:
        actor = dataclasses.replace(split, recompute_layers=layers)
        phases = beside_sleeping_engine(request.spec, actor, step)
        peak = max(phases, key=lambda one: one.num_bytes)
        if peak.num_bytes <= usable_bytes(request.gpu.memory_gib):
            return actor, phases
    _refuse_if_full(request, peak, f"{name}, {layers} of {per_stage} layers recomputed")
    raise AssertionError("a phase that does not fit is refused")


def _recomputed_layers(given: Given) -> int | None:
    """Layers of a stage that are recomputed; ``None``: as few as fit."""
    if given.get("actor.recompute") in (Recompute.none, Recompute.selective):
        return 0
    layers: int | None = given.get("actor.recompute_num_layers")
    return layers


def _with_more_sequences(
    request: PlanRequest, actor: ActorShape, step: Step, phases: list[Phase]
) -> tuple[ActorShape, list[Phase]]:
    """Number of longest sequences in a micro-batch with which the actor is fastest.

    Short sequences alone leave the GPU waiting for the host. Where its launches bound it, in small
    models and in MoE ones, as many as make ``BUSY_TOKENS``, and layers are recomputed for it; else
    as few as possible.
    """
    work, longest = request.work, actor.max_tokens
    minibatch = work.sequences // work.minibatches // actor.layout.data_parallel

    def seconds(one: ActorShape) -> float:
        return sum(request.actor_time_s(one))

    launch_bound = request.spec.experts > 0 or request.spec.num_parameters <= SMALL_PARAMETERS
    counts = -(-BUSY_TOKENS // longest) if launch_bound else BUSY_TOKENS // longest
    fitting = [(actor, phases)]
    for count in range(2, min(minibatch, counts) + 1):
        more = dataclasses.replace(actor, max_tokens=count * longest)
        try:
            recomputed = fitting[-1][0].recompute_layers
            fitting.append(_with_least_recompute(request, more, step, recomputed))
        except _Miss:
            break
    limit = (1 + EQUAL_SHARE) * min(seconds(one) for one, _ in fitting)
    fast = [pair for pair in fitting if seconds(pair[0]) <= limit]
    return fast[-1] if launch_bound else fast[0]


def _with_joined_micro_batches(
    request: PlanRequest, actor: ActorShape, step: Step, phases: list[Phase]
) -> tuple[ActorShape, list[Phase]]:
    """The most micro-batches of the update that a forward-only pass takes as one: those with which
    it is fastest, and no phase takes more memory than the fullest one takes already."""
    peak = max(phase.num_bytes for phase in phases)

    def seconds(one: ActorShape) -> float:
        return request.actor_time_s(one)[0]

    best, found = dataclasses.replace(actor, max_forward_tokens=0), phases
    for times in range(2, MOST_JOINED + 1):
        one = dataclasses.replace(actor, max_forward_tokens=times * actor.max_tokens)
        larger = beside_sleeping_engine(request.spec, one, step)
        if max(phase.num_bytes for phase in larger) > peak or seconds(one) > seconds(best):
            break
        best, found = one, larger
    return best, found


def most_tokens(request: PlanRequest, plan: Plan) -> int:
    """The largest micro-batch that fits when every layer is recomputed: whole 1024s, or the present
    length."""
    unit = 1024
    spec, actor = request.spec, plan.actor
    per_stage = max(actor.layout.stage_sizes(spec.layers))

    def fits(tokens: int) -> bool:
        one = dataclasses.replace(
            actor, recompute_layers=per_stage, recompute_modules=(), max_tokens=tokens
        )
        phases = beside_sleeping_engine(spec, one, plan.step)
        peak = max(phase.num_bytes for phase in phases)
        return peak <= usable_bytes(request.gpu.memory_gib)

    # Memory grows with the length, so the longest that fits is below the first that does not.
    low = actor.max_tokens // unit
    high = low + 1
    while fits(high * unit):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return max(actor.max_tokens, low * unit)


def _best_engine(
    request: PlanRequest, share: float, name: str, adapters: Lora | None
) -> tuple[int, int, float, Decoding]:
    """Tensor ranks and running sequences of the engines with which sampling is fastest, and tokens
    of a cache."""
    spec, work = request.spec, request.work
    node, engine_tp = request.gpus_per_node, request.given.get("rollout.tensor_parallel")
    ranks = [engine_tp] if engine_tp else range(1, node + 1)
    running = request.given.get("rollout.max_running_sequences")
    counts = RUNNING_CHOICES if running is None else (running,)
    best: tuple[int, int, float, Decoding] | None = None
    misses = []
    for tp, most in itertools.product(ranks, counts):
        if node % tp or not _splits(spec, tp) or spec.moe_ffn % tp:
            continue
        fixed = engine_fixed_terms(spec, tp, most, adapters, request.quantized)
        room = share * request.gpu.memory_gib * GIB - sum(fixed.values())
        token_bytes = kv_bytes(spec, tp, request.kv_cache_in_fp8, work.mean_tokens)
        tokens = room / token_bytes
        if tokens < work.longest_tokens:
            one = work.longest_tokens * token_bytes
            needed = Phase(f"engine TP {tp}", fixed | {"cache of one sequence": one})
            misses.append(
                _Miss(
                    f"{name}: {needed.describe()}, but the actor leaves it "
                    f"{max(0.0, share * request.gpu.memory_gib):.1f} GiB",
                    one - room,
                )
            )
            continue
        engines = request.gpus // tp
        weights = engine_weights_bytes(spec, tp, request.quantized)
        decoded = decoding(
            spec,
            engines,
            tp,
            tokens,
            most,
            work,
            request.gpu,
            request.efficiency,
            weights,
            token_bytes,
        )
        # More sequences at once have to be worth it; other ranks need no more of anything.
        worth = 1 - EQUAL_SHARE if best is not None and best[0] == tp else 1
        if best is None or decoded.seconds < worth * best[3].seconds:
            best = (tp, most, tokens, decoded)
    if best is not None:
        return best
    if not misses:
        raise _Miss(
            f"{name}: no engine of {engine_tp} ranks: {spec.heads} heads, "
            f"{spec.kv_heads} key-value heads, nodes of {node} GPUs",
            float("inf"),
        )
    raise min(misses, key=lambda miss: miss.excess)
