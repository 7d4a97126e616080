import pytest

from rlmath.checks.pairs import unused_problems
from rlmath.checks.tools import tool_problems
from rlmath.config.load import load
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.data.prompts import PromptRenderer
from rlmath.environments.chosen import Chosen, prompt_tokenizer
from rlmath.model.tiny_tokenizer import build_tokenizer
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

GAME = '''
class Game:
    def reset(self): ...

    def move(self, step: int) -> str:
        """Moves.

        Args:
            step: How far.
        """

class Scored(Game):
    def get_reward(self):
        return 1.0
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(SEARCH + GAME)
    return path


def config_of(*tools, more=()):
    names = ",".join(str(one) for one in tools)
    words = ["model.path=tiny", "data.train_paths=[x]", "runner.run_dir=r"]
    return load([*words, f"rollout.tools=[{names}]", *more])


def test_functions_of_a_file_are_tools(file):
    config = config_of("python", f"{file}:search")
    assert list(tool_problems(config)) == []
    chosen = Chosen(config.rollout)
    assert chosen._functions[f"{file}:search"].call({"query": "abc"}).text == "cba"
    names = [one["function"]["name"] for one in chosen.schemas]
    assert names == ["python", "search"]
    # A resume with another source is refused.
    assert list(config.plugin_hashes) == [str(file)]


def test_the_source_of_a_provider_of_python_calls_is_hashed(tmp_path, monkeypatch):
    (tmp_path / "my_provider.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of("python", more=["rollout.python_provider=my_provider:Mine"])
    assert list(config.plugin_hashes) == ["my_provider.py"]


@pytest.mark.parametrize(
    ("tools", "part"),
    [
        (["calculator"], "there are python and your own functions"),
        (["FILE:find"], "it has: search"),
        (["FILE:THREE"], "not registered"),
        (["FILE:untyped"], "needs a type for each parameter"),
        (["python", "FILE:python"], "two tools are called python"),
        (["python", "python"], "two tools are called python"),
    ],
)
def test_invalid_tools_are_refused_before_the_run(file, tools, part):
    config = config_of(*(one.replace("FILE", str(file)) for one in tools))
    (problem,) = tool_problems(config)
    assert problem.startswith("rollout.tools") and part in problem


def test_a_module_that_is_not_there_is_refused_when_the_settings_are_read():
    from rlmath.errors import ConfigError

    with pytest.raises(ConfigError, match=r"rollout\.tools=no_such_module:x"):
        config_of("no_such_module:x")


SCORES = "reward.items=[{name: environment}]"


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["rollout.environment=FILE:Game"], None),
        (["rollout.environment=FILE:Game", "rollout.max_turns=3", "eval.tools=false"], None),
        (["rollout.environment=FILE:Scored", SCORES], None),
        (["rollout.environment=FILE:Scored"], "reward that nothing reads"),
        (["rollout.environment=FILE:Game", SCORES], "has no get_reward"),
        ([SCORES], "which is null"),
        (["rollout.environment=FILE:search"], "missing 1 required"),
        (["rollout.environment=FILE:Game", "rollout.tool_format=chat",
          "data.apply_chat_template=false"], "data.apply_chat_template=false"),
    ]
)  # fmt: skip
def test_environments_and_their_rewards_are_checked(file, more, part):
    config = config_of(more=[one.replace("FILE", str(file)) for one in more])
    problems = list(tool_problems(config))
    assert [part in one for one in problems] == ([] if part is None else [True])
    assert list(unused_problems(config)) == []


def test_prompts_of_a_chat_list_the_tools(file):
    tokenizer = build_tokenizer(1000)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + tokenizer.chat_template
    )
    given = [
        "rollout.tool_format=chat",
        "rollout.tool_parser=hermes",
        "data.apply_chat_template=true",
    ]
    config = config_of(f"{file}:search", more=[*given, f"rollout.environment={file}:Game"])
    made = PromptRenderer(config.data, prompt_tokenizer(config, tokenizer))
    assert made.render("1+1?", {}) == "search move <|user|>1+1?<|assistant|>"
    # Not without them, nor in fenced blocks.
    plain = config_of(more=given[2:])
    assert prompt_tokenizer(plain, tokenizer) is tokenizer
    fenced = config_of("python", more=given[2:])
    made = PromptRenderer(fenced.data, prompt_tokenizer(fenced, tokenizer))
    assert made.render("1+1?", {}) == "<|user|>1+1?<|assistant|>"


@pytest.mark.parametrize("options", ["={enable_thinking: false}", ".enable_thinking=false"])
def test_template_options_reach_the_prompt(options):
    tokenizer = build_tokenizer(1000)
    tokenizer.chat_template += "{% if enable_thinking is false %}no{% endif %}"
    given = ["data.apply_chat_template=true", f"data.template_options{options}"]
    config = config_of(more=given)
    assert PromptRenderer(config.data, tokenizer).render("1", {}).endswith("<|assistant|>no")
    light = LightTokenizer("tiny")
    light.chat_template = tokenizer.chat_template
    assert PromptRenderer(config.data, light).render("1", {}).endswith("<|assistant|>no")
