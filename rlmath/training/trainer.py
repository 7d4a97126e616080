"""The actor as the engines' trainer, which a pool calls when engines restart."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from rlmath.actor.group import ActorGroup
from rlmath.config.rollout import Quantization
from rlmath.config.schema import Config, DType
from rlmath.config.weights import bucket_mib
from rlmath.engines.requests import EngineSpec
from rlmath.engines.transports import TransportPlan
from rlmath.model.spec import read_model_spec


class ActorTrainer:
    """A ``rlmath.rollout.pool.Trainer``. ``spec``: spec of the engines."""

    def __init__(self, config: Config, spec: EngineSpec, actor: ActorGroup) -> None:
        self._config, self._spec, self._actor = config, spec, actor

    def release_cached_memory(self) -> None:
        self._actor.release_cached_memory()

    def connect(self, engines: Sequence[Any]) -> None:
        """Connect the ranks to these engines instead of the earlier ones."""
        self._actor.connect_engines(transport_plan(self._config, self._spec, engines))

    def send_weights(self, version: int) -> None:
        """Send the ranks' present weights to the engines that they have met."""
        self._actor.send_weights(version)


def transport_plan(config: Config, spec: EngineSpec, engines: Sequence[Any]) -> TransportPlan:
    """The actor's plan for sending weights to some of a pool's engines."""
    model = read_model_spec(config.model.path)
    weights_bytes = model.num_parameters * (4 if config.model.dtype is DType.float32 else 2)
    cuda = spec.device == "cuda"
    return TransportPlan(
        transport=spec.transport,  # type: ignore[arg-type]
        engines=tuple(engines),
        ranks_per_engine=spec.tensor_parallel,
        bucket_size_mib=bucket_mib(config.weights.bucket_size_mib, weights_bytes, cuda=cuda),
        run_id=uuid.uuid4().hex[:12],
        adapters=spec.adapters is not None,
        quantized=spec.quantization is not Quantization.none,
        options=config.weights.transport_options,
    )
