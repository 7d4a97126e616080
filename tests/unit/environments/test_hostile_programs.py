"""No program leaves the Python tool's sandboxes, blocks them, or changes what they report."""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlmath.environments.python_tool import PythonTool
from rlmath.errors import InfrastructureError
from rlmath.rewards.sandbox import Limits
from rlmath.rewards.sandbox.local import LocalProvider
from rlmath.rewards.sandbox.memory import process_tree
from tests.support.hostile import ATTEMPTS, ESCAPED, programs

pytestmark = pytest.mark.process

LIMITS = Limits(cpu_s=1, wall_s=0.6, memory_mib=128, file_size_mib=8, output_kib=512, processes=12)


@pytest.fixture(autouse=True, scope="module")
def _no_packages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlmath.rewards.sandbox.warm.PRELOAD", ())
        yield


def make():
    provider = LocalProvider()
    if provider.level != "namespace":
        pytest.skip("warm sandboxes need namespaces")
    return PythonTool(provider, LIMITS, ahead=3, most=6, output_bytes=2048)


@pytest.fixture(scope="module")
def tool():
    made = make()
    yield made
    made.close()
    assert not [pid for pid in process_tree(os.getpid()) if "cells.py" in _command(pid)]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def victims():
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(["sleep", "3600"]) as process,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        file = Path(folder) / "secret"
        file.write_text("secret")
        Path(folder).chmod(0o755)
        yield {"PID": process.pid, "SECRET": str(file), "PORT": server.getsockname()[1]}
        assert process.poll() is None
        process.kill()
        assert file.read_text() == "secret"


def calls_per_second(tool, count):
    tool.run("1")
    begun = time.monotonic()
    for _ in range(count):
        assert tool.run("1").text == "1\n"
    return count / (time.monotonic() - begun)


def rate_beside_a_new_pool(tool, count):
    """Rate relative to a new pool's, measured in turns: others may use this machine."""
    with contextlib.closing(make()) as new:
        pairs = [(calls_per_second(tool, count), calls_per_second(new, count)) for _ in range(5)]
    return statistics.median(own / other for own, other in pairs)


def attack(tool, count, seed, victims, in_parallel):
    def one(numbered):
        number, (label, source) = numbered
        begun = time.monotonic()
        for left in (2, 1, 0):  # Episodes are tried again.
            try:
                result = tool.run(source)
                break
            except InfrastructureError as error:
                if not left:
                    return f"{label}: a program must not look like a broken machine: {error}"
        if ESCAPED in result.text:
            return f"{label}: {result.text}"
        if time.monotonic() - begun > 30:
            return f"{label}: took {time.monotonic() - begun:.0f} s"
        control = tool.run("6 * 7") if number % 5 == 0 else None
        if control is not None and (control.status, control.text) != ("ok", "42\n"):
            return f"{label}: afterwards {control}"
        return None

    with ThreadPoolExecutor(in_parallel) as threads:
        return [
            found
            for found in threads.map(one, enumerate(programs(seed, count, **victims)))
            if found
        ]


def settled_processes(tool):
    """Processes of the pool once sandboxes that are replaced are gone."""
    until = time.monotonic() + 20
    while True:
        found = [pid for pid in process_tree(os.getpid()) if "cells.py" in _command(pid)]
        # The server, and for each sandbox its parent, itself and a cell that waits.
        most = 1 + 3 * tool.pool._most
        if len(found) <= most or time.monotonic() > until:
            return len(found), most
        time.sleep(0.1)


def test_no_attempt_succeeds(tool, victims):
    assert attack(tool, len(ATTEMPTS) + 10, 1, victims, in_parallel=3) == []
    found, most = settled_processes(tool)
    assert found <= most
    assert rate_beside_a_new_pool(tool, 20) > 0.5


OTHER_USER, SYSTEM_PYTHON = 54321, "/usr/bin/python3"


