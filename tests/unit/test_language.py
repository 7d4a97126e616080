"""Words that the glossary replaces, and British spellings, stay out of pages, settings and code.

Docstrings and the lines of their attributes begin with a noun phrase or a verb.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "conf")
CODE = ("rlmath", "toolkits", "launchers", "ray_utils", "benchmarks", "tests")
# The grader reads both spellings.
EXEMPT = (
    "rlmath/grading/wording.py",
    "tests/unit/test_language.py",
)
# What not to write, and what to write.
WORDS = {
    r"\bso many\b|\bevery so (\w+th|often)\b": "N",
    r"\banew\b|\bgone on with\b|\bgo(es)? on\b": "again, continues",
    r"\bwhole or not (there|at all)\b": "atomic",
    r"\bstands? in the way\b|\bmends?\b": "an error, fix",
    r"\brefit\b|\bengine log-probs\b": "weight sync, rollout log-probs",
    r"\bpassed over\b": "skipped",
    r"\bby (itself|themselves)\b": "automatically, alone, separately",
    r"\bof (its|their|our) own\b": "its own, separate",
    r"(nal|mal|ial|gan|cogn|til|chron)is(e|es|ed|ing|ation)\b|\bpenalis": "-ize",
    r"behaviour|colour|neighbour|favour|\bcentred|labelled|artefact": "American spelling",
    r"\blearnt\b|\bwhilst\b|\bamongst\b|\blicence\b|\bcatalogue\b": "American spelling",
}
PATTERNS = {re.compile(word): instead for word, instead in WORDS.items()}
# Openings without a noun or a verb of their own, as of "Of the ranks." and "What it takes.".
OPENING = re.compile(r"(?:Of|What|That|Those|Whose|Which|See there)\b")
ATTRIBUTE = re.compile(r"\s+\*{0,2}[a-z_]+(?:, [a-z_]+)*: (?P<text>.*)")
# Remaining ones by folder of rlmath. A number may only fall; a folder that is not here has none.
REMAINING: dict[str, int] = {
    "": 7,
    "actor": 33,
    "commands": 47,
    "engines": 1,
    "plugins": 14,
    "quickstart": 2,
    "training": 122,
}


def replaced_words(text: str) -> list[str]:
    """``LINE: word: what to write`` for each."""
    text = text.lower()
    return [
        f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}: {instead}"
        for pattern, instead in PATTERNS.items()
        for match in pattern.finditer(text)
    ]


def test_the_glossary_is_kept() -> None:
    listed = subprocess.run(
        ["git", "ls-files", *PAGES, *CODE], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.split():
        if name.endswith((".md", ".py", ".yaml", ".sh")) and name not in EXEMPT:
            text = (ROOT / name).read_text(encoding="utf-8")
            # A table of old names and new ones.
            text = re.sub(r"^\| `[^`]+`( \(.*?\))? \| `.*$", "", text, flags=re.M)
            found += [f"{name}:{word}" for word in replaced_words(text)]
    assert not found, "\n".join(found)


def openings(source: str) -> list[str]:
    """``LINE: text`` of docstrings and their attribute lines that begin with an :data:`OPENING`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None:
            continue
        first = node.body[0].lineno
        for number, line in enumerate(docstring.split("\n")):
            attribute = ATTRIBUTE.match(line)
            text = line if not number else attribute["text"] if attribute else ""
            if OPENING.match(text):
                found.append(f"{first + number}: {text}")
    return found


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "rlmath").rglob("*.py")):
        parts = path.relative_to(ROOT / "rlmath").parts
        folder = parts[0] if len(parts) > 1 else ""
        lines = openings(path.read_text(encoding="utf-8"))
        found.setdefault(folder, []).extend(f"{path.relative_to(ROOT)}:{line}" for line in lines)
    more = {
        folder: lines for folder, lines in found.items() if len(lines) > REMAINING.get(folder, 0)
    }
    assert not more, "\n".join(
        f"{folder}: {len(lines)}, and {REMAINING.get(folder, 0)} are allowed:\n" + "\n".join(lines)
        for folder, lines in more.items()
    )


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('def f():\n    """Of the ranks."""\n', "2: Of the ranks."),
        (
            'class A:\n    """A.\n\n    Attributes:\n        x: What it has.\n    """\n',
            "5: What it has.",
        ),
        ('"""See there."""\n', "1: See there."),
        ('async def f(a, b):\n    """F.\n\n        a, b: Those of f.\n    """\n', "4: Those of f."),
    ],
)
def test_an_opening_without_a_noun_is_found(source: str, line: str) -> None:
    assert openings(source) == [line]


@pytest.mark.parametrize(
    "source", ['"""Offset of a row."""\n', 'def f():\n    """F.\n\n    Of these, one."""\n']
)
def test_other_openings_are_not_found(source: str) -> None:
    assert openings(source) == []


@pytest.mark.parametrize(
    "line", ["It is normalised.", "so many ranks", "what would mend it", "It runs by itself."]
)
def test_a_replaced_word_is_found(line: str) -> None:
    assert replaced_words(line)
