"""vLLM's modules of each family, healthy and with a planted fault: prints as JSON, by family, what
the comparison of constants says of each.

Only the modules: weights are never computed with.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from rlmath.commands.drill.in_engines import other_epsilon, other_rope, put_back
from rlmath.engines.worker_state import worker_constants
from rlmath.model.spec import read_model_spec
from rlmath.training.checks.engine_constants import wrong_constant
from tests.support.models import make_config

# The first has experts, so that the groups for them are there.
FAMILIES = (
    "deepseek_v3_in_vllm",
    "glm4_moe",
    "qwen3_moe",
    "qwen2",
    "yarn",
    "linear",
    "qwen3",
    "llama3",
    "mistral",
    "phi3",
    "olmo2",
    "olmo3",
    "qwen3_5",
    "qwen3_next",
)
# CPU attention has heads of 32 and wider.
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
HEALTHY, EPSILON, THETA = "healthy", "epsilon", "theta"


# As in an engine: vLLM loads rlmath's plug-in.
os.environ["RLMATH_ENGINE"] = "1"


def main(work):
    found = {}
    for number, family in enumerate(FAMILIES):
        folder = work / family
        config = make_config(family, **SIZES)
        kind = type(config).__name__.replace("TextConfig", "Config")
        config.architectures = [kind.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
        model = modules_of(folder, None if number else work / "store")
        found[family] = said_of(folder, model)
    print(json.dumps(found))


def modules_of(folder, store):
    """vLLM's model in bfloat16, the type in which the gate is blind to an epsilon.

    Args:
        folder: With config.json.
        store: Where a process group of one rank meets; ``None``: it has.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=256
    ).create_engine_config()
    with set_current_vllm_config(config):
        if store is not None:
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            return initialize_model(config)
        finally:
            torch.set_default_dtype(torch.float32)


def said_of(folder, model):
    spec = read_model_spec(folder)
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))

    def find_wrong():
        return wrong_constant(worker_constants(worker), spec)

    found = {HEALTHY: find_wrong()}
    for name, plant in ((EPSILON, other_epsilon), (THETA, other_rope)):
        plant(worker)
        found[name] = find_wrong()
        put_back(worker)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
