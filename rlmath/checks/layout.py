"""Divisibility of batch, heads, layers, lengths and the engines' cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from rlmath.cluster import placement
from rlmath.config.arithmetic import RunLayout, batch_of
from rlmath.config.benchmarks import benchmarks_of, longest_response_tokens
from rlmath.config.rollout import KvCacheDtype
from rlmath.config.schema import Config, Device, DType, Recompute
from rlmath.config.settings import replace_values
from rlmath.errors import ConfigError, UserError
from rlmath.model.families import QkNorm
from rlmath.model.parallel import Layout, chunk_problem, even_stages, stage_problem
from rlmath.model.spec import ModelSpec

# vLLM hands out its CPU cache in blocks of this many tokens.
CPU_BLOCK_TOKENS = 128
# Widths of a head for which vLLM's CPU attention has a kernel.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
GIB = 2**30


def nearest(value: int, works: Callable[[int], bool], most: int = 1 << 20) -> list[int]:
    """The nearest numbers below and above ``value`` that work, from 1 to ``most``."""
    below = next((n for n in range(min(value - 1, most), 0, -1) if works(n)), None)
    above = next((n for n in range(value + 1, min(most, 4 * value + 64) + 1) if works(n)), None)
    return [n for n in (below, above) if n is not None]


def one_of(numbers: list[int]) -> str:
    """``3, 4 or 6``."""
    head, last = numbers[:-1], numbers[-1:]
    return " or ".join([", ".join(map(str, head))] * bool(head) + [str(n) for n in last])


def batch_divides(config: Config, layout: RunLayout, command: str) -> Iterator[str]:
    """Every rank of every optimizer step gets the same number of sequences."""
    ranks = layout.actor.data_parallel
    if command == "sft":
        count = config.sft.sequences_per_step
        if count % ranks:
            choices = nearest(count, lambda n: n % ranks == 0)
            yield (
                f"sft.sequences_per_step={count}: {count} / {ranks} data-parallel ranks leaves "
                f"{count % ranks}; works: {one_of(choices)}"
            )
        return
    batch = batch_of(config, layout)
    if command != "train" or batch.divides():
        return
    parts = batch.minibatches * ranks
    samples, prompts, minibatches = batch.samples, batch.prompts, batch.minibatches
    options = {
        "algorithm.prompts_per_step": nearest(prompts, lambda n: n * samples % parts == 0),
        "algorithm.group_size": nearest(samples, lambda n: n * prompts % parts == 0),
        "algorithm.minibatches_per_step": nearest(
            minibatches, lambda n: batch.sequences % (n * ranks) == 0, most=batch.sequences
        ),
        "actor.data_parallel": nearest(
            ranks, lambda n: batch.sequences % (n * minibatches) == 0, most=batch.sequences
        ),
    }
    works = "; ".join(f"{key}={one_of(numbers)}" for key, numbers in options.items() if numbers)
    yield (
        f"algorithm.prompts_per_step={prompts}: {prompts} prompts x {samples} samples = "
        f"{batch.sequences} sequences, / {minibatches} minibatches / {ranks} data-parallel ranks "
        f"= {batch.sequences / parts:g} does not divide; works: {works}"
    )


def tensor_groups_have_nodes(config: Config, layout: RunLayout, command: str) -> Iterator[str]:
    if layout.device is Device.cpu:
        return
    if command != "train":  # As a run places it, which asks the teacher in training only.
        layout = dataclasses.replace(layout, teacher_engines=0)
    nodes = placement.whole_nodes(placement.reserved_gpus(layout), config.cluster.gpus_per_node)
    try:
        placement.assign(layout, nodes)
    except UserError as error:
        yield str(error)


def gradient_copies(config: Config, layout: RunLayout) -> Iterator[str]:
    if config.actor.overlap_gradients and layout.actor.copies == 1:
        yield (
            "actor.overlap_gradients=true: one data-parallel x one context-parallel rank have no "
            "gradients to add up; set it to false"
        )


def model_splits(config: Config, model: ModelSpec, command: str) -> Iterator[str]:
    """Tensor and pipeline ranks get whole heads, columns and layers."""
    if command != "evaluate":
        # Without expert parallelism tensor ranks have slices of each expert (``experts``).
        sliced = model.moe_ffn if config.actor.expert_parallel == 1 else 0
        yield from tensor_parallel_problems("actor", config.actor.tensor_parallel, model, sliced)
        yield from _layers(config, model)
    if command != "sft":
        yield from tensor_parallel_problems("rollout", config.rollout.tensor_parallel, model, 0)


def divided_layout(config: Config, model: ModelSpec) -> Layout:
    """The actor's layout with one copy of the model, or as many as its experts spread over. Raises
    ConfigError: the model does not divide so."""
    actor = config.actor
    tensor, ranks = actor.tensor_parallel, actor.expert_parallel
    layout = Layout(
        tensor,
        actor.pipeline_parallel,
        math.lcm(tensor, ranks) // tensor,
        expert_parallel=ranks,
        pipeline_layers=tuple(actor.pipeline_layers or ()),
        virtual_stages=actor.virtual_stages,
    )
    shared = replace_values(config, {"actor.sequence_parallel": tensor > 1})
    problems = [*model_splits(shared, model, "train"), *experts(shared, model, layout)]
    if problems:
        raise ConfigError.of(problems)
    return layout


def experts(config: Config, model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Expert-parallel ranks get whole experts, or tensor ranks equal parts of each."""
    ranks, tensor = config.actor.expert_parallel, config.actor.tensor_parallel
    data = layout.data_parallel
    of_stage = tensor * data
    if not model.experts:
        if ranks > 1:
            yield (
                f"actor.expert_parallel={ranks}: the model has no experts to share out; set it to 1"
            )
        return
    if model.experts % ranks or of_stage % ranks:
        works = [n for n in range(1, of_stage + 1) if model.experts % n == of_stage % n == 0]
        yield (
            f"actor.expert_parallel={ranks}: {model.experts} experts / {ranks} leaves "
            f"{model.experts % ranks}, {tensor} tensor x {data} data-parallel "
            f"ranks / {ranks} leaves {of_stage % ranks}; works: {one_of(works)}"
        )
    if ranks == 1 and model.moe_ffn % tensor:
        yield (
            f"actor.tensor_parallel={tensor}: width of an expert {model.moe_ffn} / {tensor} "
            f"leaves {model.moe_ffn % tensor}; share experts out whole, with "
            "actor.expert_parallel of 2 or more"
        )
    if layout.context_parallel > 1:
        yield (
            f"actor.context_parallel={layout.context_parallel}: an MoE needs whole "
            "sequences; set it to 1"
        )
    if tensor > 1 and not config.actor.sequence_parallel:
        yield (
            f"actor.tensor_parallel={tensor}: the ranks would all send every "
            "token to the experts; an MoE needs actor.sequence_parallel=true, or "
            "tensor_parallel=1"
        )


