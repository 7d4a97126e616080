"""Whether a box is the whole statement: not the 5 of `2\\boxed{5}`, `\\sqrt{\\boxed{5}}` or
`half of \\boxed{5}`.

The text directly beside a box is judged in two ways. Signs and commands of the surrounding formula
must not change the value: before the box only known harmless ones are allowed, after it only known
harmful ones are rejected. Words are judged by `words_beside_box`. Markup, spaces, opening brackets
and known styles are skipped. A hundred characters on each side are read.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rlmath.grading import units, words_beside_box, words_in_other_languages
from rlmath.grading.syntax import BIG_OPERATORS, CONSTANTS, DECORATIONS, FUNCTIONS, GREEK

_WINDOW = 100
# Groups that display their content unchanged.
_STYLES = (
    r"text(?:bf|it|rm|sf|tt|up|normal|color)?|emph|math(?:bf|rm|it|sf|bb|cal)|bm|pmb|boldsymbol"
    r"|[mhf]box|boxed|framebox|under(?:line|brace)|ensuremath|operatorname\*?"
    r"|[lL]arge|LARGE|[hH]uge|color(?:box)?"
)
_SPACES = r"[,;:! ]|q?quad|(?:display|text)style|left|right|[bB]igg?[lr]?|hfill|limits"
_LAYOUT = (
    r"bf|rm|it|sf|[lL]arge|LARGE|[hH]uge|normalsize|centering|noindent|item|par|newline"
    r"|(?:small|med|big)skip|hline|star|bullet|strut"
)
# Directly before a value these only introduce it.
_LEADING = re.compile(
    r"\\(?:to|(?:R|r|Longr|longr|Longleftr|Leftr)ightarrow|leadsto|implies|iff|therefore|because"
    r"|equiv|approx|simeq|cong|sim|leq?q?(?:slant)?|geq?q?(?:slant)?|in|colon|[lc]?dots[cb]?"
    r"|triangleq|doteq|\\)\Z"
)
_PASSED_BEFORE = re.compile(
    r"(?:\*\*|__|\\[(\[]"
    rf"|<[a-zA-Z/|][^<>\s]{{0,40}}>|\\(?:{_SPACES}|{_LAYOUT})"
    rf"|\\(?:[hv]space|label|color)\*?\{{[^{{}}]*\}}"
    rf"|\\(?:{_STYLES})\s*(?:\[[^\[\]{{}}]*\]\s*)?(?:\{{[^{{}}]*\}}\s*)?\{{)\Z"
)
_MARKUP = ' \t\r\n`&~$"“‘€£¥₹'
_PARTING = ("$", "\\(", "\\[", "quad", "~~")
_ENDS_VALUE = frozenset("0123456789)}$")
_WORD_BEFORE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}\Z")
_GROUP_BEFORE = re.compile(
    rf"\\(?:{_STYLES}|tag|label|begin|end|[hv]space)\*?\s*\{{[^{{}}]*\}}\s*\Z"
)
_COMMAND_BEFORE = re.compile(r"\\(?:[A-Za-z]+|\\)\Z")
_OPTION = re.compile(r"(?<![A-Za-z])\(?[A-J]\)\Z")
_NUMBERED = re.compile(r"[A-Za-z]{2,} \d{1,3}\Z")
_STATED_NUMBER = re.compile(r"\b(?:is|are|equals|gives|be)\s+\S+\Z")
# A minus sign after one of these and a space is a dash.
_DASHED = re.compile(r"(?:^|\n|[A-Za-z]{2}|[-:;,.!?*\"'`])\s*\Z")
_LISTED_BEFORE = re.compile(r"(?:(?:^|[\s${(\[=])[-−]?\d[\d.]*|[(\[][^()\[\]=]*|\\\{[^{}=]*)\s*,\Z")
_OPENED = re.compile(r"(?:\\left\s*)?(?:\\\{|[(\[{|])\Z")
_CALLED_BEFORE = re.compile(r"[A-Za-z\d)}\]^_]\Z|\\[A-Za-z]+\s*\Z")

_PASSED_AFTER = re.compile(
    r"[\s`&~$\"”’{})]|\\[)\]]|\*\*(?!\d)|__|\\\}"
    rf"|\\(?:{_SPACES}|bf|rm|it)(?![A-Za-z])"
)
_DIGIT = r"[\d０-９]"
_NO_VALUE = r"\\(?!text|mathrm|[mh]box|operatorname|[\s,;:!\])\\]|q?quad|end\b|item)"
_OPERAND = rf"(?:{_DIGIT}|\.\d|[({{]|{_NO_VALUE}|[A-Za-z](?![A-Za-z]))"
# After a box these change its value, in a formula or not.
_CHANGED_AFTER = re.compile(
    r"\^(?!\s*\{?\s*(?:\\(?:circ|text|mathrm|prime|dagger|ast|star|degree|mbox)|o\b|[°'′*\[]"
    r"|(?:th|st|nd|rd)\b|\\\*))"
    rf"|[⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ⁻]|[+×÷·±∓⋅∗∪∩∖√]|\*\*?(?=\s*{_OPERAND})|/\s*{_OPERAND}|_[{{\dA-Za-z]"
    rf"|[-−–](?=\s*(?:{_DIGIT}|[({{]|{_NO_VALUE}))|{_DIGIT}|\.(?!0+(?!\d))\d|,\d|:\s?(?!00)\d|[eE][-+]?\d"
    r"|\\(?:cdot|times|ast|div|pm|mp|cup|cap|setminus|bmod|mod|over|choose|atop|[dtc]?frac|d?binom"
    r"|sqrt|infty)(?![A-Za-z])(?!\s*\\(?:text|mathrm|mbox)\b)"
    r"|\((?:[-−]?\d|[a-z](?![A-Za-z])|\\(?!text|mathrm|mbox))"
)
_LISTED_AFTER = re.compile(
    rf",\s*[-−]?(?:{_DIGIT}+(?!\w)|\\frac|\\sqrt|\\pi)\S{{0,20}}?"
    r"\s*(?:[.,)}\]$]|\\[\])}]|\Z|(?:and|or)\b)"
)
_MINUS_NAME = re.compile(r"[-−–]\s*[A-Za-z](?![A-Za-z])")
_NAME = re.compile(r"\\?[A-Za-z]+")
_NAMED = FUNCTIONS | BIG_OPERATORS | DECORATIONS | CONSTANTS.keys() | GREEK - {"Omega", "mu"}
_CONDITION = re.compile(r"\([^()]{0,40}(?:[=<>≤≥]|\\(?:[lg]eq?|ne|in|text)\b)")
_ALTERNATIVE = re.compile(
    r"[\s$*]{0,6}\bor\b[\s$*]{0,6}(?P<value>[-−]?\d[\d.,/]*|[A-J]\b|\\[dt]?frac\{[^{}]*\}\{[^{}]*\})"
)
_DELIMITER = re.compile(r"\\(?:[\[\]()]|begin|end)")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{?(\d+)\}?\s*\{?(\d+)\}?")
_PLAIN = re.compile(r"-?\d{1,18}(?:\.\d{1,18}|/[1-9]\d{0,17})?", re.ASCII)
_SHORT_WORDS = frozenset(
    ("is", "in", "if", "as", "so", "of", "to", "at", "by", "we", "on", "or", "th", "st", "nd", "rd")
)
TEXT = re.compile(r"\\(?:text[a-z]{0,6}|mathrm|[mh]box)\s*\{([^{}]*)\}")


_SCALED = re.compile(
    r"(?:\$|\\\))?[ -](?:dozens?|hundreds?|thousands?|millions?|billions?|trillions?|lakhs?|crores?"
    # 5 squared units are 5 of them.
    r"|factorial|(?:squared|cubed)"
    r"(?! (?:units?|f(?:ee|oo)t|inch|yard|mile|[a-z]*met(?:er|re)|[ckm]?m\b)))\b",
    re.IGNORECASE,
)


def stands_alone(text: str, begin: int, end: int) -> bool:
    """Whether the text beside the box, or row of boxes, at [begin, end) keeps its value."""
    before = text[begin - _WINDOW if begin > _WINDOW else 0 : begin]
    after = text[end : end + _WINDOW]
    if not before and not after:
        return True
    inside = _is_inside(before, after)
    if _is_part_before(before, inside) or _is_part_after(after, inside):
        return False
    before = TEXT.sub(r" \1 ", before) if "\\" in before else before
    after = TEXT.sub(r" \1 ", after) if "\\" in after else after
    if _SCALED.match(" " + after.lstrip(" $")) or words_in_other_languages.changes_box(
        before, after
    ):
        return False
    return not words_beside_box.changes_box(before, after)


def other_value(text: str, end: int, value: str) -> str:
    """` or 6` if a number other than `value` follows the box that ends at `end`, else ""."""
    after = text[end : end + _WINDOW]
    found = _ALTERNATIVE.match(TEXT.sub(r" \1 ", after)) if "or" in after else None
    if found is None:
        return ""
    other = found["value"].rstrip(".,")
    number = _number(other)
    return "" if number is not None and number == _number(value) else f" or {other}"


def _number(text: str) -> Fraction | None:
    """The value of an integer, a decimal or a fraction of short integers, else None."""
    plain = _FRACTION.sub(r"\1/\2", text)
    return Fraction(plain) if _PLAIN.fullmatch(plain) else None


def _is_inside(before: str, after: str) -> bool:
    """Whether the box is in a formula: opened before it and closed after it."""
    if "\\" in after:
        closer = _DELIMITER.search(after)
        if closer is not None and closer[0] in ("\\]", "\\)", "\\end"):
            return True
    return "$" in after.split("\n", 1)[0] and is_in_formula(before)


def is_in_formula(text: str) -> bool:
    """Whether a formula is open at the end of a text, judged by its last line."""
    line = text[text.rfind("\n") + 1 :]
    if "\\" not in line:
        return line.replace("$$", "$").count("$") % 2 == 1
    line = line.replace("\\$", "").replace("$$", "$")
    return (
        line.count("$") % 2 == 1
        or line.rfind("\\[") > line.rfind("\\]")
        or line.rfind("\\(") > line.rfind("\\)")
    )


def _is_part_before(before: str, inside: bool) -> bool:
    """Whether signs directly before a box make it part of a value: `2`, `-`, `\\sqrt{`, `f(`."""
    rest = _peel(before)
    bracket = _OPENED.search(rest, max(0, len(rest) - 8))
    while bracket is not None:
        if _CALLED_BEFORE.search(rest, 0, bracket.start()) or (bracket[0] == "|" and inside):
            return True  # f(, 2(
        rest = _peel(rest[: bracket.start()])
        bracket = _OPENED.search(rest, max(0, len(rest) - 8))
    gap = before[len(rest) :]
    if not rest or (gap.lstrip(" ").startswith("\n") and rest[-1] not in "+*/^_<×·÷"):
        return False
    glued = not gap or (inside and not any(sign in gap for sign in _PARTING))
    last = rest[-1]
    if last in "-−–":
        if _DASHED.search(rest[:-1]) is None and not _is_numbering(rest[:-1].rstrip()):
            return True
        return not (gap[:1].isspace() and (not inside or "$" in gap))
    if last == ">":
        return rest[-2:] not in ("->", "=>") and rest.rsplit("\n", 1)[-1].strip() != ">"
    if last == "*":  # emphasis or a bullet
        return rest[-2:-1].isalnum() or rest[:-1].rstrip()[-1:] in _ENDS_VALUE
    if last == "|":
        return glued
    if last == "+":
        return rest[:-1].rstrip("& ")[-1:] not in ("", "=", "(")
    if last in "/^_<×÷·±∓√¬⋅∗≠":
        return not (last == "_" and rest[-2:-1].isspace())
    if last == ",":
        return glued and _LISTED_BEFORE.search(rest) is not None
    if last in ":.":
        return glued and rest[-2:-1].isdigit() and (inside or last == ".")
    if last in ")]" and not glued:
        return False
    if last == ")" and _OPTION.search(rest):
        return False
    if last.isdigit() and not glued:
        return not _is_numbering(rest) and rest[-2:-1] in ("", " ")
    return _is_factor(rest, glued)


def _peel(text: str) -> str:
    """A text without markup, spaces, currency signs and opened styles at its end."""
    while True:
        rest = text.rstrip(_MARKUP)
        if rest.endswith("\\") and not rest.endswith("\\\\"):
            rest = rest[:-1]  # \\$
        if rest[-1:].isalnum() and "\\" not in rest[-16:]:
            return rest
        passed = _PASSED_BEFORE.search(rest, max(0, len(rest) - 60))
        rest = rest if passed is None else rest[: passed.start()]
        if len(rest) == len(text):
            return rest
        text = rest


def _is_numbering(rest: str) -> bool:
    """Whether a text ends in `Step 3` or `1`, but not in `is 3`."""
    return _NUMBERED.search(rest) is not None and _STATED_NUMBER.search(rest) is None


def _is_factor(rest: str, glued: bool) -> bool:
    """Whether a formula's last sign or command before a box multiplies it or applies to it."""
    command = _COMMAND_BEFORE.search(rest)
    if command is not None:
        return _LEADING.match(command[0]) is None
    if _GROUP_BEFORE.search(rest) or _WORD_BEFORE.search(rest):
        return False
    return glued and (rest[-1] in _ENDS_VALUE or (rest[-1].isalpha() and rest[-1].isascii()))


