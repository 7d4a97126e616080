"""The Python tool: what the model reads, limits, sessions, and sandboxes that are lost."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rlmath.checks.pairs import unused_problems
from rlmath.checks.tools import tool_problems
from rlmath.config.load import load
from rlmath.engines.requests import Request
from rlmath.environments.base import ToolCall
from rlmath.environments.chosen import python_tool
from rlmath.environments.python_tool import PythonTool
from rlmath.environments.text import cut_bytes
from rlmath.environments.tools import ToolEnvironment
from rlmath.errors import ConfigError, InfrastructureError
from rlmath.rewards.sandbox import CodeProvider, Limits, PreparedProgram, ProviderError
from rlmath.rewards.sandbox.local import LocalProvider
from rlmath.rollout.episodes import awaiting
from rlmath.types import Problem
from tests.support.case_files import read_cases
from tests.support.environments import Letters, make_episodes
from tests.support.http_server import serve
from tests.support.samples import make_sample
from tests.unit.rewards.test_code_rewards import piston

pytestmark = pytest.mark.process

LIMITS = Limits(cpu_s=2, wall_s=1.0, memory_mib=256, output_kib=16384, processes=16)
LEVEL = LocalProvider().level
warm_only = pytest.mark.skipif(LEVEL != "namespace", reason="warm sandboxes need namespaces")


@pytest.fixture(autouse=True, scope="module")
def _no_packages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlmath.rewards.sandbox.warm.PRELOAD", ())
        yield


def make(provider=None, **settings):
    given = {"limits": LIMITS, "ahead": 1, "most": 4, **settings}
    return PythonTool(provider or LocalProvider(), given.pop("limits"), **given)


class Cold(CodeProvider):
    """A provider like a remote one: a new sandbox for each call, no warm ones."""

    def __init__(self):
        self._local = LocalProvider()

    def prepare(self, program, limits):
        return self._local.prepare(program, limits)


@pytest.fixture(scope="module", params=["warm", "cold"])
def tool(request):
    if request.param == "warm" and LEVEL != "namespace":
        pytest.skip("warm sandboxes need namespaces")
    made = make(None if request.param == "warm" else Cold())
    assert (made.pool is not None) == (request.param == "warm")
    yield made
    made.close()


def test_python_tool_results(tool):
    for code, status, text in read_cases(__file__, "python_tool_results"):
        found = tool.run(code)
        assert status is None or (found.status, found.text) == (status, text), code
        assert found.name == "python"


def test_the_same_code_gives_the_same_output(tool):
    code = "import random\n[random.random(), list({'a', 'b', 'c'}), hash('x')]"
    assert tool.run(code).text == tool.run(code).text


def test_python_tool_limits(tool):
    loop = tool.run("print('begun', flush=True)\nwhile True: pass")
    assert loop.status == "timeout" and loop.text.startswith("begun\nStopped: ")
    memory = tool.run("x = bytearray(10**10)")
    assert memory.status == "memory" and "MemoryError" in memory.text and "256 MiB" in memory.text
    long = tool.run("print('a' + 'é' * 5_000_000 + 'b')")
    assert long.status == "ok" and len(long.text.encode()) < 8192 + 100
    assert long.text.startswith("aéé") and long.text.endswith("éb\n")
    assert "bytes left out" in long.text and "\ufffd" not in long.text
    flood = tool.run("while True: print('x' * 10000)")
    assert flood.status == "error" and "printed more than 16384 KiB" in flood.text


def test_each_call_starts_clean(tool):
    assert (
        tool.run("x = 1\nopen('kept', 'w').close()\nopen('/tmp/kept', 'w').close()").status == "ok"
    )
    for _ in range(5):
        found = tool.run("import os\n'x' in globals(), 'kept' in os.listdir('.')")
        assert found.text == "(False, False)\n"


def test_arguments_are_checked(tool):
    session = tool.begin()
    for arguments in ({}, {"code": 1}, {"code": "1", "language": "python"}):
        assert session.call(arguments).status == "error"
    assert session.call({"code": "#" * 300_000}).status == "refused"


def test_packages_of_the_environment_are_importable(monkeypatch):
    pytest.importorskip("sympy")
    if LEVEL != "namespace":
        pytest.skip("warm sandboxes need namespaces")
    # A child imports the package as well, on a busy machine.
    monkeypatch.setattr("rlmath.rewards.sandbox.warm.PRELOAD", ("numpy.random", "sympy"))
    tool = make(limits=replace(LIMITS, cpu_s=20, wall_s=20.0))
    try:
        code = "import sympy, numpy as np\nnp.random.rand() + 0, sympy.factorint(84)"
        found = tool.run(code)
        assert found.status == "ok" and "{2: 2, 3: 1, 7: 1}" in found.text
        assert tool.run(code).text == found.text, "numpy's generator is seeded"
        child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import sympy'])"
        assert "returncode=0" in tool.run(child).text
    finally:
        tool.close()


def test_settings_of_the_python_tool_without_it_are_refused():
    config = load(["experiment=quickstart_tools", "rollout.python_session=true"])
    assert not [*tool_problems(config), *unused_problems(config)]
    for changes in ({"tools": ["my_tools.py:search"]}, {"tools": [], "environment": "x.py:Y"}):
        changes |= {"python_provider": "e2b", "python_provider_settings": {"max_parallel": 3}}
        other = replace(config, rollout=replace(config.rollout, **changes))
        problems = list(unused_problems(other))
        assert len(problems) == 3 and all("use rollout.tools=[python]" in one for one in problems)


@warm_only
def test_a_session_keeps_names():
    tool = make(session=True)
    try:
        first, second = tool.begin(), tool.begin()
        assert first.call({"code": "x = 1"}).text == ""
        assert second.call({"code": "x"}).status == "error"
        assert first.call({"code": "1 / 0"}).status == "error"
        assert first.call({"code": "x += 1; raise SystemExit"}).status == "ok"
        assert first.call({"code": "open('f', 'w').write('abc'); x"}).text == "2\n"
        assert "cell 5" in first.call({"code": "y"}).text
        assert first.call({"code": "open('f').read()"}).text == "'abc'\n"
        lost = first.call({"code": "while True: pass"})
        assert lost.status == "timeout" and "is lost" in lost.text
        assert first.call({"code": "x"}).status == "error"
        assert first.call({"code": "x = 7"}).status == "ok"
        first.close()
        with pytest.raises(InfrastructureError, match="was closed"):
            first.call({"code": "x"})
        assert first not in tool._owners._between_calls and first.sandbox is None
        second.close()
    finally:
        tool.close()


@warm_only
def test_a_session_whose_sandbox_is_lost_repeats_its_calls_in_another():
    tool = make(session=True)
    try:
        session = tool.begin()
        assert tool.has_state and session.call({"code": "x = 1"}).status == "ok"
        own = tool._owners._between_calls[session]
        for sandbox in list(tool.pool._all):
            kill(tool, sandbox)
        # A killed process may answer until the kernel has ended it.
        end_s = time.monotonic() + 10
        while own.is_clean() and time.monotonic() < end_s:
            time.sleep(0.01)
        with pytest.raises(InfrastructureError):
            session.call({"code": "x += 1"})
        assert session.call({"code": "x += 1; x"}).text == "2\n"
        session.close()
        assert tool.begin().call({"code": "6 * 7"}).text == "42\n"
    finally:
        tool.close()


class Code(Letters):
    """Each turn is a program; what it printed is kept aside."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def calls(self, text):
        return [ToolCall("python", {"code": text})]

    def suffix(self, turn_text, results):
        self.seen.append(results[0].text)
        return super().suffix(turn_text, results)


