"""Links lead to pages and headings that exist, and so do the tests that a page names."""

import re

import pytest

from tests.unit.documented import PAGES, ROOT

RECORDS = sorted((ROOT / "docs" / "records").glob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=str)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("http")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def anchors(page):
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        *RECORDS,
        ROOT / "CHANGELOG.md",
        ROOT / "rlmath" / "engines" / "patches" / "README.md",
    ],
    ids=str,
)
def test_anchors_are_headings(page):
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [(link, anchor) for link, anchor in links if not link.startswith("http")]
    missing = [
        f"{link}#{anchor}"
        for link, anchor in local
        if anchor not in anchors(page.parent / link if link else page)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page):
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8"))
    missing = []
    for path, function in named:
        file = ROOT / path
        if not file.is_file() or (function and f"def {function}(" not in file.read_text()):
            missing.append((path, function))
    assert missing == []


def test_every_page_is_linked_from_the_first_and_every_record_from_a_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page for page in PAGES[2:] if page.name != "index.md"]
    assert [page.name for page in pages if f"]({page.name}" not in index] == []
    manual = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [one.name for one in RECORDS if f"](records/{one.name}" not in manual] == []


# Written from code, or compared with it tag by tag.
REFERENCE = ("settings.md", "api.md", "coming_from.md", "metrics.md")
# Rows that a run or a test stands behind.
RESULTS = ("gpu_results.md", "correctness.md")


def test_the_manual_is_short_and_has_no_dated_figures():
    """Figures with a date, a host or a session are records; so is ``gpu_results.md``."""
    manual = [page for page in PAGES[2:] if page.name not in (*REFERENCE, *RESULTS)]
    lines = {page.name: page.read_text(encoding="utf-8").splitlines() for page in manual}
    assert sum(map(len, lines.values())) <= 3000
    dated = [
        f"{name}: {line}"
        for name, page in [*lines.items(), ("README.md", PAGES[0].read_text("utf-8").splitlines())]
        for line in page
        # A link may lead to a heading with a date.
        if re.search(r"\b20\d\d-\d\d-\d\d\b", re.sub(r"\]\([^)]*\)", "", line))
    ]
    assert dated == []
