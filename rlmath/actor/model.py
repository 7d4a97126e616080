"""Build Megatron's ``GPTModel`` from a model spec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from rlmath.actor.experts import moe_settings
from rlmath.actor.fp8 import fp8_settings
from rlmath.actor.fusions import fusion_settings
from rlmath.actor.head import defer_logits
from rlmath.actor.latent import (
    config_class,
    latent_settings,
    prepare_without_te,
    share_rotary_table,
    sum_rotary_key_gradients,
)
from rlmath.actor.layers import hybrid_settings, layer_spec
from rlmath.actor.rotary import keep_one_rotary_table, rope_inverse_frequencies, softmax_scale
from rlmath.actor.windows import rotate_windowed_layers, scale_by_layer, window_settings
from rlmath.config.actor import ActorConfig
from rlmath.device import Platform
from rlmath.device.batch_invariant import enable_batch_invariance
from rlmath.device.fp8 import require_fp8
from rlmath.errors import UserError
from rlmath.model.families import QkNorm
from rlmath.model.fp8_training import Fp8Training
from rlmath.model.parallel import Layout
from rlmath.model.precision import Precision
from rlmath.model.spec import ModelSpec, padded_vocab_size


@dataclass(frozen=True)
class ModelSettings:
    """Settings for building the model, in addition to its spec."""

    # Type of parameters and activations; gradients and the optimizer state are float32.
    dtype: torch.dtype
    # Shard activations between tensor ranks outside of matrices.
    sequence_parallel: bool = ActorConfig.sequence_parallel
    # none, selective (modules of every layer) or full (whole layers).
    recompute: str = ActorConfig.recompute.value
    # With full: number of layers per stage, from the first; None: all.
    recompute_num_layers: int | None = ActorConfig.recompute_num_layers
    recompute_modules: tuple[str, ...] = ()  # With selective: the modules, by Megatron's names.
    # Types of the products that affect log-probs most.
    precision: Precision = field(default_factory=Precision)
    # auto, transformer_engine or local, see choose_platform.
    layers: str = ActorConfig.layers.value
    separate_norms: bool = False  # Do not fuse norms into Transformer Engine's matrices.
    separate_experts: bool = False  # Multiply each of its experts separately.
    # whole; chunked: never whole, see rlmath/actor/head.py; triton: chunked, with Triton's kernels;
    # auto: triton on CUDA.
    logits: str = ActorConfig.logits.value
    fp8: Fp8Training | None = None  # FP8 settings for the matrices of layers; None: no FP8.


def transformer_config(
    spec: ModelSpec,
    layout: Layout,
    platform: Platform,
    settings: ModelSettings,
    max_sequence_length: int,
) -> Any:
    """Megatron's ``TransformerConfig`` for a model (see :func:`build_model`)."""
    on_te = platform.layer_spec == "transformer_engine"
    return config_class(spec)(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.ffn,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        # Megatron sums these norms' gradients over tensor ranks; norms over all heads are sharded.
        qk_layernorm=spec.qk_norm is QkNorm.per_head or spec.latent is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Weights are always loaded from a folder, so random initialization is unnecessary. It is
        # not disabled, though, because it also marks parameters as sharded over tensor ranks, and
        # without the mark the gradient norm would count only one rank's part.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        use_cpu_initialization=platform.name == "cpu",
        **_parallel(spec, layout),
        sequence_parallel=settings.sequence_parallel and layout.tensor_parallel > 1,
        params_dtype=settings.dtype,
        pipeline_dtype=settings.dtype,
        bf16=settings.dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        softmax_scale=softmax_scale(spec) if spec.latent is None else None,
        **latent_settings(spec),
        **window_settings(spec, max_sequence_length),
        **hybrid_settings(spec),
        # Micro-batches vary in size, also between ranks that share experts; Megatron checks the
        # dispatcher for that even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss is already divided by its global denominator; gradients are summed, not averaged.
        calculate_per_token_loss=True,
        **fusion_settings(on_te),
        **invariance_settings(settings.precision, on_te),
        **fp8_settings(settings.fp8, on_te),
        **_recomputing(spec, layout, settings),
        **moe_settings(
            spec,
            layout,
            settings.precision.router_dtype,
            grouped=on_te and not settings.separate_experts,
        ),
    )


def _recomputing(spec: ModelSpec, layout: Layout, settings: ModelSettings) -> dict[str, Any]:
    """Fields for recomputed activations; empty if all are kept."""
    if settings.recompute == "full":
        chunks = layout.virtual_stages
        layers_per_chunk = -(-max(layout.stage_sizes(spec.layers)) // chunks)
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            # A chunk with fewer layers recomputes all of them.
            "recompute_num_layers": min(
                (settings.recompute_num_layers or layers_per_chunk * chunks) // chunks,
                layers_per_chunk,
            ),
        }
    if settings.recompute == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(settings.recompute_modules),
        }
    return {}