def tensor_parallel_problems(part: str, ranks: int, model: ModelSpec, sliced: int) -> Iterator[str]:
    """The model's matrices divide between the tensor ranks of a part. ``sliced``: width of an
    expert that the ranks share; 0: they share none."""

    sizes = [
        (f"{model.heads} attention heads", model.heads),
        (f"feed-forward width {model.ffn}", model.ffn),
        (f"width of the shared experts {model.shared_ffn}", model.shared_ffn),
    ]
    if part != "actor":
        sizes.append((f"width of an expert {model.moe_ffn}", model.moe_ffn))
    elif model.qk_norm is QkNorm.all_heads:
        together = f"{model.kv_heads} key-value heads, which are normalized together,"
        sizes.append((together, model.kv_heads))
    if model.linear is not None:
        heads = model.linear.key_heads
        sizes.append((f"{heads} key heads of linear attention", heads))
    if part == "actor" and model.latent is not None:
        rank, both = model.latent.query_rank, model.latent.kv_rank + model.latent.rotary_dim
        sizes += [(f"q_lora_rank {rank}", rank), (f"kv_lora_rank + qk_rope_head_dim {both}", both)]

    def obstacles(n: int) -> list[str]:
        found = [f"{text} / {n} leaves {size % n}" for text, size in sizes if size % n]
        # With more ranks than key-value heads, ranks share copies of a head.
        if model.kv_heads % n and n % model.kv_heads:
            found.append(
                f"{model.kv_heads} key-value heads are neither a multiple nor a divisor of {n}"
            )
        return found

    if obstacles(ranks):
        works = [n for n in range(1, model.heads + 1) if not obstacles(n) and sliced % n == 0]
        yield (
            f"{part}.tensor_parallel={ranks}: the model does not divide so: "
            f"{', '.join(obstacles(ranks))}; works: {one_of(works)}"
        )


