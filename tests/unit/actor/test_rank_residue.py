"""What a rank keeps of its GPU has its communicators in it, and nobody else's has."""

from types import SimpleNamespace

import pytest

from rlmath.actor.worker import ActorWorker
from rlmath.device.residue import Residue

GIB = 2**30


@pytest.mark.parametrize("part", ["weights", "kv_cache"])
def test_room_for_engines_is_counted_with_the_communicators_that_were_reported(part):
    model = SimpleNamespace(
        device_state=SimpleNamespace(device_bytes=lambda: 7, host_bytes=lambda: 5 * GIB),
        release=lambda: None,
        release_optimizer=lambda: None,
    )
    worker = ActorWorker.__new__(ActorWorker)
    worker.actor, worker.value_model, worker.communicator_bytes = model, None, 2 * GIB
    worker._peaks = {"update": 60 * GIB}
    worker.platform = SimpleNamespace(
        release_cached_memory=lambda: None,
        reserved_bytes=lambda: 10 * GIB,
        bytes_of_others=lambda: 6 * GIB,
        memory_bytes=lambda: 80 * GIB,
    )
    left = worker.make_room(part)
    assert left == Residue(12 * GIB, 5 * GIB, 4 * GIB, 50 * GIB, 2 * GIB, 80 * GIB)
    # On CPU nobody counts, and there is no limit to hold.
    worker.communicator_bytes = 0
    worker.platform.reserved_bytes = worker.platform.bytes_of_others = lambda: None
    worker.platform.memory_bytes = lambda: None
    assert worker.make_room(part) == Residue(7, 5 * GIB, None, 60 * GIB - 7)