@warm_only
def test_a_session_is_repeated_when_a_run_resumes_in_the_middle_of_a_response():
    def answer(sample, code):
        """The sample after a turn that was answered by another process than the ones before."""
        tokens = [*sample.token_ids, *code.encode()] if sample else list(code.encode())
        segments = sample.segments if sample else (("model", 0),)
        begun = make_sample("p", 0, tokens, segments=segments)
        request = Request("p", 0, (1,), 500, 1.0, 1.0, begun.seed, begun=awaiting(begun),
                          problem=Problem("p", "?", (1,), ("1",)))  # fmt: skip
        turn_format, tool = Code(), make(session=True)
        with contextlib.closing(
            make_episodes(ToolEnvironment(turn_format, [tool], 9), turn_format)
        ) as episodes:
            episodes.ask(request)
            ((_, found),) = episodes.outcomes(30)
            assert len(tool._owners._between_calls) == 1
            episodes.finish(replace(found, finish_reason="length"))
            assert not tool._owners._between_calls, "free at the sample's end"
        return found, turn_format.seen

    first, seen = answer(None, "x = 5")
    assert seen == [""] and len(first.calls) == 1
    second, seen = answer(first, "x += 1; print(x)")
    assert seen == ["6\n"]
    assert answer(second, "x * 7")[1] == ["42\n"]


@warm_only
def test_more_sessions_than_sandboxes_all_keep_their_names():
    tool = make(session=True, most=3, ahead=3)
    try:
        sessions = [tool.begin() for _ in range(12)]

        def use(number):
            session, found = sessions[number], []
            for _ in range(4):
                code = f"n = globals().get('n', {100 * number}) + 1; n"
                found.append(session.call({"code": code}).text)
            session.close()
            return found

        with ThreadPoolExecutor(5) as threads:  # more than sandboxes
            found = list(threads.map(use, range(len(sessions))))
        wanted = [[f"{100 * number + i}\n" for i in range(1, 5)] for number in range(12)]
        assert found == wanted
        # In turn: each call takes the sandbox of the session that was not used for longest.
        sessions = [tool.begin() for _ in range(5)]
        for i in range(3):
            for number, session in enumerate(sessions):
                text = session.call({"code": f"n = globals().get('n', {number}) + 1; n"}).text
                assert text == f"{number + i + 1}\n"
        assert len(tool._owners._between_calls) == 3 == tool.pool._count
        for session in sessions:
            session.close()
        assert not tool._owners._between_calls and not tool._owners._calls
        assert len(tool.pool._idle) == 3
    finally:
        tool.close()


