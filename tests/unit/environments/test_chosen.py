"""The tools that the settings name."""

import pytest

from rlmath.checks.tools import tool_problems
from rlmath.config.load import load
from rlmath.environments.chosen import functions_of, schemas_of
from tests.unit.plugins.test_plugin_loading import own_plugins  # noqa: F401

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("own_plugins")]

SEARCH = '''
def search(query: str) -> str:
    """Searches.

    Args:
        query: Words.
    """
    return query[::-1]

def python(code: str) -> str:
    """Not the sandbox.

    Args:
        code: Code.
    """

def untyped(query): ...

THREE = 3
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(SEARCH)
    return path


def config_of(*tools):
    names = ",".join(str(one) for one in tools)
    return load(
        ["model.path=m", "data.train_paths=[x]", "runner.run_dir=r", f"rollout.tools=[{names}]"]
    )


def test_functions_of_a_file_are_tools(file):
    config = config_of("python", f"{file}:search")
    assert list(tool_problems(config)) == []
    (tool,) = functions_of(config.rollout).values()
    assert tool.call({"query": "abc"}).text == "cba"
    names = [one["function"]["name"] for one in schemas_of(config.rollout)]
    assert names == ["python", "search"]
    # A resume with another source is refused.
    assert list(config.plugin_hashes) == [str(file)]


@pytest.mark.parametrize(
    ("tools", "part"),
    [
        (["calculator"], "there are python and your own functions"),
        (["FILE:find"], "it has: search"),
        (["FILE:THREE"], "not registered"),
        (["FILE:untyped"], "needs a type for each parameter"),
        (["python", "FILE:python"], "2 tools are called python"),
        (["python", "python"], "2 tools are called python"),
    ],
)
def test_what_is_no_tool_is_refused_before_the_run(file, tools, part):
    config = config_of(*(one.replace("FILE", str(file)) for one in tools))
    (problem,) = tool_problems(config)
    assert problem.startswith("rollout.tools") and part in problem


def test_a_module_that_is_not_there_is_refused_when_the_settings_are_read():
    from rlmath.errors import ConfigError

    with pytest.raises(ConfigError, match=r"rollout\.tools=no_such_module:x"):
        config_of("no_such_module:x")