def _layers(config: Config, model: ModelSpec) -> Iterator[str]:
    stages, recomputed = config.actor.pipeline_parallel, config.actor.recompute_num_layers
    sizes = tuple(config.actor.pipeline_layers or even_stages(model.layers, stages))
    problem = stage_problem(sizes, model.layers, stages)
    if problem:
        yield problem
        return
    virtual = config.actor.virtual_stages
    if virtual > 1 and stages == 1:
        yield (
            f"actor.virtual_stages={virtual}: there are no pipeline stages to interleave at "
            "actor.pipeline_parallel=1; set it to 1, or pipeline_parallel to 2 or more"
        )
        return
    if uneven := chunk_problem(sizes, virtual):
        yield uneven
        return
    in_stage = max(sizes)
    full = config.actor.recompute is Recompute.full
    if full and recomputed is not None and recomputed > in_stage:
        yield (
            f"actor.recompute_num_layers={recomputed}: {model.layers} layers / {stages} stages = "
            f"at most {in_stage} layers a stage; use at most {in_stage}, or null for all"
        )
    if full and recomputed is not None and recomputed % virtual:
        yield (
            f"actor.recompute_num_layers={recomputed}: each of actor.virtual_stages={virtual} "
            f"chunks recomputes as many; use a multiple of {virtual}, or null for all"
        )


def windows(config: Config, model: ModelSpec, layout: RunLayout) -> Iterator[str]:
    """Transformer Engine's ring over context ranks knows no windows."""
    ranks, window = layout.actor.context_parallel, model.sliding_window
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if window is None or ranks == 1 or prompt + response <= window:
        return
    yield (
        f"actor.context_parallel={ranks}: {prompt} prompt + {response} response = "
        f"{prompt + response} tokens, but layers attend only to the last {window} (sliding_window "
        "in config.json), and Transformer Engine's ring over context ranks has no such windows; "
        f"set it to 1, or rollout.max_response_tokens={window - prompt} or less"
    )


def lengths(config: Config, model: ModelSpec, command: str) -> Iterator[str]:
    """Prompt and response fit the positions that the model knows."""
    if command == "sft":
        return
    prompt, most = config.data.max_prompt_tokens, model.max_positions
    limit = f"{most} positions"
    if model.rope.reach is not None and model.rope.reach > most:
        limit += (
            f" (its yarn reaches {model.rope.reach}: raise max_position_embeddings in its "
            "config.json to that)"
        )
    benchmarks = benchmarks_of(config)
    responses: dict[str, int] = {
        f"{benchmark.length_key}.max_response_tokens": benchmark.max_response_tokens
        for benchmark in benchmarks
    }
    if config.eval.max_response_tokens is not None:
        responses["eval.max_response_tokens"] = config.eval.max_response_tokens
    if command == "train" or not benchmarks:
        responses["rollout.max_response_tokens"] = config.rollout.max_response_tokens
    for key, response in responses.items():
        if prompt + response > most:
            room = most - prompt
            works = f"{key}={room} or less, or " if room > 0 else ""
            shorter = (
                f"data.max_prompt_tokens={most - response} or less, or " if most > response else ""
            )
            yield (
                f"{key}={response}: {prompt} prompt + {response} response = {prompt + response} "
                f"tokens, but the model has {limit}; use {works}{shorter}another model"
            )


def cpu_attention(model: ModelSpec, command: str) -> Iterator[str]:
    """A CPU engine has attention for heads of certain widths alone."""
    if command != "sft":
        yield from cpu_heads_problem("model.path", model)


