"""Open the communicators of a rank's groups before the model is built, and measure their speed.

torch creates a NCCL communicator at a group's first collective, and NCCL needs 1 to 3 GiB for all
of them. Engines on the same GPU have sized their KV cache by then, so the memory would be missing
in the first step. Therefore each group runs its collectives when the ranks connect.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlmath.device import LinkProbe, Platform
from rlmath.model.parallel import Layout
from rlmath.utils.sizes import in_words


@dataclass(frozen=True)
class Link:
    """Measured bandwidth of an all-reduce."""

    between_nodes: bool  # Over all ranks on several nodes; otherwise over those of one node.
    ranks: int  # Number of ranks.
    # Bytes that each rank sent and received, in 10^9 per second: 2 (n - 1) / n times the size
    # divided by the time, as in NCCL's tests.
    gb_per_s: float
    host: str  # Host that measured.
    probe: LinkProbe  # Parameters of the measurement.


@dataclass(frozen=True)
class Communicators:
    """A rank's report after it connected to the others."""

    device_bytes: int | None = None  # GPU memory of its communicators; None on CPU.
    links: tuple[Link, ...] = ()  # Measured links; empty if the rank is alone.


def open_communicators(layout: Layout, platform: Platform) -> Communicators:
    """Run a collective on each group, exchange with neighbors, and measure. Collective over all
    ranks, once the groups exist."""
    before = platform.bytes_of_others()
    device = platform.torch_device
    for group in groups():
        _use(group, device)
    from megatron.core import parallel_state

    # Both ways of sending messages are used (Megatron's schedules, Transformer Engine's ring of
    # context ranks): for single messages torch opens a NCCL communicator per pair of ranks.
    stages = parallel_state.get_pipeline_model_parallel_group()
    _exchange(stages, device, batched=layout.virtual_stages == 1)
    if layout.virtual_stages > 1 and layout.pipeline_parallel == 2:
        # Megatron sends the second of two stages' messages by the group of all ranks
        # (``p2p_communication._p2p_ops``).
        _exchange(stages, device, batched=False, by=dist.group.WORLD)
    context = parallel_state.get_context_parallel_group()
    _exchange(context, device, batched=platform.batches_context_messages(layout.context_parallel))
    platform.synchronize()
    links = tuple(_measure(platform))
    platform.release_cached_memory()
    after = platform.bytes_of_others()
    taken = None if before is None or after is None else max(0, after - before)
    return Communicators(taken, links)


def groups() -> list[Any]:
    """All groups of this rank, in an order in which no two ranks wait for each other: the group of
    all ranks, then the order of Megatron's names."""
    from megatron.core import parallel_state

    found = [dist.group.WORLD]
    for _, value in sorted(vars(parallel_state).items()):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dist.ProcessGroup) and one not in found:
                found.append(one)
    return found


def _use(group: Any, device: torch.device) -> None:
    """Run the collectives of training with one element: NCCL opens rings, trees and the switch's
    multicast when an algorithm is first used."""
    size = dist.get_world_size(group)
    one, each = torch.zeros(1, device=device), torch.zeros(size, device=device)
    dist.all_reduce(one, group=group)
    dist.all_gather_into_tensor(each, one, group=group)
    dist.reduce_scatter_tensor(one, each, group=group)
    dist.all_to_all_single(torch.empty_like(each), each, group=group)


def _exchange(ring: Any, device: torch.device, batched: bool, by: Any = None) -> None:
    """Send to and receive from both neighbors in a group. ``by``: the group whose communicators
    carry the messages; ``None``: the same."""
    members, rank = dist.get_process_group_ranks(ring), dist.get_rank(ring)
    if len(members) == 1:
        return
    group = by or ring
    for step in (1, -1):
        to, origin = (members[(rank + sign * step) % len(members)] for sign in (1, -1))
        mine, theirs = (torch.zeros(1, device=device) for _ in range(2))
        operations = [
            dist.P2POp(dist.isend, mine, to, group),
            dist.P2POp(dist.irecv, theirs, origin, group),
        ]
        if batched:
            pending = dist.batch_isend_irecv(operations)
        else:
            # Both ends of a pair must take part in its first message: in a ring where all ranks
            # send first, they would deadlock.
            ordered = operations if rank % 2 == 0 else operations[::-1]
            pending = [one.op(one.tensor, one.peer, group) for one in ordered]
        for work in pending:
            work.wait()


def _measure(platform: Platform) -> Iterator[Link]:
    """Speed within this rank's node, and over all ranks if there are several nodes."""
    host = socket.gethostname()
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    own = [rank for rank, other in enumerate(hosts) if other == host]
    if len(own) < len(hosts):
        speed = _gb_per_s(dist.group.WORLD, platform)
        yield Link(True, len(hosts), speed, host, platform.link_probe)
    # torch numbers groups, so every rank creates those of all nodes.
    groups = {
        one: dist.new_group([rank for rank, other in enumerate(hosts) if other == one])
        for one in dict.fromkeys(hosts)
        if len(own) < len(hosts)
    }
    if len(own) == 1:
        return
    speed = _gb_per_s(groups.get(host, dist.group.WORLD), platform)
    for group in groups.values():
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)  # Also frees its buffers.
    yield Link(False, len(own), speed, host, platform.link_probe)


def _gb_per_s(group: Any, platform: Platform) -> float:
    size = dist.get_world_size(group)
    data = torch.zeros(platform.link_probe.num_bytes // 4, device=platform.torch_device)
    # The first all-reduce sets up the connection and synchronizes the ranks.
    dist.all_reduce(data, group=group)
    platform.synchronize()
    began = time.perf_counter()
    dist.all_reduce(data, group=group)
    platform.synchronize()
    taken = time.perf_counter() - began
    return data.numel() * 4 * 2 * (size - 1) / size / taken / 1e9


def describe(found: Sequence[Communicators]) -> list[str]:
    """Lines for the user: the slowest link of each kind, with a warning if it is slow, and the
    memory of communicators. ``found``: reports of all ranks."""
    lines = []
    for between in (False, True):
        links = [link for one in found for link in one.links if link.between_nodes is between]
        if not links:
            continue
        slowest = min(links, key=lambda link: link.gb_per_s)
        probe, speed = slowest.probe, f"{slowest.gb_per_s:.3g} GB/s"
        where = "between nodes" if between else f"within a node ({slowest.host})"
        lines.append(
            f"all-reduce of {probe.num_bytes / 2**20:g} MiB over {slowest.ranks} ranks {where}: "
            f"{speed}"
        )
        limit = probe.least_between_nodes if between else probe.least_within_node
        if slowest.gb_per_s < limit:
            cause = probe.cause_between_nodes if between else probe.cause_within_node
            lines.append(
                f"warning: {speed} {where} is below the expected {limit:g} GB/s. "
                f"Likely cause: {cause}"
            )
    taken = [one.device_bytes for one in found if one.device_bytes is not None]
    if taken:
        lines.append(f"NCCL's communicators take {in_words(max(taken))} of a rank's GPU")
    return lines
