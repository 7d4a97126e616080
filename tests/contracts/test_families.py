"""What the families of rlmath/model/families.py take from Megatron and vLLM, and why some are not
there. A test that fails here says that a refused model may be supported now."""

import inspect

import pytest
import torch

from tests.contracts.contract import Row, check, parametrized

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSED = "a reason in REFUSED (rlmath/model/families.py) no longer holds: "
LATENT = "DeepSeek-V3 is another model than its files (rlmath/actor/latent.py)"
HELD = "weights of latent attention in engines go unseen (rlmath/weights/transports)"
MLA = "megatron.core.transformer.multi_latent_attention"

ROWS = [
    Row(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        f"{REFUSED}GPT-OSS, attention sinks",
        says=("packed_seq_params is None", "Packed sequence is not supported"),
    ),
    Row(
        "megatron.core.ssm.gated_delta_net:GatedDeltaNet.forward",
        f"{REFUSED}Qwen3-Next, packed sequences",
        says=('NotImplementedError("GDN does not support packed sequence for now.")',),
    ),
    Row(
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
        f"{REFUSED}Qwen3-Next, float32 in vLLM on a CPU",
        says=('"CPU GDN attention requires BF16."',),
    ),
    Row(
        f"{MLA}:MLASelfAttention.__init__",
        LATENT,
        says=(
            "self.config.num_attention_heads * (self.config.qk_head_dim + self.config.v_head_dim)",
            "self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim",
        ),
    ),
    Row(
        f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
        LATENT,
        says=("gather_from_tensor_model_parallel_region(q_compressed)", "packed_seq=packed_seq"),
    ),
    Row(
        f"{MLA}:MLASelfAttention.get_query_key_value_tensors",
        f"{LATENT}: sum_rotary_key_gradients is not needed, or does not sum",
        says=(
            "kv_combined = gather_from_tensor_model_parallel_region(kv_combined)",
            "k_pos_emb = gather_from_sequence_parallel_region(k_pos_emb, group=self.tp_group)",
        ),
    ),
    Row(
        f"{MLA}:MLASelfAttention.__init__",
        "DeepSeek-V3 may train on GPUs: ON_CPU_ALONE (rlmath/checks/latent.py)",
        says=(
            "q_down_proj_kwargs['parallel_mode'] = 'duplicated'",
            "kv_down_proj_kwargs['parallel_mode'] = 'duplicated'",
        ),
    ),
    Row(
        "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_spec",
        "DeepSeek-V3 may train on GPUs: ON_CPU_ALONE (rlmath/checks/latent.py)",
        says=(
            "linear_q_up_proj = (\n            backend.column_parallel_layer_norm_linear()",
            "linear_kv_up_proj = (\n            backend.column_parallel_layer_norm_linear()",
            "linear_kv_down_proj=backend.linear()",
        ),
    ),
    Row(
        f"{MLA}:MultiLatentAttention.__init__",
        f"{LATENT}: prepare_without_te",
        says=("HAVE_TE\n            and isinstance(self.linear_proj, TELinear)",),
    ),
    Row(
        "megatron.core.transformer.moe.moe_utils:group_limited_topk",
        f"{LATENT}: how groups of experts are scored",
        says=("topk(topk // group_topk, dim=-1)",),
    ),
    Row(
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention.process_weights_after_loading",
        HELD,
        says=('self, "W_UK_T", W_UK.permute(1, 2, 0)', 'self, "W_UV", W_UV.transpose(0, 1)'),
    ),
    Row(
        "vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl",
        "engines decode without an adapter of kv_b_proj no longer (rlmath/checks/lora.py)",
        says=("torch.bmm(mqa_q_nope, W_UK_T, out=mqa_ql_nope",),
    ),
    Row(
        "vllm.v1.attention.backends.mla.cpu_mla:CPUMLABackend.get_supported_head_sizes",
        "rlmath/checks/latent.py refuses other widths, or takes them",
        says=("return [576]",),
    ),
]


@parametrized(ROWS)
def test_contract(row):
    check(row)


def test_torchs_attention_has_no_sinks():
    """The actor's on a CPU; GPT-OSS is refused for it."""
    text = torch.nn.functional.scaled_dot_product_attention.__doc__ or ""
    assert "attn_mask" in text and "sink" not in text.lower(), REFUSED


def test_the_gated_delta_net_needs_a_package_of_triton_kernels():
    from megatron.core.ssm import gated_delta_net

    assert not gated_delta_net.HAVE_FLA, f"{REFUSED}Qwen3-Next"
    assert "if not HAVE_FLA" in inspect.getsource(gated_delta_net.GatedDeltaNet.__init__)


def test_transformers_has_no_mimo():
    import transformers

    assert not hasattr(transformers, "MiMoForCausalLM"), f"{REFUSED}MiMo-7B"


@pytest.mark.parametrize(("heads", "wrong"), [(1, False), (2, True)])
def test_vllm_rotates_neighboring_pairs_of_several_heads_wrongly(heads, wrong):
    """On a CPU, of ``[tokens, heads, dim]``; DeepSeek's yarn does not go through this kernel.

    Without the fault, ``deepseek_v3`` may take the ropes ``default`` and ``linear``.
    """
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    # Those built for this processor; of two builds in one process the second aborts it.
    current_platform.import_kernels()

    tokens, width = 6, 64
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(tokens, heads, width, generator=generator)
    key = torch.randn(tokens, 1, width, generator=generator)
    frequencies = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(tokens).float(), frequencies)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = query[..., 0::2], query[..., 1::2]
    wanted = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    ops.rotary_embedding(torch.arange(tokens), query, key, width, table, False)
    assert (float((query - wanted).abs().max()) > 1e-3) is wrong
