"""Words that the glossary replaces, and British spellings, stay out of pages, settings and code."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "line", ["It is normalised.", "so many ranks", "what would mend it", "It runs by itself."]
)
def test_a_replaced_word_is_found(line: str) -> None:
    assert replaced_words(line)