def _is_part_after(after: str, inside: bool) -> bool:
    """Whether signs directly after a box make it part of a value: `^2`, `/2`, `x`, `+ 3`."""
    if after.startswith("{,}"):
        return True
    position = 0
    passed = _PASSED_AFTER.match(after)
    while passed is not None:
        position = passed.end()
        passed = _PASSED_AFTER.match(after, position)
    gap, rest = after[:position], after[position:]
    inside = inside and "$" not in gap and "\\)" not in gap and "\\]" not in gap
    if not rest or "\n" in gap:
        return False
    spaced = " " in gap
    if rest[0] == "!":
        return inside
    if rest[0] == "?":
        return not gap.strip(" *$")
    if rest[0] == ",":
        return _LISTED_AFTER.match(rest) is not None and (inside or "$" not in gap)
    if rest[0].isdigit() and not inside and spaced:
        return False
    if rest[0] == "_" and not inside:
        return rest[1:2].isdigit()
    if rest[0] == "(" and ((spaced and not inside) or _CONDITION.match(rest)):
        return False
    if _CHANGED_AFTER.match(rest) or (inside and _MINUS_NAME.match(rest)):
        return True
    name = _NAME.match(rest)
    if name is None or (spaced and not inside):
        return False
    word = name[0]
    if word[0] == "\\":
        return word[1:] in _NAMED
    if units.lookup(word) is not None:
        return False
    return word in _NAMED or (len(word) < (3 if inside else 2) and word not in _SHORT_WORDS)
