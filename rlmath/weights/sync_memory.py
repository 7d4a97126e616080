"""How many bytes of buffers a weight sync holds at once, on each end, at its worst moment.

A pure function of sizes, so that the plan can ask without torch. A *piece* is what travels as one:
a bucket, or a tensor that is larger than a bucket. Counted for each transport:

``ipc``, on each trainer rank: the bucket that vLLM reads; the next one, which the ranks gather
meanwhile, with its packed messages (none where one rank holds the whole model); the tensor that
vLLM took last; vLLM's shared buffer. That is five pieces. On each engine worker: copies of the
piece, taken out of the shared buffer.

``nccl``, on a rank that sends to engines (rank 0, or of an MoE one for each worker of an engine):
the same three pieces at most, and vLLM's own: it collects tensors until they exceed the bucket, so
a message is up to a bucket and the largest tensor long, and it copies them together while it still
holds them. Other ranks have the same pieces, or two packed messages. On each engine worker: two
messages, because the next one's buffer is made before the last one's is dropped.

``shared_memory``: two segments of host memory.

On the engine vLLM's reload adds, for the module that it is loading: the whole tensors that have
come, until all of them are there, and the module's new parameters before they are copied in place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncBuffers:
    """Bytes beside the weights themselves, at the worst moment of a weight sync.

    Attributes:
        trainer_bytes: On the trainer rank that has most; GPU memory except on CPU transports.
        engine_bytes: On each engine worker.
    """

    trainer_bytes: int
    engine_bytes: int


def shared_buffer_bytes(bucket_bytes: int, largest_tensor_bytes: int) -> int:
    """Size of ``ipc``'s buffer, into which vLLM's producer has to fit each tensor whole."""
    return max(bucket_bytes, largest_tensor_bytes)


def sync_buffer_bytes(
    transport: str,
    bucket_bytes: int,
    largest_tensor_bytes: int,
    *,
    model_ranks: int = 2,
    largest_module_bytes: int | None = None,
    engine_tensor_parallel: int = 1,
) -> SyncBuffers:
    """Upper bound of what a weight sync holds at once.

    Args:
        transport: Its name, not ``auto``.
        bucket_bytes: ``weights.bucket_size_mib`` in bytes.
        largest_tensor_bytes: Of the Hugging Face tensors, as they are sent.
        model_ranks: Trainer ranks that share one copy of the model.
        largest_module_bytes: Whole tensors of the largest vLLM module (experts of a layer, say);
            ``None``: the largest tensor.
        engine_tensor_parallel: Ranks of an engine, which share that module.

    Raises:
        ValueError: There is no such transport.
    """
    piece = shared_buffer_bytes(bucket_bytes, largest_tensor_bytes)
    gathered = 2 * piece + (piece if model_ranks > 1 else 0)
    message = bucket_bytes + largest_tensor_bytes
    module = largest_tensor_bytes if largest_module_bytes is None else largest_module_bytes
    reload = module + -(-module // engine_tensor_parallel)
    if transport == "ipc":
        return SyncBuffers(gathered + largest_tensor_bytes + piece, piece + reload)
    if transport == "nccl":
        return SyncBuffers(gathered + 2 * message, 2 * message + reload)
    if transport == "shared_memory":
        return SyncBuffers(2 * piece, 0)
    raise ValueError(f"there is no transport {transport!r}")
