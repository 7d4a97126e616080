"""The plain command's tiers: both of two at once are shown, exit codes, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests import tiers
from tests.conftest import TIER_OF_FOLDER

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.tiers import run
phases = [["first.py"], ["second.py"], ["third.py"]], [["fourth.py"]]
raise SystemExit(run(phases, ["-p", "no:cacheprovider", *sys.argv[1:]]))
"""
PASSES = "def test_passes(): pass\n"


@pytest.fixture
def start(tmp_path):
    def start_tier(*arguments, **files):
        for name in ("first", "second", "third", "fourth"):
            (tmp_path / f"{name}.py").write_text(files.get(name, PASSES))
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            cwd=tmp_path,
            # Each run is a separate pytest; plugins that are not needed cost it seconds.
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start_tier


def test_a_failure_in_any_of_them_is_shown_and_the_rest_runs(start):
    run = start(second="def test_fails():\n    assert 1 == 2, 'why it fails'\n")
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    shown, summary = output.split("all tiers")
    assert "why it fails" in shown and shown.count("1 passed") == 3
    assert "FAILED second.py::test_fails" in summary
    assert summary.count("1 passed") == 3 and summary.count("1 failed") == 1


def test_some_without_tests_are_none_the_worse_and_all_without_are(start):
    run = start("-k", "test_other", first="def test_other(): pass\n")
    run.communicate(timeout=120)
    assert run.returncode == 0
    run = start("-k", "test_none")
    run.communicate(timeout=120)
    assert run.returncode == 5


@pytest.mark.parametrize("to", ["group", "process"])
def test_ctrl_c_lets_fixtures_end(start, tmp_path, to):
    waits = """
import pathlib, time, pytest

@pytest.fixture
def resource():
    yield
    time.sleep(0.2)
    pathlib.Path(__file__ + ".closed").touch()

def test_waits(resource):
    pathlib.Path(__file__ + ".began").touch()
    time.sleep(300)
"""
    run = start(first=waits, second=waits)
    names = ("first", "second")
    while not all((tmp_path / f"{name}.py.began").exists() for name in names):
        assert run.poll() is None
        time.sleep(0.05)
    (os.killpg if to == "group" else os.kill)(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 130
    assert all((tmp_path / f"{name}.py.closed").exists() for name in names)
    # Neither the rest of the phase nor the next one began.
    assert "passed" not in output and output.count("no tests ran") >= 2


def test_every_run_of_the_plain_command_has_tests_and_none_runs_twice():
    """A file of ``APART`` that is renamed would end its run; one not ignored would run twice."""
    _, _, rest, apart = tiers.PHASES[1]
    assert [path.removeprefix("--ignore=") for path in rest[2:]] == list(apart[2:])
    assert all((ROOT / path).is_file() for path in tiers.APART)


@pytest.mark.parametrize("phases", [tiers.PHASES, tiers.LONG], ids=["plain", "long"])
def test_every_tier_is_in_a_run(phases):
    chosen = {word for phase in phases for own in phase for word in re.findall(r"\w+", own[1])}
    assert {*TIER_OF_FOLDER.values()} - chosen == {"cuda_wheels", "bridge"}


def test_any_files_can_be_run_together():
    """Pytest imports a file by its name alone: two of one name cannot be collected at once, and
    what a test takes from ``conftest`` comes from whichever was imported first."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    times = Counter(path.name for path in files)
    assert [name for name, count in times.items() if count > 1] == []
    assert [
        path for path in files if re.search(r"^(from|import) conftest\b", path.read_text(), re.M)
    ] == []
