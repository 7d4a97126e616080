"""Options of multiple choice: one letter, a letter with its text, or several, all needed."""

from __future__ import annotations

import re

from rlmath.grading import wording

_STYLE = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|textit|mathit|mbox|bf|rm|textsc|operatorname)\b\s*"
)
_SPACE_COMMAND = re.compile(r"\\[,;:!> ]|~|\\q?quad\b")
_LONE_LETTER = re.compile(r"\{\s*(\(?[A-Ja-j]\)?)\s*\}")
_LETTER = re.compile(
    r"\s*(?:(?:option|choice|answer)s?\s*:?\s*)?(?:\(([A-Ja-j])\)|([A-J])(?=[).:]|\s*$))[).:]?\s*(.*)",
    re.DOTALL | re.I,
)
_MARKED = re.compile(r"(?<![A-Za-z0-9\\(])(?:\(([A-J])\)|([A-J])[).:])(?!\w)")
_OTHER_LETTER = re.compile(r"(?<![A-Za-z0-9\\(}])\(([A-Ja-j])\)")
_JOINED = re.compile(
    r"\s*(?:(?:[Bb]oth|[Oo]ptions?|[Cc]hoices?)\s+){0,2}\(?([A-J])\)?((?:\s*(?:,\s*(?:and\b)?|;|&|\band\b|\bor\b|(?<=\))(?=\())"
    r"\s*\(?[A-J]\)?)+)\s*[.:]?\s*"
)
_ONLY_LETTER = re.compile(
    r"(?:(?:because|so|thus|hence|then|therefore|actually|the|option|choice|answer|it|is|no)\s+)*"
    r"\(?([A-J])\)?\s*[.!]?\s*",
)
_SEPARATOR = re.compile(r"^[\s,;&]+|[\s,;&.]*(?:\band\b)?[\s,;&.]*$")
_PREDICATES = frozenset(("is", "isn't", "was", "are", "seems", "looks", "does", "doesn't", "can"))
_TAKEN_BACK = frozenset(
    (
        *("wrong", "incorrect", "maybe", "perhaps", "probably", "possibly", "guess", "doubt"),
        *("wait", "supposedly", "assuming", "unlikely", "rejected", "excluded", "eliminated"),
    )
)
_DANGLING = frozenset(("unless", "except", "or", "nor", "not", "but", "if"))
Options = tuple[tuple[str, str], ...]


def _plain(latex: str) -> str:
    plain = _SPACE_COMMAND.sub(" ", _STYLE.sub("", latex)).replace("$", "").replace("*", "")
    plain = _LONE_LETTER.sub(r"\1", plain)
    while plain.startswith("{"):
        plain = plain[1:].replace("}", " ", 1)
    return plain.replace("{,}", ",")


def read_options(latex: str) -> tuple[str, str, Options]:
    """(letter, rest, ()) of `B` or `B) 12`, or ("", "", options) of `(A) and (C)`.

    Several options come back in the order of their letters, each with the text after it. "or"
    between them, or a word that negates or hedges after one of them, makes it no option at all.
    """
    if len(latex) > 1 and latex[0] not in "\\(ABCDEFGHIJoOcCaA${ *":
        return "", "", ()
    plain = _plain(latex)
    joined = _JOINED.fullmatch(plain)
    if joined is not None:
        letters = re.findall(r"[A-J]", joined.group(1) + joined.group(2).replace("and", ""))
        if re.search(r"\bor\b", joined.group(2)) or len(set(letters)) != len(letters):
            return "", "", ()
        return "", "", tuple((letter, "") for letter in sorted(letters))
    marked = list(_MARKED.finditer(plain))
    if len(marked) > 1:
        ends = [m.start() for m in marked[1:]] + [len(plain)]
        found = {
            m.group(1) or m.group(2): _SEPARATOR.sub("", plain[m.end() : end]).strip()
            for m, end in zip(marked, ends, strict=True)
        }
        if plain[: marked[0].start()].strip() or len(found) != len(marked):
            return "", "", ()
        if len({bool(rest) for rest in found.values()}) > 1:
            return "", "", ()  # with a text for some only, it is not clear whose text that is
        doubts = wording.NEGATIONS | wording.HEDGES | wording.MULTIPLIED
        if any(set(wording.words_of(rest)) & doubts for rest in found.values()):
            return "", "", ()
        return "", "", tuple(sorted(found.items()))
    match = _LETTER.match(plain)
    if match is None:
        return "", "", ()
    letter = match.group(1) or match.group(2)
    rest = match.group(3).strip()
    if match.group(2) is not None and not letter.isupper():
        return "", "", ()
    if rest.startswith("(") and plain[: match.start(3)].endswith(")"):
        return "", "", ()  # (b)(0) is a product
    if any(other.upper() != letter.upper() for other in _OTHER_LETTER.findall(rest)):
        return "", "", ()  # (a) 5 (b) 7
    if re.match(r"(?:and|or|nor|but|not|is|isn't)\b|[,;&/]", rest) or _doubted(rest):
        return "", "", ()
    return letter.upper(), rest, ()


def names_another(rest: str, letter: str) -> bool:
    """Whether the text after a letter is another letter: `B) C`, `B. because C`."""
    found = _ONLY_LETTER.fullmatch(_plain(rest))
    return found is not None and found.group(1) != letter


def _doubted(rest: str) -> bool:
    """Whether the text after a letter takes it back: `B) is wrong`, not `E) none of these`."""
    found = wording.words_of(rest)
    if not found:
        return False
    if all(wording.changes_value(word) and not word.isdigit() for word in found):
        return True
    if found[0] in ("seems", "looks", "appears") or found[-1] in _DANGLING:
        return True
    predicate = found[0] in _PREDICATES or len(found) == 1
    if predicate and any(word in wording.NEGATIONS for word in found[:4]):
        return True
    return any(word in _TAKEN_BACK for word in found)
