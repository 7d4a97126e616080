"""Names that rlmath/model/families.py takes from Megatron and vLLM, and why some families are not
there. A test that fails here says that a refused model may be supported now."""

import pytest
import torch

from rlmath.checks.weight_files import weights_misfit
from rlmath.model.spec import read_model_spec
from tests.support.models import make_config

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSED = "a reason in REFUSED (rlmath/model/families.py) no longer holds: "


def test_torchs_attention_has_no_sinks():
    """The actor's on a CPU; GPT-OSS is refused for it."""
    text = torch.nn.functional.scaled_dot_product_attention.__doc__ or ""
    assert "attn_mask" in text and "sink" not in text.lower(), REFUSED


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

    # Only the kernels of this processor; loading a second build in one process aborts it.
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


def test_text_model_of_a_qwen3_5_loads_without_the_vision_part(tmp_path):
    """As the refusal of its folder says."""
    import transformers

    config = make_config("qwen3_5")
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"intermediate_size": 16, "num_position_embeddings": 4}
    whole = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=config.to_dict(), vision_config=vision)
    )
    whole.save_pretrained(tmp_path / "whole")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    text.save_pretrained(tmp_path / "text")
    assert read_model_spec(tmp_path / "text").architecture == "Qwen3_5ForCausalLM", REFUSED
    assert weights_misfit(tmp_path / "text") is None
    of_text, of_whole = text.state_dict(), whole.state_dict()
    for name, tensor in of_text.items():
        long = name.replace("model.", "model.language_model.", 1)
        assert torch.equal(tensor, of_whole[long if long in of_whole else name])


@pytest.mark.parametrize(
    ("key", "value", "takes"), [(64, 64, True), (128, 128, True), (64, 128, False), (96, 96, False)]
)
def test_vllms_chunks_of_a_gated_delta_net_have_two_widths_of_heads(key, value, takes):
    """On a CPU: CPU_HEAD_DIMS (rlmath/checks/linear_attention.py)."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def rule():
        like = {"dtype": torch.bfloat16}
        ends = torch.tensor([0, 3], dtype=torch.int32)
        return ops.chunk_gated_delta_rule_cpu(
            query=torch.ones(1, 3, 1, key, **like),
            key=torch.ones(1, 3, 1, key, **like),
            value=torch.ones(1, 3, 2, value, **like),
            g=torch.zeros(1, 3, 2),
            beta=torch.ones(1, 3, 2, **like),
            initial_state=torch.zeros(1, 2, key, value),
            output_final_state=True,
            cu_seqlens=ends,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=torch.tensor([0], dtype=torch.int32),
        )

    if not takes:
        with pytest.raises(RuntimeError, match="head"):
            rule()
        return
    assert rule()[0].isfinite().all()
