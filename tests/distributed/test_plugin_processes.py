"""Ray's processes import the plug-ins before anything else, and a node that cannot is named."""

import sys
from types import ModuleType

import pytest
import ray

from rlmath.cluster.session import ray_session
from rlmath.config.load import load
from rlmath.config.schema import ClusterConfig
from rlmath.errors import ConfigError
from rlmath.plugins.loading import imported_plugins
from rlmath.training.plan import plan_step
from tests.distributed.plugin_process import Process
from tests.unit.plugins.test_plugin_loading import LOSS, file, own_plugins  # noqa: F401

GIVEN = ["model.path=m", "runner.run_dir=r"]


def test_an_actor_with_its_own_environment_has_the_loss_of_a_file(file):  # noqa: F811
    config = load([*GIVEN, f"algorithm.loss={file}:mine"])
    objective = plan_step(config, 1).objective
    here = imported_plugins()
    # Nobody else reads it from here on.
    file.unlink()
    with ray_session(ClusterConfig(object_store_mib=80)):
        environment = {"runtime_env": {"env_vars": {"RLMATH_OF_TEST": "1"}}, "num_cpus": 0}
        process = ray.remote(Process).options(**environment).remote()
        assert ray.get(process.loss.remote(objective), timeout=120) == ("mine", 2.0, here)


def test_a_node_without_a_package_is_named(
    own_plugins,  # noqa: F811
    monkeypatch,
):
    # Only this process has the module, like a package that only the driver's node has.
    monkeypatch.setitem(sys.modules, "only_here_of_mine", ModuleType("only_here_of_mine"))
    load([*GIVEN, "plugins=[only_here_of_mine]"])
    with pytest.raises(ConfigError) as caught, ray_session(ClusterConfig(object_store_mib=80)):
        raise AssertionError("it began")
    assert "plugins on node 127.0.0.1: no module 'only_here_of_mine'" in str(caught.value)
