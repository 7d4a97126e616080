"""A Megatron ``GPTModel`` with the architecture that a Hugging Face folder describes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from rlmath.actor.experts import decoder_spec, mixture_settings
from rlmath.actor.parallel import Layout
from rlmath.device import Platform
from rlmath.errors import UserError
from rlmath.precision import Precision
from rlmath.weights.shape import model_shape

# Architectures with Llama's block: RMSNorm, rotary positions, gated SiLU MLP, grouped-query
# attention. What differs is read from the config: biases, normed queries and keys, tied embeddings,
# experts.
SUPPORTED_ARCHITECTURES = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
)


@dataclass(frozen=True)
class ModelSettings:
    """How to build the model, beyond its architecture.

    Attributes:
        dtype: Of parameters and activations; gradients and the optimizer's state are float32.
        sequence_parallel: Split activations between tensor ranks outside the matrices.
        recompute: ``none``, ``selective`` (attention) or ``full`` (whole layers).
        recompute_num_layers: With ``full``: how many layers of each stage, from the first;
            ``None``: all of them.
        precision: Of what decides log-probs most.
        layers: ``auto``, ``transformer_engine`` or ``local``, see ``choose_platform``.
    """

    dtype: torch.dtype
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_num_layers: int | None = None
    precision: Precision = field(default_factory=Precision)
    layers: str = "auto"


def read_hf_config(folder: str) -> Any:
    """The ``transformers`` config of a model folder.

    Raises:
        UserError: The architecture is not one that can be built here.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    names = list(config.architectures or [])
    if not set(names) & set(SUPPORTED_ARCHITECTURES):
        raise UserError(
            f"model.path={folder}: architecture {names or 'not named'} in config.json cannot be "
            f"trained; supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    return config


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding table: the vocabulary, rounded up to a multiple of tensor ranks."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def transformer_config(hf: Any, layout: Layout, platform: Platform, settings: ModelSettings) -> Any:
    """Megatron's ``TransformerConfig`` for a Hugging Face config."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_te = platform.layer_spec == "transformer_engine"
    recompute: dict[str, Any] = {}
    if settings.recompute == "full":
        layers_per_stage = -(-hf.num_hidden_layers // layout.pipeline_parallel)
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": min(
                settings.recompute_num_layers or layers_per_stage, layers_per_stage
            ),
        }
    elif settings.recompute == "selective":
        recompute = {"recompute_granularity": "selective"}
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=has_qkv_bias(hf),
        qk_layernorm=hf.architectures[0] in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Weights always come from a folder, so nothing need be drawn at random. Initialisation is
        # not turned off, though: it is also what marks a parameter as split over tensor ranks, and
        # without the mark the norm of the gradient would count one rank's part only.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        use_cpu_initialization=platform.name == "cpu",
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        context_parallel_size=layout.context_parallel,
        sequence_parallel=settings.sequence_parallel and layout.tensor_parallel > 1,
        params_dtype=settings.dtype,
        pipeline_dtype=settings.dtype,
        bf16=settings.dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        # Micro-batches are packs of differing size, also on the ranks that share experts; Megatron
        # checks the dispatcher against that even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss arrives divided by its global denominator; gradients are summed, never averaged.
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=on_te or platform.name == "cpu",
        apply_rope_fusion=on_te,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **recompute,
        **mixture_settings(
            model_shape(hf.to_dict()), layout, settings.precision.router_dtype, on_te
        ),
    )


def _leave_as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def head_dim(hf: Any) -> int:
    """Width of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def has_qkv_bias(hf: Any) -> bool:
    """Whether query, key and value projections carry a bias."""
    if hf.architectures[0] == "Qwen2ForCausalLM":
        return True
    return bool(getattr(hf, "attention_bias", False))


def build_model(
    hf: Any,
    layout: Layout,
    platform: Platform,
    settings: ModelSettings,
    max_sequence_length: int,
) -> torch.nn.Module:
    """This rank's stage of the model, its parameters uninitialised.

    The parallel state must be initialised (:func:`rlmath.actor.parallel.initialize`).

    Args:
        hf: A ``transformers`` config, see :func:`read_hf_config`.
        max_sequence_length: Longest sequence that will come, in tokens.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    config = transformer_config(hf, layout, platform, settings)
    on_te = platform.layer_spec == "transformer_engine"
    if config.num_moe_experts is not None:
        spec = decoder_spec(specs, config, on_te)
    elif on_te:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = _local_spec(specs, config)
    if not on_te:
        _take_packs(spec, config, platform)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(hf.vocab_size, layout.tensor_parallel),
        max_sequence_length=max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_base=10000,
        parallel_output=True,
    )
    # Megatron's own rope scaling knows Llama 3.1's constants only; transformers' formulas know
    # every published variant, and are what the engine and the reference use.
    model.rotary_pos_emb.inv_freq = rope_inverse_frequencies(hf).to(platform.torch_device)
    if settings.precision.lm_head_dtype == "float32" and model.post_process:
        _multiply_in_float32(model.output_layer)
    return model.to(platform.torch_device)


def _local_spec(specs: Any, config: Any) -> Any:
    """Megatron's own layers, for this rank's stage of a dense model."""
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config))


def _take_packs(spec: Any, config: Any, platform: Platform) -> None:
    """Give Megatron's own layers norms and attention that take our packs."""
    from rlmath.actor.attention import CpuRMSNorm, PackedAttention, ParallelRMSNorm

    norm = CpuRMSNorm if platform.name == "cpu" else ParallelRMSNorm
    spec.layer_norm = norm
    for one in spec.layer_specs:
        layer = one.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = norm
        attention = layer.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm


def _multiply_in_float32(output_layer: Any) -> None:
    """Let the output layer take its product in float32; the parameter keeps its type."""
    multiply = output_layer._forward_impl

    def in_float32(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return multiply(input.float(), weight.float(), *args, **kwargs)

    output_layer._forward_impl = in_float32


def rope_inverse_frequencies(hf: Any) -> torch.Tensor:
    """``[head_dim / 2]`` float32 inverse frequencies of the rotary embedding.

    Raises:
        UserError: The rope type scales attention as well, which Megatron's rope cannot.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(hf.rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        dim = head_dim(hf)
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (rope["rope_theta"] ** exponent)
    inverse, attention_scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    if attention_scaling != 1.0:
        raise UserError(
            f"rope type {kind!r} scales attention by {attention_scaling:.4f}, which the actor does "
            "not; supported: default, linear, llama3."
        )
    return inverse
