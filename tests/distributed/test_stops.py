"""Ranks asked to stop in an update agree on a micro-batch, and then nothing has changed."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.actor.stops import Stops, ask_to_stop, stops
from rlmath.errors import UpdateStopped
from rlmath.model.parallel import Layout
from tests.distributed.test_offload import state_of
from tests.support.actors import build, make_batch

UPDATE = StepPlan(minibatches=2)
SETTINGS = {
    "routing_replay": "old_log_probs",
    "max_tokens_per_microbatch": 32,
    "overlap_gradients": True,
    "distributed_optimizer": True,
    "model": ModelSettings(torch.float32, sequence_parallel=True, recompute="full"),
}


class Worker:
    """Fields that ``state_of`` reads."""

    def __init__(self, actor):
        self._actor = actor

    def _models(self):
        return {"actor": self._actor}


def ranks_store():
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def asking_before(number):
    """Ask when this process begins a pass's micro-batch of this number, from 1, and wait until the
    ranks are held or have answered."""
    skips, numbers, store = Stops.skips, set(), ranks_store()

    def skips_and_asks(self, one):
        numbers.add(self._first + one)
        if len(numbers) == number:
            ask_to_stop(store.host, store.port)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_held or store.check([f"rlmath/begun/{dist.get_rank()}"]), 30
                )
        return skips(self, one)

    return mock.patch.object(Stops, "skips", skips_and_asks)


def run(layout, platform, model, batch, asked_in):
    """A step, and another in which the ranks are asked to stop in a minibatch.

    Returns:
        Whether the update was stopped, whether all is as before it, and its metrics.
    """
    store = ranks_store()
    stops.connect(store.host, store.port, dist.get_rank(), layout.world_size)
    actor = build(layout, platform, model, **SETTINGS)
    worker = Worker(actor)
    shard = actor.shard_of(batch, UPDATE, 0)
    stops.begin_step()
    values = actor.shard_log_probs(shard, "old")
    old = values.log_probs if values is not None else torch.zeros(len(shard.batch.loss_mask))
    shard = shard.with_values(old_log_probs=old)
    actor.update_shard(shard, UPDATE)
    actor.shard_log_probs(shard, "old")
    stops.begin_step()
    # A rank of another copy of the model may still be in the last step; the driver waits for it.
    dist.barrier()
    before = state_of(worker)
    counts = [len(share.micro_batches) for share in shard.shares()]
    assert len(counts) == 2 and min(counts) >= 3, "too few to stop among"
    found = ""
    number = -1 if asked_in is None else sum(counts[:asked_in]) + 2
    with asking_before(number if dist.get_rank() == 0 else -1):
        try:
            found = repr(actor.update_shard(shard, UPDATE).minibatches)
        except UpdateStopped:
            found = "stopped"
    after = state_of(worker)
    same = all(torch.equal(after[name], one) for name, one in before.items())
    if found == "stopped":
        # The ranks are in step with each other, and skip what comes.
        with pytest.raises(UpdateStopped):
            actor.shard_log_probs(shard)
    return found == "stopped", same, found


@pytest.mark.parametrize(
    "layout",
    [
        # Ranks without stages; the next one has both.
        pytest.param(Layout(2, 1, 2, expert_parallel=2), marks=pytest.mark.long),
        Layout(1, 2, 2, expert_parallel=2),
        Layout(1, 2, 1, virtual_stages=2),
    ],
    ids=str,
)
def test_an_update_is_stopped_until_its_optimizer_steps(ranks, layout, mixture):
    batch = make_batch(24)
    for stopped, same, _ in ranks.run(layout, run, mixture, batch, 0):
        assert stopped and same
    undisturbed = ranks.run(layout, run, mixture, batch, None)
    assert not any(same or stopped for stopped, same, _ in undisturbed)
    assert ranks.run(layout, run, mixture, batch, 1) == undisturbed
