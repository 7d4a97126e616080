"""The real engine set-up, up to vLLM's finished configuration of an engine on H100s.

usage: python -m tests.cuda_wheels.engine_program JSON

JSON: a list of fields of ``EngineSpec``, one object for each engine.
"""

import contextlib
import json
import os
import sys
from unittest import mock

from tests.cuda_wheels.forged import forge_gpus, forge_vllm


class Stop(Exception):
    """The configuration is there; what follows needs the GPU."""


def main():
    forge_gpus()
    forge_vllm()
    from vllm.plugins import load_general_plugins

    from rlmath.engines.patches.register import ENGINE_VARIABLE, register
    from rlmath.engines.requests import EngineSpec

    os.environ[ENGINE_VARIABLE] = "1"
    load_general_plugins()
    register()
    print(json.dumps([engine_config(EngineSpec(**fields)) for fields in json.loads(sys.argv[1])]))


def engine_config(spec):
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    from rlmath.engines.step_loop import StepLoop

    found = {}

    def stop(_, arguments, usage_context=UsageContext.ENGINE_CONTEXT, **__):
        found["config"] = arguments.create_engine_config(usage_context)
        raise Stop

    with (
        mock.patch.object(LLMEngine, "from_engine_args", classmethod(stop)),
        contextlib.suppress(Stop),
    ):
        StepLoop(spec, 0)._make_engine()
    config = found["config"]
    return {
        "executor": Executor.get_class(config).__name__,
        "device_ids": config.parallel_config.assigned_physical_gpu_ids,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "batches_in_flight": config.max_concurrent_batches,
        "second_model_runner": config.use_v2_model_runner,
        "scheduler": config.scheduler_config.get_scheduler_cls().__qualname__,
        "cuda_graphs": config.compilation_config.cudagraph_mode.name,
        "dtype": str(config.model_config.dtype),
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "sleeps": config.model_config.enable_sleep_mode,
        "transfer": config.weight_transfer_config.backend,
        "kv_cache_bytes": config.cache_config.kv_cache_memory_bytes,
        "max_model_len": config.model_config.max_model_len,
    }


if __name__ == "__main__":
    main()
