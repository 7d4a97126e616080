"""vLLM's engine and its FP8, as far as a table of rows does not say it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from rlmath.config.engine_arguments import RESERVED, further_arguments, known_arguments
from rlmath.engines.engine_arguments import ASYNC_SCHEDULER, CPU_SCHEDULER, FP8, vllm_arguments
from rlmath.engines.requests import EngineSpec
from rlmath.engines.routes import RouteSpec
from rlmath.model.fp8 import quantize
from rlmath.model.lora import Lora
from rlmath.model.precision import Precision
from rlmath.model.tiny import make_tiny_model


def spec(device, width, model="model", **fields):
    return EngineSpec(
        model_path=model,
        dtype="float32" if device == "cpu" else "bfloat16",
        device=device,
        tensor_parallel=width,
        max_sequence_tokens=256,
        max_running_sequences=32,
        transport="shared_memory" if device == "cpu" else "ipc",
        log_dir="logs",
        cpu_kv_cache_gib=0.125,
        **fields,
    )


@pytest.fixture
def cuda_names(monkeypatch):
    """vLLM's names of devices, as its CUDA platforms take them from their common base."""
    from vllm.engine import arg_utils
    from vllm.platforms import interface

    class CudaNames(interface.Platform):
        device_name = "cuda"
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    monkeypatch.setattr(arg_utils, "current_platform", CudaNames)
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)
    return CudaNames


@pytest.mark.parametrize(
    ("visible", "of_torch"),
    [(None, [6, 4]), ("4,5,6,7", [2, 0]), ("6,4", [0, 1])],
    ids=["Ray sets nothing", "the node has half of its GPUs", "the engine's own"],
)
def test_an_engine_finds_its_gpus_by_their_numbers_on_the_node(
    cuda_names, monkeypatch, visible, of_torch
):
    """``device_ids`` as strings name GPUs of the node, whatever CUDA_VISIBLE_DEVICES hides, and the
    worker of rank r takes the r-th of them; ``worker_gpu`` finds its number again."""
    from vllm.platforms import interface

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    arguments = vllm_arguments(spec("cuda", 2, device_ids=("6", "4")))
    assert arguments.distributed_executor_backend == "mp"
    assigned = arguments._resolve_device_ids()
    assert assigned == [6, 4]
    interface.set_assigned_physical_gpu_ids(assigned)
    ordinals = [cuda_names.logical_device_id_to_visible_device_id(rank) for rank in range(2)]
    assert ordinals == of_torch
    found = [cuda_names.visible_device_id_to_physical_device_id(ordinal) for ordinal in ordinals]
    assert found == [6, 4]


@pytest.mark.usefixtures("cuda_names")
def test_numbers_would_be_places_among_the_visible_gpus(monkeypatch):
    """``device_ids`` have to be strings."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    arguments = vllm_arguments(spec("cuda", 2, device_ids=("2", "3")))
    assert arguments._resolve_device_ids() == [2, 3]
    arguments.device_ids = [2, 3]
    assert arguments._resolve_device_ids() == [6, 7]


def test_arguments_of_a_cuda_engine():
    given = vllm_arguments(
        spec("cuda", 1, max_batched_tokens=8192, async_scheduling=True, kv_cache_bytes=5)
    )
    assert given.distributed_executor_backend == "uni"
    assert (given.max_num_batched_tokens, given.async_scheduling) == (8192, True)
    assert (given.kv_cache_memory_bytes, given.device_ids) == (5, None)
    assert given.enable_chunked_prefill and given.scheduler_cls == ASYNC_SCHEDULER
    shared = further_arguments("benchmarks/shared_gpu.py:kv_cache", "cuda", SimpleNamespace(gib=2))
    given = vllm_arguments(spec("cuda", 1, arguments=shared))
    assert given.kv_cache_memory_bytes == 2 * 2**30


def test_a_cpu_engine_returns_routes_without_short_steps_too():
    """vLLM's own scheduler asks a CPU's runner for none."""
    plain = spec("cpu", 1, short_steps=False)
    assert vllm_arguments(plain).scheduler_cls is None
    with_routes = dataclasses.replace(plain, routes=RouteSpec((0, 1), 4, 2))
    assert vllm_arguments(with_routes).scheduler_cls == CPU_SCHEDULER


def test_reserved_arguments_are_those_that_engines_are_given(monkeypatch):
    """A plug-in's engine arguments are refused where they are rlmath's, and no others are."""
    from vllm.engine import arg_utils

    assert known_arguments() == {one.name for one in dataclasses.fields(arg_utils.EngineArgs)}
    monkeypatch.setattr(arg_utils, "EngineArgs", dict)
    lora, precision = Lora(8, 16.0, ("q_proj",)), Precision(lm_head_dtype="float32")
    given = set()
    for device in ("cpu", "cuda"):
        one = dataclasses.replace(spec(device, 1), adapters=lora, precision=precision)
        given |= vllm_arguments(one).keys()
    assert given == RESERVED.keys()
    extra = dataclasses.replace(spec("cpu", 1), arguments={"served_model_name": "mine"})
    assert vllm_arguments(extra)["served_model_name"] == "mine"


@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="a CPU engine needs vLLM's CPU build; the CUDA build is installed here",
)
def test_a_cpu_engine_is_configured_as_it_was_asked(tmp_path):
    """Prompts whole, nothing scheduled ahead, workers of vLLM's own."""
    model = make_tiny_model(tmp_path / "model")
    config = vllm_arguments(spec("cpu", 2, str(model))).create_engine_config()
    assert config.parallel_config.distributed_executor_backend == "mp"
    assert config.parallel_config.assigned_physical_gpu_ids is None
    assert config.scheduler_config.max_num_batched_tokens == 4096
    assert not config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.async_scheduling is False
    assert config.max_concurrent_batches == 1
    assert config.cache_config.kv_cache_memory_bytes == 2**27


pytestmark = pytest.mark.filterwarnings("ignore")


def test_fp8_is_a_shorthand_of_online_quantization():
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
    mine, my_scale = quantize(rows)
    assert torch.equal(scale, my_scale)
    assert torch.equal(values.view(torch.uint8), mine.view(torch.uint8))