def cpu_heads_problem(key: str, model: ModelSpec) -> Iterator[str]:
    """See :func:`cpu_attention`; ``key`` is the model's setting."""
    if model.latent is None and model.head_dim not in CPU_HEAD_DIMS:
        yield (
            f"{key}: its heads are {model.head_dim} wide, and vLLM's CPU attention supports "
            f"{one_of(list(CPU_HEAD_DIMS))}; use another model, or a GPU"
        )


def kv_cache(config: Config, model: ModelSpec, command: str) -> Iterator[str]:
    """A CPU engine's cache holds one sequence of the longest kind."""
    if command == "sft":
        return
    longest = config.data.max_prompt_tokens + longest_response_tokens(
        config, trains=command == "train"
    )
    value_bytes = 4 if config.model.dtype is DType.float32 else 2
    if config.rollout.kv_cache_dtype is KvCacheDtype.fp8:
        value_bytes = 1
    yield from cpu_cache_problem(
        "rollout.cpu_kv_cache_gib",
        config.rollout.cpu_kv_cache_gib,
        model,
        longest,
        config.rollout.tensor_parallel,
        value_bytes,
    )


def cpu_cache_problem(
    key: str,
    given_gib: float,
    model: ModelSpec,
    longest: int,
    tensor_parallel: int,
    value_bytes: int,
) -> Iterator[str]:
    """See :func:`kv_cache`; ``longest`` in tokens, ``value_bytes`` of one number of a key."""
    blocks = -(-longest // CPU_BLOCK_TOKENS)
    heads, width = max(1, model.kv_heads // tensor_parallel), model.head_dim
    token_bytes = 2 * model.layers * heads * width * value_bytes
    if model.latent is not None:  # One vector for keys and values of all heads.
        heads, width = 1, model.latent.kv_rank + model.latent.rotary_dim
        token_bytes = model.layers * width * value_bytes
    needed_gib = blocks * CPU_BLOCK_TOKENS * token_bytes / GIB
    if model.linear is not None:
        # vLLM makes a block so long that a layer's state of linear attention fits as well.
        linear, of_layer = len(model.linear_layers), token_bytes // model.layers
        state = -(-model.linear.state_bytes // tensor_parallel)
        length = -(-state // (of_layer * CPU_BLOCK_TOKENS)) * CPU_BLOCK_TOKENS
        pages = linear + (model.layers - linear) * -(-longest // length)
        needed_gib = pages * length * of_layer / GIB
        if needed_gib > given_gib:
            yield (
                f"{key}={given_gib:g}: one sequence of {longest} tokens needs {pages} blocks x "
                f"{length} tokens x {of_layer:,} bytes (keys and values of a layer, or its state "
                f"of linear attention) = {needed_gib:.3g} GiB; use at least "
                f"{-(-needed_gib * 4 // 1) / 4:g}"
            )
        return
    if needed_gib > given_gib:
        yield (
            f"{key}={given_gib:g}: one sequence of "
            f"{longest} tokens needs {blocks} blocks x {CPU_BLOCK_TOKENS} tokens x {token_bytes:,} "
            f"bytes (keys and values of {model.layers} layers x {heads} heads x "
            f"{width} x {value_bytes} bytes) = {needed_gib:.3g} GiB; use at least "
            f"{-(-needed_gib * 4 // 1) / 4:g}"
        )


def forward_budget(config: Config) -> Iterator[str]:
    """Forward-only passes join micro-batches of the update."""
    update, forward = config.actor.max_tokens_per_microbatch, config.actor.max_tokens_per_forward
    if forward is not None and forward < update:
        yield (
            f"actor.max_tokens_per_forward={forward}: forward-only passes join micro-batches of "
            f"the update, which have up to {update} tokens (actor.max_tokens_per_microbatch); use "
            "at least as many, or null"
        )


def engine_steps(config: Config, device: Device) -> Iterator[str]:
    """One engine step has room for each running sequence."""
    rollout = config.rollout
    too_few = rollout.max_batched_tokens < rollout.max_running_sequences
    if device is Device.cuda and too_few:
        yield (
            f"rollout.max_batched_tokens={rollout.max_batched_tokens}: "
            f"{rollout.max_running_sequences} running sequences (rollout.max_running_sequences) "
            f"decode {rollout.max_running_sequences} tokens in a step; use at least as many"
        )
