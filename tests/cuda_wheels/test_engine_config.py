"""vLLM's config for the project's engine set-up on H100s."""

import json

import pytest

from rlmath.model.published import KNOWN
from tests.cuda_wheels.programs import answer_of

MODELS = ("DeepSeek-R1-Distill-Qwen-1.5B", "Qwen3-30B-A3B")


SAMPLING = {
    "dtype": "bfloat16",
    "device": "cuda",
    "max_sequence_tokens": 28672,
    "max_running_sequences": 256,
    "log_dir": ".",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """By model, tensor-parallel size and transport; from one process."""
    specs = {}
    for model in MODELS:
        config = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}
        config |= {"dtype": "bfloat16", **KNOWN[model]}
        kinds = {"Qwen2ForCausalLM": "qwen2", "Qwen3MoeForCausalLM": "qwen3_moe"}
        config |= {"model_type": kinds[config["architectures"][0]]}
        made = tmp_path_factory.mktemp("model")
        (made / "config.json").write_text(json.dumps(config))
        for width, transport in ((1, "ipc"), (2, "ipc"), (1, "nccl")):
            specs[model, width, transport] = {
                **SAMPLING,
                "model_path": str(made),
                "tensor_parallel": width,
                "transport": transport,
                "sleeps": transport == "ipc",
            }
    return dict(
        zip(specs, answer_of("engine_program", json.dumps(list(specs.values()))), strict=True)
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("width", "executor"), [(1, "UniProcExecutor"), (2, "MultiprocExecutor")])
def test_engine_configuration(answers, model, width, executor):
    found = answers[model, width, "ipc"]
    assert found["executor"] == executor
    assert found["tensor_parallel"] == width
    assert found["dtype"] == "torch.bfloat16"
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["max_model_len"] == 28672
    assert found["transfer"] == "ipc"
    assert found["sleeps"] is True
    # The CPU's scheduler and eager mode stay on the CPU.
    assert found["scheduler"] in ("Scheduler", "AsyncScheduler")
    assert found["cuda_graphs"] != "NONE"
    assert found["chunked_prefill"] is True


@pytest.mark.parametrize("model", MODELS)
def test_transport_between_gpus(answers, model):
    found = answers[model, 1, "nccl"]
    assert found["transfer"] == "nccl_shares"
    assert found["sleeps"] is False
