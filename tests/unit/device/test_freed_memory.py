import psutil

from rlmath.device.freed_memory import return_freed_memory

MIB = 2**20


def test_holes_of_the_heap_go_back_to_the_system():
    """Blocks below the size of separate mappings, each twentieth of which lives on."""
    blocks = [bytearray(b"x" * 100_000) for _ in range(4000)]
    kept = blocks[::20]
    del blocks
    before = psutil.Process().memory_info().rss
    kept_bytes = return_freed_memory(keep_bytes=2**40)
    assert kept_bytes > 300 * MIB
    assert psutil.Process().memory_info().rss > before - 10 * MIB
    return_freed_memory(keep_bytes=MIB)
    assert psutil.Process().memory_info().rss < before - 300 * MIB
    assert all(block == b"x" * 100_000 for block in kept)
    assert return_freed_memory(keep_bytes=2**40) < kept_bytes - 300 * MIB
