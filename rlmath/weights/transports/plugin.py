"""Entry point through which vLLM finds the backend that rlmath adds to its weight transfer.

vLLM calls ``register`` in each of its processes, workers included, and perhaps more than once.
"""

from __future__ import annotations

SHARED_MEMORY = "shared_memory"


def register() -> None:
    """Add ``shared_memory`` to both of vLLM's factories; the modules load when first used."""
    from vllm.distributed.weight_transfer import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    if SHARED_MEMORY not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            SHARED_MEMORY,
            "rlmath.weights.transports.shared_memory_engine",
            "SharedMemoryEngine",
        )
    if SHARED_MEMORY not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            SHARED_MEMORY,
            "rlmath.weights.transports.shared_memory",
            "SharedMemoryTrainer",
        )
