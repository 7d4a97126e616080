"""README.md of the plugin lists each change to vLLM: what, why, its gain, upstream, its end."""

import re
from pathlib import Path

import rlmath

ROOT = Path(rlmath.__file__).parent
PLUGIN = ROOT / "vllm_plugin"
PAGE = (PLUGIN / "README.md").read_text(encoding="utf-8")
SECTIONS = {one.splitlines()[0]: one for one in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
ASKED = ("Changes", "Why", "Gain", "Upstream", "Remove when")


def test_every_module_has_a_row_and_a_section():
    modules = {path.name for path in PLUGIN.glob("*.py")} - {"__init__.py"}
    assert modules
    assert {name for name in modules if f"| [`{name}`]({name}) |" in PAGE} == modules
    assert {name for name in modules if f"`{name}`" in SECTIONS} == modules


def test_every_change_is_described_in_full():
    changes = {title: text for title, text in SECTIONS.items() if not title.startswith("Private")}
    lacking = [
        (title, word)
        for title, text in changes.items()
        for word in ASKED
        if f"- **{word}**:" not in text
    ]
    assert len(changes) >= 7 and not lacking


def test_whatever_register_installs_is_listed():
    """Also what lies in other folders."""
    imported = re.findall(
        r"(?:from|import) (rlmath\.[\w.]+)|\"(rlmath\.weights[\w.]+_engine)\"",
        (PLUGIN / "register.py").read_text(encoding="utf-8"),
    )
    files = {"".join(one).removeprefix("rlmath.").replace(".", "/") + ".py" for one in imported}
    files = {file for file in files if (ROOT / file).is_file()}
    assert {"device/gloo.py", "weights/transports/shared_memory_engine.py"} <= files
    links = {
        (PLUGIN / link).resolve().relative_to(ROOT).as_posix()
        for link in re.findall(r"^\| \[`[^`]+`\]\(([^)]+)\)", PAGE, flags=re.MULTILINE)
    }
    assert files <= links


def test_links_exist_and_the_version_is_the_locked_one():
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", PAGE) if not link.startswith("http")]
    assert [link for link in links if not (PLUGIN / link).exists()] == []
    (written_for,) = re.findall(r"\*\*vLLM (\S+)\*\*", PAGE)
    locks = (ROOT.parent / "requirements").glob("c*.lock")
    locked = [re.findall(r"^vllm(?:-cpu)?={2,3}(\S+)", lock.read_text(), re.M) for lock in locks]
    assert locked == [[written_for], [written_for]]
