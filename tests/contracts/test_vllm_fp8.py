"""What ``rollout.quantization=fp8`` relies on in vLLM's online quantization."""

import pytest
import torch

from rlmath.model.fp8 import quantized
from rlmath.rollout.engine_arguments import FP8
from tests.contracts.contract import Row, check, parametrized

pytestmark = pytest.mark.filterwarnings("ignore")
ONLINE = "vllm.model_executor.layers.quantization.online.fp8"
HELD = "fingerprints of matrices in FP8 (rlmath/weights/transports/engine_fingerprints.py)"
AGAIN = "the second weight sync would leave the first one's FP8 values"

ROWS = [
    Row(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        says=(
            "head_size % 32 != 0",
            "torch.cpu._is_amx_tile_supported()",
            "torch.cpu._is_avx512_supported()",
            "if fp8_kv and not supports_amx and not supports_avx512:",
        ),
        breaks="what a CPU takes for a cache in FP8 (rlmath/checks/quantization.py)",
    ),
    Row(
        f"{ONLINE}:Fp8PtpcOnlineLinearMethod.process_weights_after_loading",
        says=(
            "weight_amax(weight, dim=-1, keepdim=True)",
            "_is_tp_sharded(layer, reduces_output_dim=False)",
            'replace_parameter(layer, "weight", qweight.t())',
            'replace_parameter(layer, "weight_scale", weight_scale)',
        ),
        breaks=HELD,
    ),
    Row(
        "vllm.model_executor.model_loader.reload.layerwise:_layerwise_process",
        says=('delattr(layer, "_already_called_process_weights_after_loading")',),
        breaks=AGAIN,
    ),
    Row(
        "vllm.distributed.weight_transfer.ipc_engine:IPCWeightTransferEngine.start_weight_update",
        says=("initialize_layerwise_reload(self.model)",),
        breaks=AGAIN,
    ),
    Row(
        "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferEngine.start_weight_update",
        says=("initialize_layerwise_reload(self.model)",),
        breaks=AGAIN,
    ),
]


@parametrized(ROWS)
def test_vllm_has_what_is_relied_on(row):
    check(row)


def test_it_is_a_shorthand_of_online_quantization():
    from vllm.config.quantization import _ONLINE_SHORTHANDS
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticChannelSym

    linear = _ONLINE_SHORTHANDS[FP8].linear
    assert linear is not None and linear.weight == kFp8StaticChannelSym


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rule_is_vllms_bit_by_bit(dtype):
    from vllm.model_executor.layers.quantization.online import fp8

    torch.manual_seed(0)
    rows = torch.randn(64, 128).mul_(torch.logspace(-6, 3, 64)[:, None]).to(dtype)
    rows[3] = 0
    scale = fp8._fp8_channel_scale(fp8.weight_amax(rows, dim=-1, keepdim=True))
    values = fp8._fp8_quant_per_channel(rows, scale)
    mine, my_scale = quantized(rows)
    assert torch.equal(scale, my_scale)
    assert torch.equal(values.view(torch.uint8), mine.view(torch.uint8))
