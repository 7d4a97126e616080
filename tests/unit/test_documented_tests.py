"""Tests that a page names beside what they show are there, and so are files that code names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)|…(?:/\w+\.py)?)(?:::(\w+))?(?:\[[^`]*\])?`")
# Of the project, in code and its comments.
FOLDERS = ("rlmath", "tests", "benchmarks", "toolkits", "conf", "launchers")
FILE = re.compile(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})(?:/\w+)+\.(?:py|sh)\b")
DEFINED = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("tests/**/*.py")
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page):
    for match in NAMED.finditer(page.read_text()):
        file, name = match.groups()
        assert file is None or file in DEFINED, f"{page.name} names {file}"
        where = [DEFINED[file]] if file else DEFINED.values()
        assert name is None or any(f"def {name}(" in text for text in where), match.group()


def test_files_that_code_names_exist():
    missing = [
        f"{path.relative_to(ROOT)} names {name}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".sh", ".rows")
        for name in FILE.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    ]
    assert missing == []
