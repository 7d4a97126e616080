"""The connection of a trainer rank to the engines, by the transport of its plan."""

from __future__ import annotations

from rlmath.device import CPU, Platform
from rlmath.engines.transport import transport_named
from rlmath.engines.transports import TrainerConnection, TransportPlan
from rlmath.weights.gather import BucketGatherer


def connect(
    plan: TransportPlan, gatherer: BucketGatherer, platform: Platform = CPU
) -> TrainerConnection:
    """Connect to the engines, which must be ready and idle. Collective over all trainer ranks.
    Raises UserError: there is not enough shared memory."""
    return transport_named(plan.transport, plan.options).connect(plan, gatherer, platform)
