import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.program_answers import output_of

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def install():
    spec = importlib.util.spec_from_file_location("install", ROOT / "launchers" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LISTED = """\
:env:.find-links='/wheels'
global.find-links='/old'
global.index-url='https://mirror/simple'
global.extra-index-url='file:///a https://b/simple'
install.cert='/ca.pem'
debug.find-links='/no'
"""


def test_settings_of_pip_are_options_of_uv(install):
    settings = install.pip_settings(LISTED)
    assert settings["cert"] == "/ca.pem"
    options = install.uv_options(settings, ["torch"])
    assert options[2:] == [
        *("--default-index", "https://mirror/simple"),
        *("--index", "file:///a"),
        *("--index", "https://b/simple"),
        *("--find-links", "/wheels"),
    ]
    # An index that is given replaces the others.
    given = install.uv_options(settings, ["torch", "--index-url", "https://c"])
    assert given[2:] == ["--find-links", "/wheels"]


@pytest.mark.parametrize("fails", ["fetching uv", "uv", "nothing", "both"])
def test_pip_installs_where_uv_cannot(install, fails, tmp_path, monkeypatch):
    calls = []

    def run(command, **_):
        calls.append(command)
        is_pip = command[1:4] == ["-m", "pip", "install"]
        failed = {
            "fetching uv": is_pip and install.UV in command,
            "uv": command[0].endswith("/uv"),
            "nothing": False,
            "both": is_pip or command[0].endswith("/uv"),
        }[fails]
        return SimpleNamespace(returncode=int(failed), stdout="")

    compiled = []
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install.compileall, "compile_dir", lambda *a, **_: compiled.append(a))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert install.main(["-r", "a.lock"]) == (1 if fails == "both" else 0)
    last = calls[-1]
    assert last[-2:] == ["-r", "a.lock"] and "--no-deps" in last
    assert last[0].endswith("/uv") == (fails == "nothing")
    assert bool(compiled) == (fails != "both")


def test_imported_modules_are_compiled(install):
    code = (
        "import sys, ray, torch, transformers\n"
        "print(*(getattr(m, '__file__', None) or '' for m in [*sys.modules.values()]), sep='\\n')"
    )
    installed = [file for file in output_of(code).splitlines() if "site-packages" in file]
    left_out = [file for file in installed if install.SELDOM_IMPORTED.search(file)]
    assert len(installed) > 800
    assert len(left_out) < len(installed) / 20, left_out
    assert install.SELDOM_IMPORTED.search("/x/site-packages/pandas/core/frame.py")
