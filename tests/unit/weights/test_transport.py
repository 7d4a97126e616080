"""Transports: where each fits, and the bound of its buffers, by hand for one model."""

import pytest

from rlmath.weights.transport import TRANSPORTS, SyncBuffers, SyncSizes, choose_transport

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
def test_buffers_of_a_tensor_larger_than_the_bucket(transport, trainer_mib, engine_mib):
    found = TRANSPORTS[transport].plan_bytes(SyncSizes(512 * MIB, 1090 * MIB))
    assert found == SyncBuffers(trainer_mib * MIB, engine_mib * MIB)


def test_one_rank_packs_nothing_and_engine_ranks_share_a_module():
    sizes = SyncSizes(
        512 * MIB,
        100 * MIB,
        model_ranks=1,
        largest_module_bytes=800 * MIB,
        engine_tensor_parallel=4,
    )
    found = TRANSPORTS["ipc"].plan_bytes(sizes)
    assert found == SyncBuffers((3 * 512 + 100) * MIB, (512 + 800 + 200) * MIB)


@pytest.mark.parametrize(
    ("device", "colocated", "fitting"),
    [("cpu", False, "shared_memory"), ("cuda", True, "ipc"), ("cuda", False, "nccl")],
)
def test_one_transport_fits_where_the_weights_go(device, colocated, fitting):
    assert choose_transport("auto", device=device, colocated=colocated) == fitting
    assert choose_transport(fitting, device=device, colocated=colocated) == fitting
    for other in TRANSPORTS.keys() - {fitting}:
        with pytest.raises(ValueError, match=rf"transport={other}: .* has to be {fitting}"):
            choose_transport(other, device=device, colocated=colocated)
