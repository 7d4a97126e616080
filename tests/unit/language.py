"""Language of a file, read from its syntax tree: openings, names and words."""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("openings", "participles", "words")
# Openings without a noun or a verb of their own, as of "Of the ranks." and "What it takes.".
OPENING = re.compile(
    r"(?:(?:In |To |From )?(?:What|That which|Which|Whose)|Of|That|Those|See there)\b"
)
COMMENT = re.compile(r"\s*# (?P<text>.*)")
ATTRIBUTE = re.compile(r"\s+\*{0,2}\w+(?:, \*{0,2}\w+)*: (?P<text>.*)")
SECTIONS = ("Returns:", "Yields:")
IRREGULAR = re.findall(
    r"\w+",
    "begun bent bound bought broken brought built caught chosen dealt done drawn driven fallen fed "
    "felt flown forgotten found frozen given gone grown heard held hidden hung kept known laid led "
    "left lent lost made meant met paid risen said seen sent shown shrunk shut slept sold sought "
    "spent spoken spun stolen stood struck stuck sunk swept swung taken taught thought thrown told "
    "torn understood woken won worn woven written",
)
NO_PARTICIPLE = {"need", "feed", "seed", "embed", "speed", "exceed", "proceed", "succeed"}
# Words after which a name is still one of a participle: ``done_by``, ``computed_again``.
AFTER = re.findall(
    r"\w+",
    "after again ahead alone along alike apart as at away back before behind beside between by "
    "down first for from in into last like off on once only out over there through to together "
    "too twice under up with within without yet",
)
# Words of the glossary in all their forms, and what to write.
WORDS = {
    r"(?:go|goes|going|went|gone) on": "continue",
    r"(?:get|gets|getting|got) on": "make progress",
    r"mend(?:s|ed|ing)?": "fix",
    r"re-?fit(?:s|ted|ting)?": "weight sync",
    r"(?<!-)engine(?:'s|s')? log-?probs?": "rollout log-probs",
    r"passed over": "skipped",
    r"surplus(?:es)?": "carried over",
    r"dear(?:er|est)": "more, most expensive",
    r"deal(?:s|ing)?|dealt": "shard",
    r"meeting places?": "rendezvous",
    r"stand-?ins?": "fake",
    r"wish(?:es|ed|ing)?": "plan request",
    r"orphan(?:s|ed)?": "child process",
    r"of (?:its|their|our) own": "separate",
    r"on (?:its|their|our) own(?! (?:line|GPU|stream)s?\b)": "alone, separately",
    r"by (?:itself|themselves)": "automatically, alone",
    r"so many|every so (?:\w+th|often)": "N",
    r"anew|manieth": "again, N",
    r"stand(?:s|ing)? in the way|stood in the way": "be an error",
    r"whole or not (?:there|at all)": "atomic",
    r"as (?:it is|they are) now": "current",
    r"those that there are": "existing, known",
    r"under way": "running, current",
}
WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)


def openings(source):
    """``LINE: text`` of docstrings, their attribute lines, and comments with an :data:`OPENING`."""
    found = [
        f"{number}: {comment['text']}"
        for number, line in enumerate(source.split("\n"), 1)
        if (comment := COMMENT.match(line)) and OPENING.match(comment["text"])
    ]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None:
            continue
        first = node.body[0].lineno
        lines = docstring.split("\n")
        for number, line in enumerate(lines):
            attribute = ATTRIBUTE.match(line)
            opens = not number or lines[number - 1].strip() in SECTIONS
            text = line.strip() if opens else attribute["text"] if attribute else ""
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
        if participle and (not rest or rest[0] in AFTER):
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
def findings(path):
    source = path.read_text(encoding="utf-8")
    return dict(zip(KINDS, (openings(source), participles(source), words(source)), strict=True))


def files():
    """All Python files, except the grader's tables of words and this test's."""
    folders = ("rlmath", "benchmarks", "launchers", "ray_utils", "toolkits", "examples", "tests")
    tables = ("wording.py", "language_tables.py", "language.py", "test_language.py")
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name not in tables
    ]
