"""What vLLM is told of the precision contract, and that a worker which does otherwise is named."""

import pytest

from rlmath.config.load import load
from rlmath.model.precision import Precision
from rlmath.training.session import precision
from rlmath.vllm_plugin.engine_precision import check_workers, engine_arguments

KEPT = {
    "logprobs_mode": "processed_logprobs",
    "dtype": "bfloat16",
    "lm_head_dtype": "bfloat16",
    "batch_invariant": "off",
}


def test_vllm_is_told_of_a_head_in_float32_and_of_log_probs_after_temperature():
    assert engine_arguments(Precision()) == {"logprobs_mode": "processed_logprobs"}
    told = engine_arguments(Precision(lm_head_dtype="float32"))
    assert told["hf_overrides"] == {"head_dtype": "float32"}


def test_a_worker_that_does_otherwise_is_refused_by_name():
    check_workers([KEPT, KEPT], Precision(), "bfloat16")
    check_workers(
        [KEPT | {"router_dtype": "float32"}], Precision(router_dtype="float32"), "bfloat16"
    )
    for changed, setting, message in (
        ({}, Precision(lm_head_dtype="float32"), r"precision\.lm_head_dtype.*float32.*bfloat16"),
        ({"router_dtype": "bfloat16"}, Precision("model", "float32"), r"precision\.router_dtype"),
        ({"logprobs_mode": "raw_logprobs"}, Precision(), r"precision\.logprobs_mode.*raw"),
        ({}, Precision(batch_invariant=True), r"precision\.batch_invariant.*with on.*rank 0.*off"),
        ({"batch_invariant": "on"}, Precision(), r"precision\.batch_invariant.*with off.*with on"),
        ({"dtype": "float16"}, Precision(), r"model\.dtype.*bfloat16.*rank 1.*float16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            check_workers(
                [KEPT | ({} if "dtype" in changed else changed), KEPT | changed],
                setting,
                "bfloat16",
            )


def test_a_dense_model_has_no_router_to_set():
    config = load(["model=tiny", "runner.run_dir=r", "precision.lm_head_dtype=float32"])
    assert precision(config) == Precision("float32", "model")
