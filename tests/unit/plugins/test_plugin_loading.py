"""A user's file or package is imported once, by value elsewhere, and named when it cannot be."""

import importlib.metadata
import pickle
import random
import sys
from pathlib import Path

import pytest
import torch
from ray import cloudpickle

from rlmath.algorithms.kl import kl_estimate
from rlmath.algorithms.losses import LOSSES
from rlmath.batching.shards import ShardSettings, assign_shards
from rlmath.checks import attempts
from rlmath.checks.overview import describe_training
from rlmath.checks.run import names
from rlmath.commands.plugin_test.cli import KINDS
from rlmath.commands.plugin_test.ranks import made_batch
from rlmath.config.load import load, to_plain, with_values
from rlmath.engines.patches.register import require_plugin
from rlmath.errors import ConfigError
from rlmath.plugins import loading
from rlmath.plugins.source import PluginError, hashes
from rlmath.training.plan import plan_step
from tests.support.program_answers import output_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "plugins"
GIVEN = ["model.path=m", "runner.run_dir=r"]
LOSS = """
from dataclasses import dataclass
from rlmath.algorithms.losses import policy_loss
from rlmath.utils.setting import Options, setting

@dataclass(frozen=True)
class MineOptions(Options):
    scale: float = setting(FACTOR, "Factor of the loss.", above=0)

@policy_loss("mine_of_test", MineOptions)
def mine(inputs, options):
    return -options.scale * inputs.token_advantages() * inputs.log_ratio().exp(), {}

def plain(inputs, options):
    return inputs.log_ratio()
"""


@pytest.fixture
def own_plugins(monkeypatch):
    for name in ("_imported", "_everywhere", "_failed"):
        monkeypatch.setattr(loading, name, {})
    for kind in KINDS:
        monkeypatch.setattr(kind.registry, "_known", dict(kind.registry._known))
    yield


@pytest.fixture
def file(tmp_path, own_plugins):
    path = tmp_path / "my loss.py"
    path.write_text(LOSS.replace("FACTOR", "2.0"))
    return path


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        load([*GIVEN, *overrides])
    return str(caught.value)


def test_a_loss_of_a_file_by_name_and_directly(file):
    for chosen in (
        [f"plugins=[{file}]", "algorithm.loss=mine_of_test"],
        [f"algorithm.loss={file}:mine"],
    ):
        config = load([*GIVEN, *chosen, "algorithm.loss_options.scale=3"])
        assert config.algorithm.loss_options == {"scale": 3.0}
        assert config.plugin_hashes == hashes(str(file)) and len(config.plugin_hashes) == 1
        objective = plan_step(config, 1).objective
        assert objective.loss_options.scale == 3.0
        message = refusal(*chosen, "algorithm.loss_options.scale=0")
        assert "scale = 0.0: has to be more than 0" in message
        assert "it has scale" in refusal(*chosen, "algorithm.loss_options.skale=1")


def test_options_of_an_aggregation_and_of_an_estimator_reach_the_ranks(own_plugins):
    config = load(
        [
            *GIVEN,
            f"algorithm.aggregation={EXAMPLES}/aggregation.py:power_length",
            "algorithm.aggregation_options.power=1",
            f"algorithm.kl_estimator={EXAMPLES}/kl_estimator.py:huber",
            "algorithm.kl_options.limit=0.25",
            "algorithm.kl_coef=0.1",
        ]
    )
    plan = plan_step(config, 1)
    batch = made_batch()
    settings = ShardSettings(
        1, 64, aggregation=plan.aggregation, aggregation_options=plan.aggregation_options
    )
    ((_, weights, *_),) = assign_shards(batch, settings)
    assert weights.tolist() == pytest.approx([1 / 8] * 8)
    far = torch.tensor([0.5])
    kl = kl_estimate(plan.objective.kl_estimator, far, 0 * far, far, plan.objective.kl_options)
    assert kl.tolist() == [0.25 * (0.5 - 0.125)]
    assert "power_length (power 1)" in (said := describe_training(config, None)), said
    assert "huber (limit 0.25) in the loss" in said
    assert "algorithm.kl_options: limit = 0.0" in refusal(
        f"algorithm.kl_estimator={EXAMPLES}/kl_estimator.py:huber", "algorithm.kl_options.limit=0"
    )
    assert "has no options" in refusal("algorithm.kl_options.limit=1")


