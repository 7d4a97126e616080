"""What a syntax tree says about the language of a file: openings, names and words.

``python -m tests.unit.language`` lowers the numbers of ``language_allowed.json`` to what is found;
it raises none, and so the list only shrinks.
"""

import ast
import functools
import io
import json
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_name("language_allowed.json")
KINDS = ("openings", "participles", "words")
# Openings without a noun or a verb of their own, as of "Of the ranks." and "What it takes.".
OPENING = re.compile(r"(?:Of|What|That|Those|Whose|Which|See there)\b")
ATTRIBUTE = re.compile(r"\s+\*{0,2}[a-z_]+(?:, [a-z_]+)*: (?P<text>.*)")
IRREGULAR = re.findall(
    r"\w+",
    "begun bound bought broken brought built caught chosen dealt done drawn driven fallen fed felt "
    "found given gone grown heard held hidden kept known laid led left lent lost made meant met "
    "paid said seen sent shown shut spent spoken stood stuck taken taught thought thrown told torn "
    "understood won worn written",
)
NO_PARTICIPLE = {"need", "feed", "seed", "embed", "speed", "exceed", "proceed", "succeed"}
PREPOSITIONS = re.findall(
    r"\w+", "after as at before by for from in into of off on out over to up with"
)
# Words of the glossary in all their forms, and what to write.
WORDS = {
    r"(?:go|goes|going|went|gone) on": "continue",
    r"(?:get|gets|getting|got) on": "make progress",
    r"mend(?:s|ed|ing)?": "fix",
    r"re-?fit(?:s|ted|ting)?": "weight sync",
    r"engine(?:'s|s')? log-?probs?": "rollout log-probs",
    r"passed over": "skipped",
    r"surplus(?:es)?": "carried over",
    r"dear(?:er|est)": "more, most expensive",
    r"deal(?:s|ing)?|dealt": "shard",
    r"meeting places?": "rendezvous",
    r"stand-?ins?": "fake",
    r"wish(?:es|ed|ing)?": "plan request",
    r"orphan(?:s|ed)?": "child process",
    r"(?:of|on) (?:its|their|our|your) own": "its own, separate",
    r"by (?:itself|themselves)": "automatically, alone",
    r"so many|every so (?:\w+th|often)": "N",
    r"anew|manieth": "again, N",
    r"stand(?:s|ing)? in the way|stood in the way": "be an error",
    r"whole or not (?:there|at all)": "atomic",
}
WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)


def openings(source):
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


def participles(source):
    """``LINE: name`` of functions that are named ``fetched`` or ``bound_to``; properties may be."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(ast.unparse(one).endswith("property") for one in node.decorator_list):
            continue
        word, *rest = node.name.strip("_").split("_")
        participle = word in IRREGULAR or (word.endswith("ed") and word not in NO_PARTICIPLE)
        if participle and (not rest or rest[0] in PREPOSITIONS):
            found.append(f"{node.lineno}: {node.name}")
    return found


def words(source):
    """``LINE: word`` of the glossary in comments, docstrings and messages."""
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
    return [
        f"{token.start[0] + token.string.count(chr(10), 0, match.start())}: {match[0]}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in kinds
        for match in WORD.finditer(token.string)
    ]


@functools.cache
def found_in(path):
    """Findings by kind."""
    source = path.read_text(encoding="utf-8")
    return dict(zip(KINDS, (openings(source), participles(source), words(source)), strict=True))


def files():
    """The package's files, but for the grader's tables of words."""
    return [
        path
        for path in sorted((ROOT / "rlmath").rglob("*.py"))
        if path.name not in ("wording.py", "language_tables.py")
    ]


def allowed():
    """File to kind to number."""
    return json.loads(ALLOWED.read_text(encoding="utf-8"))


def lower():
    """Write the numbers that are found where they are lower than the list's."""
    before = allowed() if ALLOWED.is_file() else None
    after = {}
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        counts = {kind: len(lines) for kind, lines in found_in(path).items()}
        if before is not None:
            counts = {k: min(n, before.get(name, {}).get(k, 0)) for k, n in counts.items()}
        counts = {kind: number for kind, number in counts.items() if number}
        if counts:
            after[name] = counts
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in after.items())
    ALLOWED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    lower()
