"""Links lead to pages and headings that exist, and so do the tests that a page names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.documented import PAGES, ROOT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("http")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", ROOT / "rlmath" / "engines" / "patches" / "README.md"],
    ids=lambda page: page.name,
)
def test_anchors_are_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [(link, anchor) for link, anchor in links if not link.startswith("http")]
    missing = [
        f"{link}#{anchor}"
        for link, anchor in local
        if anchor not in anchors(page.parent / link if link else page)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8"))
    missing = []
    for path, function in named:
        file = ROOT / path
        if not file.is_file() or (function and f"def {function}(" not in file.read_text()):
            missing.append((path, function))
    assert missing == []


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[2:] if f"docs/{page.name}" not in readme] == []
