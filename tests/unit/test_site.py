"""The site of ``docs/`` is built without a warning, from every page, and can be searched."""

import json
import subprocess

import pytest

from tests.unit.documented import ROOT

pytestmark = pytest.mark.process
PACKAGES = ROOT / ".venv" / "docs" / "docs.lock"
LOCK = ROOT / "requirements" / "docs.lock"


@pytest.mark.skipif(
    not PACKAGES.is_file() or PACKAGES.read_text() != LOCK.read_text(),
    reason="launchers/test.sh, or launchers/docs.sh --packages, installs mkdocs",
)
def test_site_has_every_page_and_finds_settings(tmp_path):
    built = subprocess.run(
        ["bash", "launchers/docs.sh", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    missing = [
        page
        for page in pages
        if page.name != "index.md"
        and not (tmp_path / page.with_suffix("") / "index.html").is_file()
    ]
    assert missing == []
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {one["location"] for one in index["docs"] if "rollout.max_lag" in one["text"]}
    assert {"schedules/", "settings/#rollout"} <= found
    # Links to files that are no pages are text alone.
    assert "rlmath/model/parallel.py" not in (tmp_path / "architecture" / "index.html").read_text()
