"""Words that the glossary replaces, and British spellings, stay out of pages, settings and code.

Docstrings and comments begin with a noun phrase or a verb, no function is named by a participle,
and the glossary's words are found in all their forms.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.unit.language import KINDS, files, findings, openings, participles, words

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "conf")
CODE = ("rlmath", "toolkits", "launchers", "ray_utils", "benchmarks", "tests")
# The grader reads both spellings.
EXEMPT = ("rlmath/grading/wording.py", "tests/unit/language.py", "tests/unit/test_language.py")
# Words to replace, and what to write.
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


def replaced_words(text):
    """``LINE: word: what to write`` for each."""
    text = text.lower()
    return [
        f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}: {instead}"
        for pattern, instead in PATTERNS.items()
        for match in pattern.finditer(text)
    ]


@pytest.mark.process
def test_the_glossary_is_kept():
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


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_code_has_no_finding(kind):
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in files() for line in findings(path)[kind]
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('def f():\n    """Of the ranks."""\n', "2: Of the ranks."),
        (
            'class A:\n    """A.\n\n    Attributes:\n        x: What it has.\n    """\n',
            "5: What it has.",
        ),
        ('"""See there."""\n', "1: See there."),
        ('def f():\n    """F.\n\n    Returns:\n        Of each.\n    """\n', "5: Of each."),
        ('async def f(a, b):\n    """F.\n\n        a, b: Those of f.\n    """\n', "4: Those of f."),
    ],
)
def test_an_opening_without_a_noun_is_found(source, line):
    assert openings(source) == [line]


@pytest.mark.parametrize(
    "source", ['"""Offset of a row."""\n', 'def f():\n    """F.\n\n    Of these, one."""\n']
)
def test_openings_with_a_noun_pass(source):
    assert openings(source) == []


@pytest.mark.parametrize(
    "line", ["It is normalised.", "so many ranks", "what would mend it", "It runs by itself."]
)
def test_a_replaced_word_is_found(line):
    assert replaced_words(line)


@pytest.mark.parametrize("name", ["fetched", "_bound", "done_by", "_computed_again"])
def test_a_participle_as_a_name_is_found(name):
    assert participles(f"def {name}():\n    pass\n") == [f"1: {name}"]


@pytest.mark.parametrize("name", ["seed", "need_for", "packed_size", "fetch", "builds"])
def test_verbs_nouns_and_properties_pass(name):
    assert participles(f"def {name}():\n    pass\n") == []
    assert participles("class A:\n    @property\n    def done(self):\n        pass\n") == []


def test_words_are_found_in_all_their_forms_outside_of_names():
    source = '# It went on.\nmended = 1\n"""A.\n\nMending it."""\nprint(f"{mended} deals")\n'
    assert [one.partition(": ")[2] for one in words(source)][:2] == ["went on", "Mending"]
