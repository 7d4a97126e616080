"""Links lead to pages and headings that exist, and so do tests that a page names and files that
code names."""

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
    """Anchors of its headings, as GitHub makes them."""
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


NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)|…(?:/\w+\.py)?)(?:::(\w+))?(?:\[[^`]*\])?`")
# Folders of the project, in code and its comments.
FOLDERS = ("rlmath", "tests", "benchmarks", "toolkits", "conf", "launchers")
FILE = re.compile(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})(?:/\w+)+\.(?:py|sh)\b")
DEFINED = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("tests/**/*.py")
}


@pytest.mark.parametrize("page", PAGES, ids=str)
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
