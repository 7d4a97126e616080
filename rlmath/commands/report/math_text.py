"""LaTeX in a text as MathML, reduced to elements that only show mathematics.

latex2mathml makes the elements. What a model writes goes into it (``\\href``, ``\\class`` and
``\\color`` too), so only the elements and attributes listed here are kept; the page makes them one
by one from the same lists and never reads markup.
"""

from __future__ import annotations

import functools
import re
from typing import Any
from xml.etree.ElementTree import Element

# Presentation elements of MathML Core that latex2mathml makes, and menclose.
ELEMENTS = frozenset(
    ("math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup",
     "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd", "mstyle", "mpadded",
     "mphantom", "menclose")
)  # fmt: skip
# Each with the values that it may have.
_LENGTH = r"-?[\d.]+(?:em|ex|px|pt|%)?"
ATTRIBUTES = {
    "accent": "true|false",
    "columnalign": "(?:left|right|center)(?: (?:left|right|center)){0,30}",
    "columnlines": "(?:solid|dashed|none)(?: (?:solid|dashed|none)){0,30}",
    "displaystyle": "true|false",
    "fence": "true|false",
    "form": "prefix|infix|postfix",
    "linethickness": _LENGTH,
    "lspace": _LENGTH,
    "mathvariant": "[a-z-]{1,30}",
    "maxsize": _LENGTH,
    "minsize": _LENGTH,
    "movablelimits": "true|false",
    "notation": "[a-z ]{1,60}",
    "rowlines": "(?:solid|dashed|none)(?: (?:solid|dashed|none)){0,30}",
    "rspace": _LENGTH,
    "scriptlevel": r"[+-]?\d",
    "separator": "true|false",
    "stretchy": "true|false",
    "symmetric": "true|false",
    "width": _LENGTH,
}
_MAX_ELEMENTS = 2000
# They define commands, which may grow without bound.
_DEFINES = re.compile(r"\\(?:re)?newcommand|\\[gex]?def\b|\\let\b|\\newenvironment")
# Delimiters that models use. A dollar sign before a space or of a price is none. Every length is
# bounded: a response may open a thousand formulas and close none.
_FORMULA = re.compile(
    r"\$\$(?P<dollars>.{1,800}?)\$\$"
    r"|\\\[(?P<brackets>.{1,800}?)\\\]"
    r"|\\\((?P<parentheses>.{1,800}?)\\\)"
    r"|(?P<environment>\\begin\{(?P<name>align|equation|gather|cases|[pbv]?matrix|array)(?P<star>\*?)\}"
    r".{1,800}?\\end\{(?P=name)(?P=star)\})"
    r"|(?<![\\\w$])\$(?P<dollar>[^\s$](?:[^$\n]{0,400}?[^\s$\\])?)\$(?!\d)"
    r"|(?P<box>\\boxed\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,400}\}){0,400}\}){0,400}\}){0,400}\})",
    re.DOTALL,
)
_WITHOUT = ("dollars", "brackets", "parentheses", "environment", "dollar", "box")

# An element: its name, its text or its children, and its attributes if it has any.
Tree = list[Any]


def split(text: str) -> list[str | tuple[str, str]]:
    """A text as pieces of text and ``(source, LaTeX)`` of formulas; their sources join to it.

    Only the delimiters count; the text between them may be no mathematics.
    """
    pieces: list[str | tuple[str, str]] = []
    end = 0
    for match in _FORMULA.finditer(text):
        latex = next(match[name] for name in _WITHOUT if match[name] is not None)
        if match.start() > end:
            pieces.append(text[end : match.start()])
        pieces.append((match[0], latex))
        end = match.end()
    if end < len(text):
        pieces.append(text[end:])
    return pieces


def is_display(source: str) -> bool:
    return source.startswith(("$$", r"\[", r"\begin"))


@functools.lru_cache(maxsize=20_000)
def to_tree(latex: str) -> Tree | None:
    """MathML of a formula as nested lists; ``None`` where it cannot be converted."""
    from latex2mathml.converter import convert_to_element

    # The converter takes an unclosed group for a closed one; a response shows that it was cut off.
    braces = re.sub(r"\\.", "", latex, flags=re.DOTALL)
    if _DEFINES.search(latex) or braces.count("{") != braces.count("}"):
        return None
    try:
        return _tree(convert_to_element(latex), [_MAX_ELEMENTS])
    except Exception:  # Whatever a model wrote between two dollar signs; RecursionError too.
        return None


def _tree(element: Element, left: list[int]) -> Tree:
    left[0] -= 1
    if left[0] < 0:
        raise ValueError("too many elements")
    # An unknown element is a group: its children are shown.
    name = element.tag if element.tag in ELEMENTS else "mrow"
    attributes = {
        key: value
        for key, value in element.attrib.items()
        if key in ATTRIBUTES and re.fullmatch(ATTRIBUTES[key], value)
    }
    text = _character_references(element.text or "")
    children = [_tree(child, left) for child in element]
    if name == "mrow" and not attributes and len(children) == 1:
        return children[0]
    return [name, children or text, *([attributes] if attributes else [])]


def _character_references(text: str) -> str:
    """latex2mathml writes signs as references (``&#x00028;``), which its own output spells out."""
    return re.sub(
        r"&#x([0-9A-Fa-f]{1,6});",
        lambda match: chr(code) if (code := int(match[1], 16)) < 0x110000 else match[0],
        text,
    )
