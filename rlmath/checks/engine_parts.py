"""Checks of the parts of engines that have names: weight transport and further arguments."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.engine_arguments import ENGINE_ARGUMENTS, further_arguments
from rlmath.config.lora import LoraRollout
from rlmath.config.options import ENGINE_OPTIONS, TRANSPORT_OPTIONS
from rlmath.config.schema import Config
from rlmath.engines.transport import TRANSPORTS, choose_transport, transport_named
from rlmath.errors import ConfigError


def transport_problems(config: Config, device: str, colocated: bool) -> Iterator[str]:
    """Why the transport cannot be used there; an unknown name is told with the others."""
    name = config.weights.transport
    if name != "auto" and not TRANSPORTS.has(name):
        return
    given = config.weights.transport_options
    try:
        if name != "auto":  # Those of rlmath's own are registered since this was imported.
            TRANSPORT_OPTIONS.options(name, given)
        choose_transport(name, device=device, colocated=colocated, options=given)
    except (ConfigError, ValueError) as error:
        yield str(error)
        return
    has_adapters = config.actor.lora.rollout is not LoraRollout.merged
    if has_adapters and name != "auto" and transport_named(name).adapters is None:
        yield (
            f"weights.transport={name}: cannot carry adapters alone; use actor.lora.rollout=merged"
        )


def engine_argument_problems(config: Config, device: str) -> Iterator[str]:
    """Values of ``rollout.engine_arguments`` that engines cannot take."""
    name = config.rollout.engine_arguments
    if name is None or not ENGINE_ARGUMENTS.has(name):
        return
    try:
        further_arguments(name, device, ENGINE_OPTIONS.of_chosen(config))
    except ConfigError as error:
        yield str(error)
