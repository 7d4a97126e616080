"""Entry point through which vLLM finds what rlmath adds to it: a weight transfer, CPU kernels and
sampling, routers in float32.

vLLM calls ``register`` in each of its processes, workers included, and perhaps more than once. It
does so in every vLLM process of the environment, so nothing is changed unless rlmath started the
process: its engines set ``RLMATH_ENGINE=1``, which their workers inherit.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os

from rlmath.model.families import FAMILY_PLUGINS
from rlmath.plugins.loading import import_from_environment
from rlmath.utils.child_processes import end_with_parent

# Set to 1 in the engines that rlmath starts; their workers inherit it.
ENGINE_VARIABLE = "RLMATH_ENGINE"
SHARED_MEMORY = "shared_memory"
# For each transport by name, the class in an engine's workers that receives adapters.
_TRANSPORTS = "rlmath.engines.transports"
ADAPTER_ENGINES = {
    SHARED_MEMORY: (f"{_TRANSPORTS}.shared_memory_engine", "SharedMemoryAdapters"),
    "ipc": (f"{_TRANSPORTS}.adapter_cuda", "IpcAdapters"),
    "nccl": (f"{_TRANSPORTS}.adapter_cuda", "NcclAdapters"),
}
# vLLM's ``nccl``, and each worker's share of an MoE's experts from its own sender.
NCCL_SHARES = "nccl_shares"
# Products of adapters on CPU, by the name that vLLM resolves.
CPU_ADAPTERS = "rlmath.engines.patches.cpu_adapters.OneAdapter"


def require_plugin() -> None:
    """Check that vLLM will find ``register``. Raises RuntimeError: it will not, so its models would
    be computed otherwise than the actor's."""
    if "rlmath" not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        raise RuntimeError(
            "vLLM does not find rlmath's plugin: rlmath is on Python's path without being "
            "installed in this environment. Install it: python -m pip install --no-deps -e FOLDER"
        )


def adapter_backend(transport: str) -> str:
    """Name of the weight transfer backend that receives adapters through a transport."""
    return f"{transport}_adapters"


def end_workers_with_engine() -> None:
    """Have the kernel end workers when their engine's process ends, also one that is stopped or
    waits in a kernel; vLLM's own workers look at a pipe, which these do not.

    A worker that is spawned calls this itself. One that is forked has the engine's plug-ins already
    and calls none, so that the engine's process prepares for it.
    """
    if multiprocessing.parent_process() is not None:
        end_with_parent(os.getppid())
    else:
        engine = os.getpid()
        os.register_at_fork(after_in_child=lambda: end_with_parent(engine))


def register_families() -> None:
    """Tell vLLM which of its models compute the architectures of plug-ins' families."""
    for name in FAMILY_PLUGINS.names():
        family = FAMILY_PLUGINS.get(name)()
        if family.vllm:
            from vllm import ModelRegistry

            for architecture in family.architectures:
                ModelRegistry.register_model(architecture, family.vllm)


def register() -> None:
    """Have workers end with their engine, and import the plug-ins; add ``shared_memory`` and
    receivers of shares and of adapters to vLLM's factory, norms to its operators, a router, and on
    CPU a way to sample.

    The transport's modules load when first used. A no-op in processes that rlmath did not start.
    """
    if os.environ.get(ENGINE_VARIABLE) != "1":
        return
    end_workers_with_engine()
    import_from_environment()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from rlmath.engines.patches.engine_precision import register_router

    receivers = {adapter_backend(transport): found for transport, found in ADAPTER_ENGINES.items()}
    receivers[SHARED_MEMORY] = (f"{_TRANSPORTS}.shared_memory_engine", "SharedMemoryEngine")
    receivers[NCCL_SHARES] = (f"{_TRANSPORTS}.nccl_shares_engine", "SharesEngine")
    for backend, (module, name) in receivers.items():
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, module, name)
    register_router()
    register_families()
    if current_platform.is_cpu():
        from rlmath.engines.patches import cpu_routes

        if cpu_routes.returns_routes():
            cpu_routes.install()
        import rlmath.engines.patches.cpu_norms  # noqa: F401
        from rlmath.device.gloo import share_device
        from rlmath.engines.patches import cpu_rounds, cpu_sampling, cpu_vision

        cpu_sampling.install()
        cpu_rounds.install()
        cpu_vision.install()
        # Imported where an engine computes adapters.
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: CPU_ADAPTERS)
        share_device()
