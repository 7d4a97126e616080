"""Imports modules one after another and prints which of them cannot be imported.

usage: python -m tests.cuda_wheels.imports_program project|vllm|training
"""

import importlib
import json
import pkgutil
import sys

from tests.contracts.imports import imported_names
from tests.cuda_wheels.forged import forge_gpus, forge_vllm

# Modules that a CUDA engine runs and the project does not name.
OF_ENGINES = (
    "vllm.device_allocator.cumem",
    "vllm.distributed.device_communicators.pynccl",
    "vllm.distributed.weight_transfer.ipc_engine",
    "vllm.distributed.weight_transfer.nccl_engine",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.vllm_flash_attn",
)
OF_RANKS = ("megatron.core.extensions.transformer_engine", "transformer_engine.pytorch")
# Operators of vLLM's CPU build; only a CPU engine imports it.
CPU_ALONE = ("rlmath.engines.patches.cpu_norms",)


def modules(which):
    if which == "project":
        import rlmath

        found = pkgutil.walk_packages(rlmath.__path__, "rlmath.")
        names = [one.name for one in found if not one.name.endswith("__main__")]
        return [name for name in names if name not in CPU_ALONE]
    if which == "vllm":
        return sorted({*(m for m, _ in imported_names(("vllm",))), *OF_ENGINES})
    # Ranks' processes never see vLLM.
    return sorted({*(m for m, _ in imported_names(("megatron", "transformers"))), *OF_RANKS})


def main():
    forge_gpus()
    if sys.argv[1] == "vllm":
        forge_vllm()
    failed = {}
    names = modules(sys.argv[1])
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            # A name in a module, not a module.
            package, _, last = name.rpartition(".")
            if package in sys.modules and hasattr(sys.modules[package], last):
                continue
            failed[name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"modules": len(names), "failed": failed}))


if __name__ == "__main__":
    main()
