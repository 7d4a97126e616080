"""Memory of engines that sleep beside a rank, over many cycles."""

from __future__ import annotations

from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.checks.engines import gpu_of
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.device.nvidia import gpu_states
from rlmath.rollout.weight_sync import sync_weights

CYCLES = 20
# Growth over all cycles; a leak of a megabyte a step would end a run of thousands.
MOST_GROWTH_MIB = 64
# Least share of the engine's memory that it has to give back when it sleeps.
LEAST_GIVEN_BACK = 0.7
SAMPLES = 16


def run(node: Node, record: Record) -> None:
    """Sleep, wake with new weights and sample, again and again."""
    if not node.on_cuda:
        record.not_applicable("", "engines on a CPU keep their memory and never sleep")
        return
    config = parts.settings(node, "run", gpus=1)
    wanted = parts.requests(node, SAMPLES, max_tokens=8)
    asleep: list[int] = []
    with parts.start(config, record) as (actor, pool):
        (gpu,) = set(actor.call(gpu_of))
        parts.sample(pool, wanted)
        awake = _used_mib(gpu)
        for cycle in range(1, CYCLES + 1):
            with record.phase(f"cycle {cycle}"):
                pool.sleep()
                asleep.append(_used_mib(gpu))
                sync_weights(actor, pool, cycle)
                parts.sample(pool, wanted)
    given_back = awake - asleep[0]
    least = LEAST_GIVEN_BACK * config.rollout.gpu_memory_utilization * node.gpu_gib * 1024
    # The first cycles may still allocate caches that stay.
    growth = asleep[-1] - min(asleep[2:5])
    record.figure("used while awake", awake, "MiB")
    record.figure("used while asleep, by cycle", " ".join(map(str, asleep)), "MiB")
    record.figure("given back by sleep", given_back, "MiB", limit=f">= {least:.0f}", key=True)
    record.figure(
        f"growth over {CYCLES} cycles", growth, "MiB", limit=f"<= {MOST_GROWTH_MIB}", key=True
    )
    record.require(
        given_back >= least,
        f"a sleeping engine gave back {given_back} MiB of the "
        f"{config.rollout.gpu_memory_utilization:g} x {node.gpu_gib:.1f} GiB that it may take",
    )
    record.require(
        growth <= MOST_GROWTH_MIB,
        f"memory in use while the engine sleeps grew by {growth} MiB over {CYCLES} cycles",
        "Report this with the file. A run would lose memory with every step; "
        "cluster.placement=separate does not sleep.",
    )


def _used_mib(uuid: str) -> int:
    return next(state.used_mib for state in gpu_states() if state.uuid == uuid)