def _as_other_user(victims):
    """Failures of attempts whose sandbox has the user id of the trainer, which is not root."""
    os.setgroups([])
    os.setresgid(OTHER_USER, OTHER_USER, OTHER_USER)
    os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)
    sys.executable = SYSTEM_PYTHON  # this one may be in a folder of root's
    provider = LocalProvider(level="namespace", python=SYSTEM_PYTHON)
    tool = PythonTool(provider, LIMITS, ahead=2, most=4)
    if tool.pool is None:
        return ["no warm sandboxes"]
    try:
        return attack(tool, len(ATTEMPTS), 4, victims, in_parallel=2)
    finally:
        tool.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="is not root")
def test_no_attempt_succeeds_without_root(victims):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = _as_other_user(victims)
        except BaseException as error:
            found = [f"{type(error).__name__}: {error}"]
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = json.load(pipe)
    os.waitpid(child, 0)
    if any("no sandbox level works" in one for one in found):
        pytest.skip("this machine lets no user make namespaces")
    assert found == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 7))
def test_no_attempt_succeeds_in_thousands(tool, victims, seed):
    assert attack(tool, 4000, seed, victims, in_parallel=4) == []
    found, most = settled_processes(tool)
    assert found <= most
    assert rate_beside_a_new_pool(tool, 200) > 0.8


def test_attempts_reach_their_target_outside(victims):
    """The control: without it nothing could mean a mistake in the attempts."""
    for name in ("memory of others", "a file of the trainer", "sockets", "links"):
        chosen = dict(programs(3, len(ATTEMPTS), **victims))[f"{name} alone"]
        for one, instead in (
            ("IN_SANDBOX = True", "IN_SANDBOX = False"),
            ("pid in (1, ", "pid in (0, "),
            ("'/work', '/tmp', '/dev/shm'", "'.',"),
        ):
            chosen = chosen.replace(one, instead)
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", chosen], cwd=folder, capture_output=True, text=True
            )
        assert ESCAPED in done.stdout, (name, done)


def test_a_session_cannot_be_forged_or_left_running(tool):
    kept = PythonTool(LocalProvider(), LIMITS, session=True, ahead=1)
    try:
        session, other = kept.begin(), kept.begin()
        # It says that it is done, and runs on.
        lie = "import os, threading, time\nx = 0\nos.write(4, b'\\x00')\nwhile True: x += 1"
        first = session.call({"code": lie})
        assert first.status == "ok"
        time.sleep(0.3)
        again = session.call({"code": "x"})
        assert again.status == "timeout", "the lie is still running: the second call has to wait"
        session.call({"code": "y = 1"})
        assert session.call({"code": "y"}).text == "1\n", "a new sandbox"
        assert other.call({"code": "'x' in globals()"}).text == "False\n"
        # A thread that counts is stopped between calls.
        count = "import threading\nn = 0\ndef f():\n    global n\n    while True: n += 1\n"
        session.call({"code": count + "threading.Thread(target=f, daemon=True).start()"})
        session.call({"code": "before = n"})
        time.sleep(0.3)
        spent = "import resource\nresource.getrusage(resource.RUSAGE_SELF).ru_utime"
        assert float(session.call({"code": spent}).text) < 0.25
        session.close()
        other.close()
    finally:
        kept.close()


def test_concurrent_calls_do_not_mix(tool):
    def one(i):
        result = tool.run(f"import time\ntime.sleep(0.01)\nprint({i})")
        return result.text == f"{i}\n"

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(60)))


def test_close_ends_running_calls():
    tool = PythonTool(LocalProvider(), Limits(cpu_s=60, wall_s=60.0), ahead=1)
    failed = []

    def call():
        try:
            tool.run("import time\ntime.sleep(60)")
        except InfrastructureError as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(1.0)
    begun = time.monotonic()
    tool.close()
    thread.join(20)
    assert failed and time.monotonic() - begun < 20