@warm_only
def test_a_session_that_is_closed_in_mid_call_ends_it_and_leaves_its_sandbox_to_nobody():
    tool = make(limits=Limits(cpu_s=60, wall_s=60.0), session=True, most=1)
    failed = []

    def call():
        try:
            session.call({"code": "import time\nprint('mine')\ntime.sleep(60)"})
        except InfrastructureError as error:
            failed.append(error)

    try:
        session = tool.begin()
        session.call({"code": "1"})
        thread = threading.Thread(target=call)
        thread.start()
        while session.sandbox is None:
            time.sleep(0.01)
        time.sleep(0.3)
        session.close()
        begun = time.monotonic()
        assert tool.begin().call({"code": "6 * 7"}).text == "42\n"
        thread.join(20)
        assert failed and time.monotonic() - begun < 20
    finally:
        tool.close()


def kill(tool, sandbox):
    _, (pid, _), _ = tool.pool._all.get(sandbox, (None, (None, None), None))
    if pid is not None:  # else it was ended meanwhile
        os.kill(pid, signal.SIGKILL)


@warm_only
def test_sandboxes_killed_in_mid_call():
    tool = make(limits=Limits(cpu_s=5, wall_s=5.0))
    sleeper = "import time\ntime.sleep(4)\n'woke'"
    results = []
    try:
        tool.run("1")

        def call():
            try:
                results.append(tool.run(sleeper).text)
            except InfrastructureError as error:
                results.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.3)
        for sandbox in list(tool.pool._all):
            kill(tool, sandbox)
        thread.join(20)
        assert isinstance(results.pop(), InfrastructureError)
        time.sleep(0.5)  # SIGKILL takes a moment
        assert tool.run("6 * 7").text == "42\n"
        os.kill(tool.pool._server._process.pid, signal.SIGKILL)
        time.sleep(0.5)
        assert tool.run("6 * 7").text == "42\n", "the server is started again"
    finally:
        tool.close()


@warm_only
def test_a_machine_without_warm_sandboxes_starts_one_for_each_call(monkeypatch, caplog):
    monkeypatch.setattr("rlmath.rewards.sandbox.warm._SERVER", "/no/such/script.py")
    tool = make()
    assert tool.pool is None and tool.run("6 * 7").text == "42\n"
    assert "starts a sandbox" in caplog.text
    with pytest.raises(ConfigError, match="python_session=false"):
        make(session=True)


class Failing(CodeProvider):
    def __init__(self, failures):
        self.failures = failures

    def prepare(self, program, limits):
        if self.failures:
            self.failures -= 1
            raise ProviderError("down")
        return Fine()


class Fine(PreparedProgram):
    def run(self, stdin="", files=None):
        from rlmath.rewards.sandbox import Execution

        return Execution("ok", "fine\n", exit_code=0)


def test_a_failing_provider_is_no_result():
    tool = make(Failing(1))
    with pytest.raises(InfrastructureError, match="down"):
        tool.run("1")
    assert tool.run("1").text == "fine\n"
    with pytest.raises(ConfigError, match="python_session=false"):
        make(Failing(0), session=True)


def test_calls_run_with_the_provider_that_the_settings_name():
    with serve(piston(LocalProvider())) as server:
        url = server.url.removesuffix("/reward")
        config = load(
            [
                *("experiment=quickstart_tools", "rollout.python_provider=piston"),
                f"rollout.python_provider_settings.endpoints={url}",
            ]
        )
        assert list(tool_problems(config)) == []
        with contextlib.closing(python_tool(config.rollout, 2)) as tool:
            found = tool.run("print(2)\n6 * 7")
            assert (found.status, found.text) == ("ok", "2\n42\n")
            assert tool.run("1 / 0").status == "error"
    for given, part in (
        ("python_session=true", "keeps no names"),
        ("python_provider=e", "there are"),
    ):
        other = load(
            ["experiment=quickstart_tools", "rollout.python_provider=piston", f"rollout.{given}"]
        )
        assert any(part in one for one in tool_problems(other))


@pytest.mark.parametrize("length", [0, 1, 99, 100, 101, 102, 103, 104, 1000])
def test_cut_bytes_keeps_both_ends(length):
    for character in ("a", "é", "€", "😀"):
        output = (character * length).encode()
        text = cut_bytes(output, 100)
        if len(output) <= 100:
            assert text == character * length
        else:
            assert set(text.partition("\n[...")[0]) == {character}
            assert set(text.rpartition("...]\n")[2]) == {character}
            assert len(text.encode()) < 100 + 60
