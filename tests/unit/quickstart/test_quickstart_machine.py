"""The quickstart's settings suit the machine: CPU, one GPU, several."""

import pytest

from rlmath.checks.machine import Machine
from rlmath.config import arithmetic, load
from rlmath.config.schema import Device, DType
from rlmath.quickstart.run import for_machine

MEMORY_BYTES = 64 * 2**30


def test_on_a_cpu_nothing_is_changed():
    assert for_machine(Machine(0, "2.13.0+cpu", MEMORY_BYTES), []) == []
    assert for_machine(Machine(1, "2.13.0", MEMORY_BYTES), ["cluster.device=cpu"]) == []


@pytest.mark.parametrize(("gpus", "tp", "dp"), [(1, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_on_gpus_all_are_used(gpus, tp, dp):
    machine = Machine(gpus, "2.13.0", MEMORY_BYTES)
    config = load.load(["experiment=quickstart", *for_machine(machine, [])])
    layout = arithmetic.resolve_layout(config, machine.device(config.cluster.device))
    assert machine.device(config.cluster.device) is Device.cuda
    assert (layout.actor.tensor_parallel, layout.actor.data_parallel) == (tp, dp)
    assert config.model.dtype is DType.bfloat16
