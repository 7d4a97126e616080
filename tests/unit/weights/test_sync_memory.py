"""The bound of a weight sync's buffers, by hand for one model."""

from __future__ import annotations

import pytest

from rlmath.weights.sync_memory import SyncBuffers, sync_buffer_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("transport", "trainer_mib", "engine_mib"),
    [
        # Two gathered and one packed; vLLM's last tensor and its shared buffer.
        ("ipc", 5 * 1090, 1090 + 2 * 1090),
        ("nccl", 3 * 1090 + 2 * (512 + 1090), 2 * (512 + 1090) + 2 * 1090),
        ("shared_memory", 2 * 1090, 0),
    ],
)
def test_buffers_of_a_tensor_larger_than_the_bucket(
    transport: str, trainer_mib: int, engine_mib: int
) -> None:
    found = sync_buffer_bytes(transport, 512 * MIB, 1090 * MIB)
    assert found == SyncBuffers(trainer_mib * MIB, engine_mib * MIB)


def test_one_rank_packs_nothing_and_engine_ranks_share_a_module() -> None:
    found = sync_buffer_bytes(
        "ipc",
        512 * MIB,
        100 * MIB,
        model_ranks=1,
        largest_module_bytes=800 * MIB,
        engine_tensor_parallel=4,
    )
    assert found == SyncBuffers((3 * 512 + 100) * MIB, (512 + 800 + 200) * MIB)
    with pytest.raises(ValueError, match="pigeon"):
        sync_buffer_bytes("pigeon", 1, 1)
