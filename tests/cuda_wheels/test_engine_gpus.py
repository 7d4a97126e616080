"""GPUs, step sizes and schedules that vLLM makes of the engines of a node, also with batch
invariance."""

import json

import pytest

from rlmath.engines.requests import EngineSpec
from rlmath.model.published import KNOWN
from tests.cuda_wheels.programs import answer_of

MODEL = "DeepSeek-R1-Distill-Qwen-1.5B"
# The first engine has one rank, the second is wide; the third starts again with a known cache.
ENGINES = {
    "narrow": {"tensor_parallel": 1, "device_ids": ["5"], "async_scheduling": True},
    "wide": {"tensor_parallel": 2, "device_ids": ["7", "4"], "async_scheduling": True},
    "again": {"tensor_parallel": 2, "device_ids": ["7", "4"], "kv_cache_bytes": 7 * 2**30},
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "dtype": "bfloat16"}
    config = {**sizes, **KNOWN[MODEL], "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    common = {
        "model_path": str(folder),
        "dtype": "bfloat16",
        "device": "cuda",
        "max_sequence_tokens": 28672,
        "max_running_sequences": 256,
        "transport": "ipc",
        "sleeps": True,
        "log_dir": ".",
    }
    return {name: {**common, **fields} for name, fields in ENGINES.items()}


@pytest.fixture(scope="module")
def answers_of_engines(specs):
    """On a node that leaves its last four GPUs to the run."""
    answers = answer_of(
        "engine_program", json.dumps(list(specs.values())), CUDA_VISIBLE_DEVICES="4,5,6,7"
    )
    return dict(zip(specs, answers, strict=True))


def test_engines_take_the_gpus_that_they_were_given(answers_of_engines):
    assert (
        answers_of_engines["narrow"]["executor"],
        answers_of_engines["narrow"]["device_ids"],
    ) == ("UniProcExecutor", [5])
    assert (answers_of_engines["wide"]["executor"], answers_of_engines["wide"]["device_ids"]) == (
        "MultiprocExecutor",
        [7, 4],
    )


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_steps_are_large_and_scheduled_ahead(answers_of_engines, name):
    assert answers_of_engines[name]["batched_tokens"] == EngineSpec.max_batched_tokens == 16384
    assert answers_of_engines[name]["async_scheduling"] is True
    assert answers_of_engines[name]["scheduler"] == "AsyncDecodeScheduler"
    # The step loop waits for one step at most when an engine is idle.
    assert answers_of_engines[name]["batches_in_flight"] == 2
    assert answers_of_engines[name]["kv_cache_bytes"] is None
    # tests/contracts/test_vllm_engine.py has what is asked of its model runner.
    assert answers_of_engines[name]["second_model_runner"] is True


def test_an_engine_that_starts_again_gets_the_cache_that_was_measured(answers_of_engines):
    assert answers_of_engines["again"]["kv_cache_bytes"] == 7 * 2**30
    assert answers_of_engines["again"]["async_scheduling"] is False
    assert answers_of_engines["again"]["scheduler"] == "Scheduler"


def test_vllm_configures_batch_invariant_engines(specs):
    answers = answer_of(
        "engine_program", json.dumps([specs["narrow"], specs["wide"]]), VLLM_BATCH_INVARIANT="1"
    )
    for found in answers:
        assert found["async_scheduling"] is True
        assert found["cuda_graphs"] != "NONE"
