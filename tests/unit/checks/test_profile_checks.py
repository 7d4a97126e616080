import dataclasses
import stat

import pytest

from rlmath.checks.pairs import pair_problems
from rlmath.checks.profile import profile_problems
from rlmath.checks.run import find_problems
from rlmath.config.load import load
from rlmath.config.schema import Device
from tests.unit.checks.config_cases import GPU_MACHINE

BASE = ["model.path=m", "runner.run_dir=r", "runner.steps=6"]


def problems(*overrides, machine=GPU_MACHINE):
    return list(profile_problems(load([*BASE, *overrides]), machine))


def test_steps_are_steps_of_the_run():
    assert problems("runner.profile.steps=[1,6]") == []
    found = problems("runner.profile={steps: [0, 6, 7]}")
    assert ["no step 0" in found[0], "no step 7" in found[1], len(found)] == [True, True, 2]
    assert "1 to 6" in found[1]
    config = load([*BASE, "runner.profile.steps=[7]"])
    of_training, of_evaluation = (
        [one for one in find_problems(config, command, GPU_MACHINE) if "profile" in one]
        for command in ("train", "evaluate")
    )
    assert len(of_training) == 1 and of_evaluation == []


def test_nsys_is_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = "runner.profile={steps: [2], tool: nsys}"
    (found,) = problems(wanted)
    assert "runner.profile.tool=nsys" in found and "PATH" in found
    # The nodes of a cluster, and another machine that is checked for, may have it.
    assert problems(wanted, "cluster.ray_address=auto") == []
    assert problems(wanted, machine=dataclasses.replace(GPU_MACHINE, elsewhere=True)) == []
    (tmp_path / "nsys").touch()
    (tmp_path / "nsys").chmod(stat.S_IRWXU)
    assert problems(wanted) == []


@pytest.mark.parametrize("tool", ["nsys", "memory"])
def test_tools_for_gpus_are_refused_on_a_cpu(tool):
    config = load([*BASE, f"runner.profile={{steps: [2], tool: {tool}}}"])
    (found,) = pair_problems(config, Device.cpu, "train")
    assert f"runner.profile.tool={tool}" in found and "use torch" in found
    assert list(pair_problems(config, Device.cuda, "train")) == []
    # An evaluation with the settings of a run profiles nothing.
    assert list(pair_problems(config, Device.cpu, "evaluate")) == []
