import time
from collections import Counter
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rlmath.actor import communicators, parallel, policy
from rlmath.actor.communicators import describe
from rlmath.actor.settings import ActorSettings, ModelSettings
from rlmath.actor.stops import Stops
from rlmath.actor.worker import ActorWorker
from rlmath.checkpoint.writer import background_group
from rlmath.model.parallel import Layout
from tests.support.actors import build, make_batch

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


class ModelIsBuilt(Exception):
    """Raised in the place of building one."""


def start(layout, reads=lambda: None):
    """Start a rank until its model is built; ``reads``: called in the place of reading it."""

    def build(*_):
        reads()
        raise ModelIsBuilt

    worker = ActorWorker.__new__(ActorWorker)
    worker.rank = dist.get_rank()
    settings = ActorSettings(
        model_path="",
        model=ModelSettings(torch.float32),
        optimizer=None,
        temperature=1.0,
        max_tokens_per_microbatch=64,
        max_sequence_length=64,
    )
    with (
        mock.patch.object(parallel, "initialize", lambda *_, **__: None),  # It is a rank already.
        mock.patch.object(Stops, "connect", lambda *_: None),
        mock.patch.object(policy, "MegatronActor", build),
        pytest.raises(ModelIsBuilt),
    ):
        worker.start(settings, layout, "cpu", ("127.0.0.1", 0), 0, 1)


def start_until_model(layout, _):
    """Names of Megatron's groups without a collective when the model is built, and the ranks
    with which it exchanged messages, in batches or one by one, and by which group."""
    used = Counter()
    sent = []

    def counting(name):
        real = getattr(dist, name)

        def call(*args, group=None, **kwargs):
            used[group or dist.group.WORLD, name] += 1
            return real(*args, group=group, **kwargs)

        return mock.patch.object(dist, name, call)

    exchange = communicators._exchange

    def exchanging(ring, device, batched, by=None):
        members = dist.get_process_group_ranks(ring)
        exchange(ring, device, batched, by)
        through = "own" if by is None else len(dist.get_process_group_ranks(by))
        sent.extend((rank, batched, through) for rank in members if rank != dist.get_rank())

    with (
        counting("all_reduce"),
        counting("all_gather_into_tensor"),
        counting("reduce_scatter_tensor"),
        mock.patch.object(communicators, "_exchange", exchanging),
    ):
        start(layout)
    unused = [
        name
        for name, value in vars(parallel_state).items()
        for group in (value if isinstance(value, list) else [value])
        if isinstance(group, dist.ProcessGroup) and not all(used[group, one] for one in COLLECTIVES)
    ]
    return unused, sent


@pytest.mark.parametrize(
    ("layout", "neighbors_of_0"),
    [
        (Layout(2, 1, 2), set()),
        (Layout(1, 2, 1, context_parallel=2), {(1, True, "own"), (2, True, "own")}),
        (Layout(1, 2, 2, virtual_stages=2), {(2, False, "own"), (2, False, 4)}),
    ],
)
def test_each_group_has_collectives_before_the_model_is_built(ranks, layout, neighbors_of_0):
    found = ranks.run(layout, start_until_model)
    assert [unused for unused, _ in found] == [[]] * layout.world_size
    assert set(found[0][1]) == neighbors_of_0


def run_messages(layout, platform, model):
    """Pairs of ranks that exchange messages, and by which group, at the start and in a pass."""
    send, used = dist.ProcessGroup.send, set()

    def sending(group, tensors, to, tag):
        members = dist.get_process_group_ranks(group)
        used.add((tuple(members), frozenset((dist.get_rank(), members[to]))))
        return send(group, tensors, to, tag)

    actor = build(layout, platform, model)
    with mock.patch.object(dist.ProcessGroup, "send", sending):
        communicators.open_communicators(layout, platform)
        opened = set(used)
        used.clear()
        actor.log_probs(make_batch())
    return opened, used


def test_virtual_stages_send_by_open_communicators(ranks, models):
    """Megatron sends by two groups where there are two stages."""
    groups = set()
    for opened, used in ranks.run(Layout(1, 2, 2, virtual_stages=2), run_messages, models["tied"]):
        assert used <= opened
        groups |= {members for members, _ in used}
    assert groups == {(0, 2), (1, 3), (0, 1, 2, 3)}


def run_build(layout, platform, model):
    """Groups in which a rank waits between reading the weights and the next exchange."""
    waits = []
    with (
        mock.patch("megatron.core.optimizer.get_megatron_optimizer", side_effect=ModelIsBuilt),
        mock.patch.object(dist, "barrier", lambda group=None: waits.append(group)),
        pytest.raises(ModelIsBuilt),
    ):
        build(layout, platform, model)
    return [group is background_group() for group in waits]


def test_ranks_that_read_weights_at_different_speeds_meet_over_gloo(ranks, models):
    """NCCL would end the first after 600 s."""
    assert ranks.run(Layout(1, 1, 2), run_build, models["untied"]) == [[True]] * 2


def read_late(layout, _):
    """Start where one rank reads for longer than a collective may take."""

    def open_impatient(*_):
        background_group().set_timeout(timedelta(seconds=1))
        return communicators.Communicators()

    def reads():
        time.sleep(2.5 * dist.get_rank())
        dist.barrier(group=background_group())

    with mock.patch.object(communicators, "open_communicators", open_impatient):
        start(layout, reads)


def test_ranks_wait_for_one_with_a_slow_disk(ranks):
    ranks.run(Layout(1, 1, 2), read_late)


def measure(layout, platform, hosts):
    """As on several hosts."""
    host = hosts[dist.get_rank()]
    with mock.patch.object(communicators.socket, "gethostname", lambda: host):
        return communicators.open_communicators(layout, platform)


def test_links_are_measured_within_and_between_nodes(ranks):
    found = ranks.run(Layout(2, 1, 2), measure, ["a", "a", "b", "b"])
    for host, one in zip("aabb", found, strict=True):
        assert [(link.between_nodes, link.ranks, link.host) for link in one.links] == [
            (True, 4, host),
            (False, 2, host),
        ]
        assert all(link.gb_per_s > 0 for link in one.links)
    within, between = (line for line in describe(found) if line.startswith("all-reduce"))
    assert "1 MiB over 2 ranks within a node" in within
    assert "over 4 ranks between nodes" in between
    # A rank that is alone on its host, and all on one.
    alone = ranks.run(Layout(1, 1, 2), measure, ["a", "b"])
    assert [[link.between_nodes for link in one.links] for one in alone] == [[True], [True]]
    together = ranks.run(Layout(1, 1, 2), measure, ["a", "a"])
    assert [[link.between_nodes for link in one.links] for one in together] == [[False], [False]]
