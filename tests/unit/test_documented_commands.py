"""Commands in the docs name what exists: commands, experiments, settings, scripts, options."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.cli import _COMMANDS
from rlmath.config.load import load, options
from rlmath.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(starts: tuple[str, ...]) -> list[tuple[str, str]]:
    """Indented commands of the pages that begin so, joined over backslashes, without comments."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
        for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE):
            if line.startswith(starts):
                found.append((page.name, line.split(" #")[0].rstrip()))
    return found


RLMATH = commands(("rlmath ",))
SCRIPTS = commands(("bash launchers/", "python toolkits/", "bash ray_utils/", "RANK="))


def name(case: tuple[str, str]) -> str:
    return f"{case[0]}: {case[1][:60]}"


def test_there_are_some() -> None:
    assert len(RLMATH) >= 3
    assert len(SCRIPTS) >= 6


@pytest.mark.parametrize("case", RLMATH, ids=name)
def test_rlmath_commands_have_settings_that_exist(case: tuple[str, str]) -> None:
    words = [word for word in shlex.split(case[1])[1:] if word != "..."]
    command, *rest = words
    assert command in _COMMANDS
    if command in ("train", "sft", "evaluate"):
        overrides = [word.replace("=...", "=x") for word in rest if not word.startswith("--")]
        needed = ["model.path=x", "runner.run_dir=y"]
        try:
            load([*needed, *overrides])
        except ConfigError as error:  # The message shows the command.
            raise AssertionError(f"{case[1]}\n{error}") from error


@pytest.mark.parametrize("case", SCRIPTS, ids=name)
def test_scripts_exist_and_know_their_options(case: tuple[str, str]) -> None:
    words = [w for w in shlex.split(case[1]) if not re.fullmatch(r"[A-Z_]+=\S*", w)]
    program, script, *rest = words
    assert (ROOT / script).is_file(), script
    run = subprocess.run(
        [sys.executable if program == "python" else program, script, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    of_subcommands = script.endswith("convert_checkpoint.py")
    for option in (word for word in rest if word.startswith("--")):
        assert of_subcommands or option.split("=")[0] in run.stdout, option
    if "launch_cluster" in script:
        assert rest[1] in options("experiment")