def _parallel(spec: ModelSpec, layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor_parallel,
        "pipeline_model_parallel_size": layout.pipeline_parallel,
        "pipeline_model_parallel_layout": _stages(spec, layout),
        "context_parallel_size": layout.context_parallel,
        **_interleaving(layout),
    }


def _stages(spec: ModelSpec, layout: Layout) -> list[list[str]] | None:
    """Content of each chunk of the model, by Megatron's names, from the embedding to the loss."""
    by_stage = layout.stage_chunks(spec.layers)
    if len(by_stage) == 1:
        return None
    chunks = [["decoder"] * len(chunk) for level in zip(*by_stage, strict=True) for chunk in level]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _interleaving(layout: Layout) -> dict[str, Any]:
    """Fields of Megatron's interleaved schedule; empty without virtual stages."""
    if layout.virtual_stages == 1:
        return {}
    # Send and receive separately: in a batch, two stages that are each before and after the other
    # would mistake an activation for a gradient.
    return {"overlap_p2p_comm": True, "batch_p2p_comm": False}


def invariance_settings(precision: Precision, on_te: bool) -> dict[str, Any]:
    """Fields for batch-invariant and deterministic kernels; empty unless requested. Raises
    UserError: the layers are not Transformer Engine's."""
    if not precision.batch_invariant:
        return {}
    if not on_te:
        raise UserError(
            "precision.batch_invariant=true: Megatron has batch-invariant kernels only for "
            "Transformer Engine's layers, but the layers here are Megatron's own; set it to false"
        )
    from megatron.core.transformer.enums import AttnBackend

    return {
        "batch_invariant_mode": True,
        # The only backend that Megatron allows with it.
        "attention_backend": AttnBackend.flash,
        # The backward pass is not batch-invariant, but at least deterministic.
        "deterministic_mode": True,
    }


def _leave_as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def build_chunks(
    spec: ModelSpec,
    layout: Layout,
    platform: Platform,
    settings: ModelSettings,
    max_sequence_length: int,
) -> list[torch.nn.Module]:
    """This rank's stage of the model, one chunk per virtual stage (see :func:`build_model`)."""
    return [
        build_model(spec, layout, platform, settings, max_sequence_length, chunk)
        for chunk in range(layout.virtual_stages)
    ]


def build_model(
    spec: ModelSpec,
    layout: Layout,
    platform: Platform,
    settings: ModelSettings,
    max_sequence_length: int,
    chunk: int = 0,
) -> torch.nn.Module:
    """Build a chunk of this rank's stage of the model, with uninitialized parameters.

    The parallel state must be initialized (:func:`rlmath.actor.parallel.initialize`).
    ``max_sequence_length``: maximum sequence length, in tokens. ``chunk``: virtual stage. Raises
    UserError: batch invariance or FP8 is not available here.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    config = transformer_config(spec, layout, platform, settings, max_sequence_length)
    if spec.latent is not None:
        prepare_without_te()
    if config.batch_invariant_mode:
        enable_batch_invariance()
    if settings.fp8 is not None:
        require_fp8(settings.fp8)
    vp_stage = chunk if layout.virtual_stages > 1 else None
    layers = layer_spec(config, spec.family, platform, settings.separate_norms, vp_stage)
    scale_by_layer(layers, spec)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=padded_vocab_size(spec.vocab, layout.tensor_parallel),
        max_sequence_length=max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_percent=spec.partial_rotary,
        rotary_base=10000,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    if spec.latent is None:
        frequencies, _ = rope_inverse_frequencies(spec)
        model.rotary_pos_emb.inv_freq = frequencies.to(platform.torch_device)
        keep_one_rotary_table(model.rotary_pos_emb)
        rotate_windowed_layers(model, spec)
    else:
        share_rotary_table(model)
        sum_rotary_key_gradients(model)
    if model.post_process:
        _choose_logits(model.output_layer, platform, settings)
    return model.to(platform.torch_device)


def _choose_logits(output_layer: Any, platform: Platform, settings: ModelSettings) -> None:
    """Compute logits as ``actor.logits`` and ``precision.lm_head_dtype`` say."""
    in_float32 = settings.precision.lm_head_dtype == "float32"
    logits = settings.logits
    if logits == "auto" and platform.name != "cpu":
        logits = "triton" if platform.runs_triton else "chunked"
    if logits in ("chunked", "triton"):
        defer_logits(output_layer, in_float32, triton=logits == "triton")
    elif in_float32:
        _multiply_in_float32(output_layer)


def _multiply_in_float32(output_layer: Any) -> None:
    """Let the output layer multiply in float32; the parameter keeps its type."""
    multiply = output_layer._forward_impl

    def in_float32(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return multiply(input.float(), weight.float(), *args, **kwargs)

    output_layer._forward_impl = in_float32
