"""Options of multiple choice: one letter, a letter with its text, or several required ones."""

from __future__ import annotations

import re

from rlmath.grading import wording
from rlmath.grading.language_tables import ENGLISH
from rlmath.grading.syntax import words

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
    r"\(?([A-J])\)?\s*[.!]?\s*"
)
_SEPARATOR = re.compile(r"^[\s,;&]+|[\s,;&.]*(?:\band\b)?[\s,;&.]*$")
_PREDICATES = words("is isn't was are seems looks does doesn't can")
_TAKEN_BACK = ENGLISH.words["option_taken_back"]
_DANGLING = words("unless except or nor not but if")
CHOICES = frozenset("ABCDEFGHIJ")
Options = tuple[tuple[str, str], ...]


def _plain(latex: str) -> str:
    plain = _SPACE_COMMAND.sub(" ", _STYLE.sub("", latex)).replace("$", "").replace("*", "")
    plain = _LONE_LETTER.sub(r"\1", plain)
    while plain.startswith("{"):
        plain = plain[1:].replace("}", " ", 1)
    return plain.replace("{,}", ",")


def read_options(latex: str) -> tuple[str, str, Options]:
    """(letter, rest, ()) of `B` or `B) 12`, or ("", "", options) of `(A) and (C)`.

    Several options are ordered by letter, each with the text after it. "or" between them, or a word
    after one of them that negates or hedges, gives no option.
    """
    if len(latex) > 1 and latex[0] not in "\\(ABCDEFGHIJoOcCaA${ *":
        return "", "", ()
    plain = _plain(latex)
    joined = _JOINED.fullmatch(plain)
    if joined is not None:
        letters = re.findall(r"[A-J]", joined[1] + joined[2])
        either = re.search(r"\bor\b", joined[2]) or len(set(letters)) != len(letters)
        return "", "", () if either else tuple((letter, "") for letter in sorted(letters))
    marked = list(_MARKED.finditer(plain))
    if len(marked) > 1:
        ends = [m.start() for m in marked[1:]] + [len(plain)]
        found = {
            m.group(1) or m.group(2): _SEPARATOR.sub("", plain[m.end() : end]).strip()
            for m, end in zip(marked, ends, strict=True)
        }
        stray = plain[: marked[0].start()].strip() or len(found) != len(marked)
        # If only some have a text, it is unclear which option it belongs to.
        unclear = len({bool(rest) for rest in found.values()}) > 1
        doubted = any(set(wording.words_of(rest)) & wording.CHANGING for rest in found.values())
        return "", "", () if stray or unclear or doubted else tuple(sorted(found.items()))
    match = _LETTER.match(plain)
    if match is None:
        return "", "", ()
    letter, rest = match[1] or match[2], match[3].strip()
    if (
        (match[2] is not None and not letter.isupper())
        or (rest.startswith("(") and plain[: match.start(3)].endswith(")"))  # (b)(0) is a product
        or any(other.upper() != letter.upper() for other in _OTHER_LETTER.findall(rest))
        or re.match(r"(?:and|or|nor|but|not|is|isn't)\b|[,;&/]", rest)
        or _is_doubted(rest)
    ):
        return "", "", ()
    return letter.upper(), rest, ()


def names_another(rest: str, letter: str) -> bool:
    """Whether the text after a letter is another letter: `B) C`, `B. because C`."""
    found = _ONLY_LETTER.fullmatch(_plain(rest))
    return found is not None and found.group(1) != letter


def _is_doubted(rest: str) -> bool:
    """Whether the text after a letter retracts it: `B) is wrong`, not `E) none of these`."""
    found = wording.words_of(rest)
    if not found:
        return False
    predicate = found[0] in _PREDICATES or len(found) == 1
    return (
        all(wording.changes_value(word) and not word.isdigit() for word in found)
        or found[0] in ("seems", "looks", "appears")
        or found[-1] in _DANGLING
        or (predicate and not wording.NEGATIONS.isdisjoint(found[:4]))
        or not _TAKEN_BACK.isdisjoint(found)
    )
