"""Settings of ``actor``: layout and memory of the Megatron ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rlmath.config.lora import LoraConfig
from rlmath.config.optimizer import OptimizerConfig
from rlmath.utils.setting import NotWith, OnlyWith, setting

Layers = StrEnum("Layers", ["auto", "transformer_engine", "local"])
Recompute = StrEnum("Recompute", ["none", "selective", "full"])
Offload = StrEnum("Offload", ["none", "optimizer", "all"])
RoutingReplay = StrEnum("RoutingReplay", ["none", "old_log_probs", "engine"])
Fp8 = StrEnum("Fp8", ["none", "hybrid", "e4m3"])
Fp8Recipe = StrEnum("Fp8Recipe", ["blockwise", "tensorwise", "mxfp8"])
Logits = StrEnum("Logits", ["auto", "whole", "chunked", "triton"])
# YAML reads on and off as booleans.
SharePrompts = StrEnum("SharePrompts", ["auto", "always", "never"])


@dataclass
class ActorConfig:
    tensor_parallel: int = setting(1, "Tensor-parallel size.", least=1, common=True)
    pipeline_parallel: int = setting(1, "Pipeline-parallel size.", least=1)
    pipeline_layers: list[int] | None = setting(
        None,
        "Layers of each pipeline stage, in order, such as [4,3]; null: as equal as they can be, "
        "with what is left over in the stages between first and last.",
    )
    virtual_stages: int = setting(
        1,
        "Chunks of the model on each pipeline stage, through which Megatron interleaves the "
        "micro-batches: stages wait less for each other, and send more often. Each chunk has at "
        "least one layer; the micro-batches of a rank become a multiple of pipeline_parallel. "
        "1: off.",
        least=1,
    )
    context_parallel: int = setting(
        1, "Context-parallel size: ranks that share the tokens of each sequence.", least=1
    )
    data_parallel: int | None = setting(
        None, "Data-parallel size; null: all remaining ranks on CUDA, 1 on CPU.", least=1
    )
    expert_parallel: int = setting(
        1,
        "Expert-parallel size of a MoE model, a divisor of tensor_parallel x data_parallel; each "
        "expert is whole on its rank. 1: every model copy has all experts, split over its "
        "tensor-parallel ranks.",
        least=1,
    )
    layers: Layers = setting(
        Layers.auto,
        "Layer implementation: Transformer Engine, or Megatron's own (local). auto uses "
        "Transformer Engine on CUDA and fails if it is missing or broken; on CPU it uses local.",
        not_with=NotWith(
            "cluster.device=cpu",
            "its layers run on CUDA only",
            "use auto or local",
            "transformer_engine",
        ),
    )
    sequence_parallel: bool = setting(
        False,
        "Split activations along the sequence between tensor-parallel ranks where matrices are not "
        "split.",
        not_with=NotWith(
            "actor.tensor_parallel=1",
            "there are no ranks to share the sequence",
            "set it to false, or tensor_parallel to 2 or more",
        ),
    )
    distributed_optimizer: bool = setting(
        True, "Shard the optimizer state over data-parallel ranks."
    )
    overlap_gradients: bool = setting(
        False,
        "Sum gradients over data-parallel ranks bucket by bucket during the backward pass of a "
        "minibatch's last micro-batch, instead of after it.",
    )
    overlap_param_gather: bool = setting(
        False,
        "All-gather updated weights over data-parallel ranks bucket by bucket during the next "
        "forward pass, instead of before it. Saves time between the minibatches of a step, and "
        "between the steps of SFT; after a step's last minibatch the weight sync waits for all. "
        "Needs distributed_optimizer; takes the buckets of overlap_gradients.",
        only_with=OnlyWith("overlap_gradients", (True,)),
        not_with=(
            NotWith(
                "actor.distributed_optimizer=false",
                "every rank updates all weights, and there are none to gather",
                "set it to false, or distributed_optimizer=true",
            ),
            NotWith(
                "algorithm.minibatches_per_step=1",
                "no forward pass follows the optimizer step before the weight sync, which waits "
                "for all weights, so nothing would be hidden",
                "set it to false, or minibatches_per_step to 2 or more",
            ),
        ),
    )
    recompute: Recompute = setting(
        Recompute.none,
        "Activation recomputation: none, selective (modules of every layer), or full (whole "
        "layers).",
    )
    recompute_modules: list[str] | None = setting(
        None,
        "What of every layer the backward pass computes again: some of mlp (the feed-forward of a "
        "dense layer), moe (that of a MoE layer, router and experts), shared_experts and core_attn "
        "(which saves little where attention is one kernel); null: mlp and moe.",
        only_with=OnlyWith("recompute", (Recompute.selective,)),
    )
    recompute_num_layers: int | None = setting(
        None,
        "recompute=full: number of recomputed layers per pipeline stage; null: all.",
        least=1,
        only_with=OnlyWith("recompute", (Recompute.full,)),
    )
    logits: Logits = setting(
        Logits.auto,
        "How log-probs are taken of the output layer: whole logits of a micro-batch, or chunked, a "
        "few rows at a time and once more in the backward pass, which takes well under 1 GiB at "
        "any number of tokens; triton: chunked, with the softmax in two Triton kernels, on CUDA "
        "only. auto: triton on CUDA (chunked where Triton is missing), whole on CPU.",
        not_with=NotWith(
            "cluster.device=cpu",
            "Triton compiles for GPUs",
            "use chunked, which computes the same, or auto",
            "triton",
        ),
    )
    fp8: Fp8 = setting(
        Fp8.none,
        "Multiply the matrices of layers in FP8 (Transformer Engine), in all passes of the policy, "
        "its reference and the value model; weights, gradients, the router and the output layer "
        "stay as they are. hybrid: e4m3, and e5m2 for the gradients of activations; e4m3: for all. "
        "none: off. Experimental: a GPU has seen updates of one model with it, and no training.",
        not_with=(
            NotWith("cluster.device=cpu", "Transformer Engine supports CUDA only", "use none"),
            NotWith(
                "actor.layers=local",
                "only Transformer Engine's layers support it, and these are Megatron's own",
                "use actor.layers=auto, or none",
            ),
            NotWith(
                "model.dtype=float32",
                "Transformer Engine's FP8 products give back 16 bits",
                "use bfloat16, or none",
            ),
            NotWith(
                "precision.batch_invariant=true",
                "Megatron's batch-invariant products replace Transformer Engine's and do not "
                "support FP8",
                "use one of the two",
            ),
        ),
    )
    fp8_recipe: Fp8Recipe = setting(
        Fp8Recipe.blockwise,
        "What shares a scale in FP8: blockwise: 128 numbers of a token's row, 128 x 128 of a "
        "weight (Hopper or newer); mxfp8: 32 numbers (Blackwell); tensorwise: a whole tensor, "
        "whose log-probs therefore depend on what else is in the micro-batch (Hopper or newer).",
        only_with=OnlyWith("fp8", (Fp8.hybrid, Fp8.e4m3)),
    )
    offload: Offload = setting(
        Offload.none,
        "What the ranks move to host memory while engines sample: none; optimizer (main "
        "parameters and Adam's moments; gradients are freed); all (weights as well). It comes back "
        "for the phase that needs it. SFT, which has no engines, moves nothing.",
        not_with=NotWith(
            "cluster.placement=separate",
            "it makes room for engines on the actor's GPUs, and these have their own",
            "set it to none",
        ),
    )
    offload_in_backward: bool = setting(
        False,
        "Keep main parameters and Adam's moments in host memory while the gradients of a "
        "minibatch are computed as well, and bring them back for each optimizer step: activations "
        "get their memory, and each minibatch waits for two copies.",
        only_with=OnlyWith("offload", (Offload.optimizer, Offload.all)),
    )
    offload_growth_gib: float = setting(
        2.0,
        "Stop the run when what a rank keeps on its GPU after offloading, or what others keep "
        "there while the engines sleep, is this many GiB above its value at the first step.",
        above=0,
        only_with=OnlyWith("offload", (Offload.optimizer, Offload.all)),
    )
    routing_replay: RoutingReplay = setting(
        RoutingReplay.none,
        "Which routes the update of a MoE takes, in forward and backward, so that a changed route "
        "does not show as a changed policy: none (its own); old_log_probs: those of the "
        "old-log-prob pass; engine: those that the engine sampled with, in the old-log-prob pass "
        "as well. Takes host memory, a byte per token, MoE layer and expert of a token; with "
        "engine, samples carry as much. SFT has no such pass and replays nothing.",
        not_with=NotWith(
            "rollout.prefix_caching=false",
            "vLLM returns routes only with its prefix cache",
            "set rollout.prefix_caching=true, or routing_replay=old_log_probs",
            "engine",
        ),
    )
    routing_mismatch_every: int = setting(
        32,
        "At the first step and every N steps, compute the log-probs of one minibatch without the "
        "replayed routes too, and log the mismatch with and without them. Takes a forward pass of "
        "the minibatch. 0: never.",
        least=0,
        only_with=OnlyWith("routing_replay", (RoutingReplay.old_log_probs, RoutingReplay.engine)),
    )
    max_tokens_per_microbatch: int = setting(
        32768,
        "Maximum tokens per micro-batch, shared by its context-parallel ranks. A longer sequence "
        "forms a micro-batch alone.",
        least=1,
        common=True,
    )
    max_tokens_per_forward: int | None = setting(
        None,
        "Maximum tokens per micro-batch of a forward-only pass (old log-probs, reference, values), "
        "which joins micro-batches of the update: it keeps no activations, and larger ones leave "
        "the GPU waiting for the host less often. The old-log-prob pass of a MoE, and in FP8, "
        "takes the update's, so that routes and scales are the update's. null: twice "
        "max_tokens_per_microbatch on CUDA without pipeline stages, else as many; rlmath plan "
        "layout proposes up to four times.",
        least=1,
    )
    share_prompts: SharePrompts = setting(
        SharePrompts.auto,
        "Compute the prompt of a group once per micro-batch instead of once per sample, forward "
        "and backward; log-probs and gradients differ by rounding alone. always: fail where "
        "that is not possible: on CUDA (the attention of Transformer Engine takes no shared "
        "tokens), with context_parallel above 1, for a MoE, and for latent or linear attention. "
        "auto: where it is possible.",
    )
    num_threads: int | None = setting(
        None,
        "CPU threads per rank; null: all cores divided between the ranks; on GPUs, cores of the "
        "GPU's socket divided between the processes there.",
        least=1,
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
