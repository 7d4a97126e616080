"""Requirements of ``actor.fp8``: machines, layouts, sizes of a model, and a correction."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.checks.machine import Machine
from rlmath.checks.quantization import correction_problems
from rlmath.config.fp8_training import fp8_of
from rlmath.config.schema import Config, Device
from rlmath.model.fp8_training import capability_problem, size_problems
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec


def fp8_problems(config: Config, machine: Machine, device: Device, command: str) -> Iterator[str]:
    fp8 = fp8_of(config.actor)
    if fp8 is None or command == "evaluate" or device is Device.cpu:
        return
    here = config.cluster.ray_address is None and machine.has_cuda
    if here and machine.compute_capability is not None:
        problem = capability_problem(fp8, machine.compute_capability)
        if problem is not None:
            yield problem
    yield from correction_problems(config, command, f"actor.fp8={config.actor.fp8.value}")


def fp8_model(config: Config, model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Sizes that Transformer Engine's products do not take."""
    fp8 = fp8_of(config.actor)
    if fp8 is None:
        return
    found = list(size_problems(model, layout, fp8))
    if found:
        yield (
            f"actor.fp8_recipe={fp8.recipe}: {'; '.join(found)}; change actor.tensor_parallel="
            f"{layout.tensor_parallel}, or use another recipe or actor.fp8=none"
        )