@pytest.mark.process
def test_another_process_imports_it_by_value(file):
    config = load([*GIVEN, f"algorithm.loss={file}:mine"])
    objective = plan_step(config, 1).objective
    hook = loading.setup_hook()
    given = file.parent / "given.pickle"
    # The function by value, as Ray sends it; the settings only after it has run.
    given.write_bytes(pickle.dumps((cloudpickle.dumps(hook), cloudpickle.dumps(objective))))
    file.unlink()
    program = (
        "import pickle, sys\n"
        "hook, objective = pickle.load(open(sys.argv[1], 'rb'))\n"
        "pickle.loads(hook)()\n"
        "objective = pickle.loads(objective)\n"
        "from rlmath.algorithms.losses import LOSSES\n"
        "print(objective.loss_options.scale, LOSSES.get(objective.loss).__name__)\n"
        "from rlmath.plugins.loading import imported_plugins\n"
        "print(imported_plugins())\n"
    )
    first, second = output_of(program, given).splitlines()
    assert first == "2.0 mine"
    assert second == repr(loading.imported_plugins()) and config.plugin_hashes[str(file)] in second


@pytest.mark.process
@pytest.mark.parametrize("starts", ["import_from_environment()", "register()"])
def test_a_process_without_ray_imports_from_its_environment(file, starts):
    """vLLM's spawned workers call ``register`` before anything else."""
    load([*GIVEN, f"plugins=[{file}]"])
    variables = loading.environment()
    file.unlink()
    program = (
        "from rlmath.plugins.loading import import_from_environment, imported_plugins\n"
        "from rlmath.vllm_plugin.register import register\n"
        f"{starts}\n"
        "from rlmath.algorithms.losses import LOSSES\n"
        "print(LOSSES.get('mine_of_test').__name__, imported_plugins().failed)\n"
    )
    found = output_of(program, **variables, RLMATH_ENGINE="1")
    assert found.splitlines()[-1] == "mine ()"


def test_files_that_do_not_fit_an_environment_are_refused(file):
    noise = "".join(random.Random(0).choices("0123456789abcdef", k=400_000))
    file.write_text(file.read_text() + f"NOISE = '{noise}'\n")
    loading.use(str(file))
    with pytest.raises(PluginError, match="install them as a package"):
        loading.environment()


def test_unimportable_plugins_are_named(file, tmp_path):
    missing = refusal(f"plugins=[{tmp_path}/gone.py,no_such_package_of_mine]")
    assert "gone.py: no such file" in missing and "no module 'no_such_package_of_mine'" in missing
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    assert "ZeroDivisionError while loading it" in refusal(f"plugins=[{broken}]")
    name = f"algorithm.loss={file}:plane"
    (message,) = names(load([*GIVEN, name]))
    assert "has no 'plane'; it has: MineOptions, mine, plain" in message
    (message,) = names(load([*GIVEN, f"algorithm.loss={file}:plain"]))
    assert "plain is not registered for algorithm.loss" in message
    taken = tmp_path / "taken.py"
    taken.write_text(LOSS.replace("FACTOR", "1.0").replace("mine_of_test", "ppo_clip"))
    assert "'ppo_clip' is registered twice" in refusal(f"plugins=[{taken}]")
    assert LOSSES.get("ppo_clip").__module__ == "rlmath.algorithms.losses.ppo_clip"


def test_a_process_that_lacks_it_says_so_when_it_is_asked_for(file):
    gone = loading.Source("gone_package_of_mine", "gone_package_of_mine")
    loading.receive((gone,))
    (message,) = loading.imported_plugins().failed
    assert "no module 'gone_package_of_mine'" in message
    with pytest.raises(PluginError, match="no module 'gone_package_of_mine'"):
        LOSSES.get("gone_package_of_mine:loss")


