"""The bound of a checkpoint's memory, by hand for one layout."""

from rlmath.checkpoint.memory import GATHER_BUFFER_BYTES, CheckpointBytes, checkpoint_bytes_of_rank

# Qwen2.5-7B on tensor rank 0 of 4, with its slice of the embedding as the largest parameter.
PARAMETERS, LARGEST = 7_615_616_512 // 4, 152064 * 3584 // 4


def test_a_save_is_bounded_on_the_gpu_and_shared_out_in_host_memory():
    found = checkpoint_bytes_of_rank(PARAMETERS, 32, LARGEST)
    assert found.gpu_bytes == GATHER_BUFFER_BYTES * 33 // 32 < 2**30
    # Megatron's own way: 12 bytes for each parameter of the stage, on every rank.
    assert found.host_bytes == 12 * (PARAMETERS // 32 + 2 * LARGEST) < 12 * PARAMETERS / 5
    background = checkpoint_bytes_of_rank(PARAMETERS, 32, LARGEST, background=True)
    assert background.host_bytes == found.host_bytes * 14 // 12


def test_a_rank_without_copies_writes_its_tensors_as_they_are():
    assert checkpoint_bytes_of_rank(1000, 1, 900) == CheckpointBytes(0, 0)
    found = checkpoint_bytes_of_rank(1000, 1, 900, background=True)
    assert found == CheckpointBytes(0, 14_000)
