"""The engine's routes go to the device once per micro-batch."""

import torch

from rlmath.actor.engine_routes import EngineRoutes, UploadedRoutes


class Device:
    """A platform that notes what is page-locked, with a device that notes what comes to it."""

    torch_device = torch.device("meta")

    def __init__(self):
        self.locked: list[tuple[int, ...]] = []

    def page_locked(self, tensor):
        self.locked.append(tuple(tensor.shape))
        return tensor


def test_routers_of_all_layers_share_one_upload_of_a_micro_batch():
    engine = [
        EngineRoutes(torch.zeros(tokens, 4, 2, dtype=torch.uint8), torch.ones(tokens) > 0)
        for tokens in (5, 3)
    ]
    platform = Device()
    uploaded = UploadedRoutes(engine, platform)
    assert platform.locked == [(5, 4, 2), (5,), (3, 4, 2), (3,)]
    first = uploaded.of(0)
    assert first.routes.device.type == first.is_known.device.type == "meta"
    assert all(uploaded.of(0) is first for _ in range(4))
    second = uploaded.of(1)
    assert second.routes.shape == (3, 4, 2)
    # One is held at a time; an interleaved schedule comes back to one that was dropped.
    again = uploaded.of(0)
    assert again is not first and again.routes.shape == (5, 4, 2)
    assert engine[0].routes.device.type == "cpu"