def test_a_changed_file_is_imported_again_by_the_next_run_only(file):
    name = f"{file}:mine"
    config = load([*GIVEN, f"algorithm.loss={name}"])
    file.write_text(LOSS.replace("FACTOR", "4.0"))
    assert LOSSES.options(name)().scale == 2.0
    now = load([*GIVEN, f"algorithm.loss={name}", "algorithm.loss_options.scale=2"])
    assert LOSSES.options(name)().scale == 4.0
    (old,), (new,) = config.plugin_hashes.values(), now.plugin_hashes.values()
    assert old != new
    # Settings of the run before name the file and the hash that is not there.
    with pytest.raises(ConfigError) as caught:
        with_values(to_plain(config), [])
    assert f"{file} has changed" in str(caught.value) and old in str(caught.value)
    (change,) = attempts.changes(to_plain(config), now)
    assert str(change) == f"plugin_hashes.{file}: {old} -> {new}"


def test_hashes_of_a_package_are_of_its_files(tmp_path, own_plugins, monkeypatch):
    package = tmp_path / "package_of_mine"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "losses.py", "inner/__init__.py"):
        (package / name).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = hashes("package_of_mine.losses")
    assert sorted(found) == [
        "package_of_mine/__init__.py",
        "package_of_mine/inner/__init__.py",
        "package_of_mine/losses.py",
    ]
    config = load([*GIVEN, "plugins=[package_of_mine.losses]"])
    assert config.plugin_hashes == found
    (package / "inner" / "__init__.py").unlink()
    with pytest.raises(ConfigError, match=r"package_of_mine/inner/__init__\.py, of hash"):
        with_values(to_plain(config), [])


def test_the_source_of_a_reward_is_guarded_and_not_run(tmp_path):
    reward = tmp_path / "reward_of_mine.py"
    reward.write_text("raise RuntimeError('only the driver runs it')\n")
    for name in (str(reward), f"{reward}:f"):
        config = load([*GIVEN, f"reward.items=[{{name: '{name}'}}]"])
        assert config.plugin_hashes == hashes(str(reward))


def test_sources_of_providers_that_run_code_are_guarded(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for module, key in (
        ("provider_of_rewards", "reward.items=[{name: code, params: {provider: '%s:Mine'}}]"),
        ("provider_of_tools", "rollout.tools=[python] rollout.python_provider=%s:Mine"),
    ):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('the driver alone runs it')\n")
        given = key % module
        config = load([*GIVEN, *([given] if given.startswith("reward") else given.split())])
        assert list(config.plugin_hashes) == [f"{module}.py"]
        (tmp_path / f"{module}.py").write_text("")
        with pytest.raises(ConfigError, match=rf"{module}\.py has changed"):
            with_values(to_plain(config), [])


def test_source_of_an_environments_agent_is_guarded(file, monkeypatch):
    # It registers while it is imported.
    monkeypatch.delitem(sys.modules, "rlmath.environments.adapters.openrlhf", raising=False)
    adapter = "rollout.environment=rlmath.environments.adapters.openrlhf:OpenRLHFAgent"
    agent = file.with_name("agent_of_mine.py")
    agent.write_text("raise RuntimeError('only the driver runs it')\n")
    given = [*GIVEN, adapter, f"rollout.environment_options.agent={agent}:AgentInstance"]
    config = load(given)
    assert config.plugin_hashes == hashes(str(agent))
    agent.write_text("")
    with pytest.raises(ConfigError, match=r"agent_of_mine\.py has changed"):
        with_values(to_plain(config), [])


def test_an_engine_that_would_miss_rlmaths_plugin_does_not_start(monkeypatch):
    require_plugin()
    nothing = importlib.metadata.EntryPoints()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: nothing)
    with pytest.raises(RuntimeError, match="without being installed"):
        require_plugin()
