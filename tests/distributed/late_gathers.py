"""All-gathers of parameters that no one sees before they wait for them."""

from unittest import mock

import torch


class _Late:
    """Result of a gather, hidden until someone waits for it; takes no other rank to do so."""

    def __init__(self, places, values):
        self._places, self._values = places, values

    def wait(self):
        for place, value in zip(self._places, self._values, strict=True):
            place.copy_(value)


def late_gathers():
    """Gathers of ``actor.overlap_param_gather`` are done at once, and what they bring is put into
    the parameters when they are waited for. gloo's may be done before anyone looks."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    plainly = Group.start_param_sync

    @torch.no_grad()
    def start(group, force_sync=False):
        if group.param_gather_handle is not None or not group.ddp_config.overlap_param_gather:
            return plainly(group, force_sync)
        before = [bucket.param_data.clone() for bucket in group.buckets]
        plainly(group, force_sync)
        if group.param_gather_handle is not None:
            group.param_gather_handle.wait()
            places = [bucket.param_data for bucket in group.buckets]
            group.param_gather_handle = _Late(places, [one.clone() for one in places])
            for place, value in zip(places, before, strict=True):
                place.copy_(value)
        return None

    return mock.patch.object(Group, "start_param_sync", start)


@torch.no_grad()
def set_under_way(gather):
    """Have complete parameters be pending again: the parts of other ranks are 0 until it is waited
    for."""
    for group in gather._groups:
        assert group.param_gather_handle is None
        places = [bucket.param_data for bucket in group.buckets]
        group.param_gather_handle = _Late(places, [one.clone() for one in places])
        rank = group.intra_distributed_optimizer_instance_rank
        for place in places:
            shares = place.chunk(group.intra_distributed_optimizer_instance_size)
            for number, share in enumerate(shares):
                if number != rank:
                    share.zero_()
