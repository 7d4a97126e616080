"""Why some of Megatron's levers have no setting (rlmath/config/not_offered.py) or are refused
(rlmath/checks/recompute.py). A test that fails says that the lever may be offered now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.contracts.contract import Row, check, parametrized

pytestmark = pytest.mark.filterwarnings("ignore")
REASON = "a reason in rlmath/config/not_offered.py no longer holds"

ROWS = [
    Row(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        "the head need not give zeros (rlmath/actor/head.py, actor.overlap_gradients)",
        says=("param.grad is not None", "when overlap_grad_reduce is True"),
    ),
    Row(
        "megatron.core.optimizer:get_megatron_optimizer",
        f"overlap_param_gather_with_optimizer_step: {REASON}",
        says=("if config.overlap_param_gather_with_optimizer_step:",),
    ),
    Row(
        "megatron.core.fp8_utils",
        f"actor.fp8_recipe=delayed: {REASON}",
        says=("fp8_recipe = TEDelayedScaling(",),
    ),
    Row(
        "rlmath.checkpoint.model_state:sharded_weights",
        f"actor.fp8_recipe=delayed, whose amax history is extra state: {REASON}",
        says=("if not is_extra_state(name)",),
    ),
    Row(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager",
        f"fine_grained_activation_offloading: {REASON}",
        says=('raise RuntimeError("TE CPU offload is not available")',),
    ),
]


def test_vllm_quantizes_experts_alone_to_int8() -> None:
    """rollout.quantization=int8: of dense matrices its INT8 methods read INT8 from files."""
    from vllm.model_executor.layers.quantization.online import base

    def in_int8(table: Any) -> list[str]:
        return [str(key) for key in table if torch.int8 in (key.dtype,)]

    assert not in_int8(base._ONLINE_LINEAR_METHODS), REASON
    assert in_int8(base._ONLINE_MOE_METHODS)
    assert base._ONLINE_LINEAR_METHODS, "those of FP8"


@parametrized(ROWS)
def test_contract(row: Row) -> None:
    check(row)


def test_without_transformer_engine_there_is_no_activation_offload() -> None:
    from megatron.core.extensions import transformer_engine

    assert transformer_engine.cpu_offload is None


def test_without_transformer_engine_fp8_is_no_error_and_nothing() -> None:
    """Why actor.fp8 refuses Megatron's own layers itself (rlmath/actor/fp8.py)."""
    from megatron.core import fp8_utils

    assert not fp8_utils.HAVE_TE
    wanted: Any = SimpleNamespace(fp8="e4m3", fp8_recipe="blockwise")
    assert fp8_utils.get_fp8_recipe(wanted) is None, "actor.fp8 may be had with local layers"
    with fp8_utils.get_fp8_context(wanted) as context:
        assert context is None


def test_recomputed_norms_ask_for_fp8_whatever_they_are_told() -> None:
    from megatron.core.tensor_parallel.random import HAVE_TE, CheckpointWithoutOutput

    assert not HAVE_TE
    assert CheckpointWithoutOutput(fp8=False).fp8, "layernorm may be recomputed without TE"


def test_moments_of_another_type_need_transformer_engine() -> None:
    from megatron.core.optimizer import OptimizerConfig

    with pytest.raises(AssertionError, match="exp_avg_dtype can only be fp32"):
        OptimizerConfig(exp_avg_dtype=torch.bfloat16)
    # It compares the version of what is not there before it says so.
    with pytest.raises((RuntimeError, TypeError), match=r"FusedAdam|NoneType.*Version"):
        OptimizerConfig(
            use_precision_aware_optimizer=True,
            use_distributed_optimizer=True,
            exp_avg_dtype=torch.bfloat16,
        )


@pytest.mark.parametrize(
    ("beta2", "at_random", "factor"),
    [(0.999, False, 16.3), (0.999, True, 1.0), (0.95, False, 1.0)],
)
def test_second_moments_rounded_to_the_nearest_bfloat16_do_not_follow(
    beta2: float, at_random: bool, factor: float
) -> None:
    """Gradients of which a thousand steps have deviation 1 and three thousand 0.1, against float64.

    Rounded at random, to either neighbor with the chance that keeps the mean, moments do follow.
    """
    generator = torch.Generator().manual_seed(0)
    right = torch.zeros(512, dtype=torch.float64)
    kept = right.bfloat16()
    for step in range(4000):
        gradient = torch.randn(512, generator=generator, dtype=torch.float64)
        gradient *= 1.0 if step < 1000 else 0.1
        right = beta2 * right + (1 - beta2) * gradient**2
        new = beta2 * kept.float() + (1 - beta2) * gradient.float() ** 2
        if at_random:
            # A bfloat16 is the upper half of a float32.
            low = torch.randint(0, 1 << 16, (512,), generator=generator, dtype=torch.int32)
            new = ((new.view(torch.int32) + low) & -(1 << 16)).view(torch.float32)
        kept = new.bfloat16()
    assert float((kept.double() / right).mean()) == pytest.approx(factor, rel=0.02)


def test_the_hybrid_optimizer_fails_where_all_is_on_one_device() -> None:
    """It looks for the GPU's tensor of each that it steps on the CPU, also of those that never
    were on a GPU."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    stream: Any = SimpleNamespace(wait_stream=lambda _: None)
    with (
        mock.patch("torch.cuda.current_stream", lambda: stream),
        mock.patch("torch.cuda.stream", mock.MagicMock()),
    ):
        optimizer = HybridDeviceOptimizer(
            [{"params": [parameter]}],
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            overlap_cpu_optimizer_d2h_h2d=False,
            lr=0.1,
        )
        with pytest.raises(KeyError):
            optimizer.step()


def test_fused_accumulation_of_own_layers_needs_apex() -> None:
    from megatron.core.tensor_parallel import layers

    assert not layers._grad_accum_fusion_available
