"""Split an answer into tokens: LaTeX and plain notation alike, layout commands dropped."""

from __future__ import annotations

import re
from typing import NamedTuple

from rlmath.grading.box import match_brace
from rlmath.grading.syntax import CONSTANTS, CURRENCIES, CURRENCY_WORDS, FUNCTIONS, words


class Token(NamedTuple):
    # `num` (digits, perhaps with a point), `grouped` (a number with thousands separators that could
    # also be a list, such as `1,234`), `word` (a run of letters), `cmd` (a LaTeX command, without
    # its backslash), `text` (content of `\text{…}`), `op` (one character), `begin`, `end`
    # (environment name), `name` (of a vector: `vec AB`).
    kind: str
    value: str  # the text; `grouped` includes the commas.
    spaced: bool  # whether white space precedes it.

    @property
    def is_word(self) -> bool:
        """Whether it is a run of letters, bare or in `\\text{…}`."""
        return self.kind in ("word", "text")

    @property
    def is_digits(self) -> bool:
        """Whether it is an integer, without a decimal point or an exponent."""
        return self.kind == "num" and self.value.isdigit()


END = Token("end of answer", "", True)


class TooLong(Exception):
    """The answer has too many tokens."""


_SKIPPED = words(
    """left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle huge Huge LARGE
    footnotesize scriptsize textstyle quad qquad limits nolimits nonumber scriptstyle hfill
    noindent rm bf it middle thinspace medspace thickspace enspace strut mathstrut left. right.
    allowbreak normalsize large Large tiny small hline cr protect ensuremath boldmath"""
)
_TEXT = words(
    """text textbf textit textrm textsf texttt textnormal mbox hbox mathrm mathbf mathit mathsf
    mathtt operatorname bf rm emph bm boldsymbol mathcal mathscr mathfrak underline boxed fbox
    color textcolor vec overrightarrow"""
)
_ALIASES = {
    "dfrac": "frac", "nicefrac": "frac", "sfrac": "frac", "xfrac": "frac",
    "tfrac": "frac", "cfrac": "frac", "flatfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "geq": "ge", "leqslant": "le", "geqslant": "ge", "neq": "ne", "lt": "<",
    "gt": ">", "times": "*", "cdot": "*", "ast": "*", "div": "/", "bullet": "*", "lbrace": "\\{",
    "rbrace": "\\}", "lbrack": "[", "rbrack": "]", "vert": "|", "lvert": "|", "rvert": "|",
    "mid": "|", "Vert": "||", "lVert": "||", "rVert": "||", "colon": ":", "varnothing": "emptyset",
    "simeq": "approx", "sim": "approx", "thickapprox": "approx", "dots": "ldots", "cdots": "ldots",
    "dotsc": "ldots", "dotsb": "ldots", "varphi": "phi", "varepsilon": "epsilon",
    "vartheta": "theta",
    "infin": "infty", "land": "and", "wedge": "and", "lor": "or", "vee": "or",
    "rightarrow": "to", "degree": "circ", "lparen": "(", "rparen": ")", "euro": "€", "pounds": "£",
    "yen": "¥", "textdollar": "$", "arcosh": "acosh", "tg": "tan", "ctg": "cot", "arctg": "arctan",
    "backslash": "setminus", "smallsetminus": "setminus", "bigcup": "cup", "bigcap": "cap",
    "imath": "i", "prime": "'",
}  # fmt: skip
_SIGNS = words(r"""\{ \} < > * / [ ] | ( ) : € £ ¥ $ ' ||""")
_ENVIRONMENTS = {
    "dcases": "cases", "cases*": "cases", "dcases*": "cases", "psmallmatrix": "pmatrix",
    "bsmallmatrix": "bmatrix", "vsmallmatrix": "vmatrix",
}  # fmt: skip
_CHARACTER_COMMANDS = {"{": "\\{", "}": "\\}", "|": "||"}
_LEX = re.compile(
    r"""(?P<space>(?:\s|~|\\[,;:!>\ \n]|\{\}|\\[hv]space\*?(?:\{[^{}]{0,20}\})?)+)
    |(?P<group>(?<![\d.,/^_])[1-9]\d{0,2}(?:[ ]\d{3})+(?![\d/]|[ ]\d|[ ]?[.,]\d{3}\b)(?:\.\d+)?)
    |(?P<num>\d+(?:\{,\}\d{3}(?!\d)|,\\!\s?\d{3}(?!\d)|\\[,;:\ ]\s?\d{3}(?!\d)|\\!,\d{3}(?!\d)
            |,\d+)*
        (?:\.\d+|\.(?!\.|\s|$|\d))?(?:[eE][-+]?\d+(?![a-zA-Z]))?|\.\d+(?:[eE][-+]?\d+(?![a-zA-Z]))?)
    |(?P<cmd>\\[a-zA-Z]+\*?)
    |(?P<esc>\\.)
    |(?P<word>[a-zA-Z]+)
    |(?P<dots>\.\.\.+)
    |(?P<op>.)""",
    re.VERBOSE | re.DOTALL,
)
_COMMA_GROUPS = re.compile(
    r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3})(?:\.\d*)?(?:[eE][-+]?\d+)?"
)
# 6,02e23 and 0,05, but neither 1,200 nor the list 3,4.
_DECIMAL_COMMA = re.compile(r"\d+,\d+[eE][-+]?\d+|(?:0|[1-9]\d*),0(?!\d\d\Z)\d+")
_NAME = re.compile(r"\s*\{([a-zA-Z]+\*?)\}")
_OPENERS, _CLOSERS = frozenset("(["), frozenset(")]")
_UNITS = re.compile(r"[A-Za-z]{1,3}(?:\^\{?-?\d\}?)?(?:[\s.*/]+[A-Za-z]{1,3}(?:\^\{?-?\d\}?)?)*")
_PUNCTUATION = frozenset(("", ".", ",", ";", ":", "!", "?"))
_GROUPING = re.compile(r"\{,\}|\\[!,;: ]| ")
_LAYOUT = re.compile(r"~|\\[, ]")
_WORD_STYLES = ("text", "mbox", "hbox", "mathrm", "operatorname", "emph", "rm", "mathbf")
_MAX_TOKENS = 2_000
_ORDINALS = words("st nd rd th")
_WORDY = re.compile(r"[^\W\d_]")


def lex(text: str) -> list[Token]:
    """Tokens of `text`, without typographic characters (call `unicode.to_latex` first). Raises
    TooLong: there are more than 2,000."""
    lexer = _Lexer()
    lexer.read(text, 0)
    return lexer.tokens


class _Lexer:
    def __init__(self) -> None:
        self.tokens: list[Token] = []

    def add(self, kind: str, value: str, spaced: bool) -> None:
        self.tokens.append(Token(kind, value, spaced))

    def read(self, text: str, nesting: int) -> None:
        position, depth, spaced, size = 0, 0, False, len(text)
        scan = _LEX.match
        while position < size:
            match = scan(text, position)
            assert match is not None  # the last alternative takes any character
            kind, value = match.lastgroup or "op", match.group()
            position = match.end()
            if kind == "space":
                spaced = True
                continue
            if len(self.tokens) >= _MAX_TOKENS:
                raise TooLong
            if kind == "group":
                self.add("num", value.replace(" ", ""), spaced)
            elif kind == "num":
                self.number(value, depth, spaced)
            elif kind == "cmd":
                name = value[1:]
                if name in _SKIPPED:
                    if name in ("left", "right") and text[position : position + 1] == ".":
                        position += 1
                    spaced = True
                    continue
                if name in _TEXT:
                    position = self.read_styled(text, position, name, spaced, nesting)
                elif name in ("begin", "end"):
                    found = _NAME.match(text, position)
                    if found is not None:
                        position = found.end()
                        self.add(name, _ENVIRONMENTS.get(found[1], found[1]), spaced)
                else:
                    alias = _ALIASES.get(name, name)
                    self.add("op" if alias in _SIGNS else "cmd", alias, spaced)
            elif kind == "esc":
                character = value[1]
                if character in "()[]":
                    spaced = True
                    continue  # \( \) \[ \] delimit a formula
                if character == "\\":
                    self.add("cmd", "newline", spaced)
                else:
                    depth += (character == "{") - (character == "}")
                    self.add("op", _CHARACTER_COMMANDS.get(character, character), spaced)
            elif kind == "dots":
                self.add("cmd", "ldots", spaced)
            elif value == "$" and not (
                text[position : position + 1].isdigit() and text.count("$") % 2 == 1
            ):
                spaced = True
                continue  # delimits a formula
            else:
                depth += (value in _OPENERS) - (value in _CLOSERS)
                self.add(kind, value, spaced)
            spaced = False

    def number(self, value: str, depth: int, spaced: bool) -> None:
        # `{,}`, `,\!` and thin spaces always group digits; a plain comma only outside brackets
        if "{,}" in value or "\\" in value:
            value = _GROUPING.sub("", value)
            if _COMMA_GROUPS.fullmatch(value):
                value = value.replace(",", "")
        if depth <= 0 and _DECIMAL_COMMA.fullmatch(value):
            value = value.replace(",", ".")
        if depth <= 0 and _COMMA_GROUPS.fullmatch(value):
            self.add("grouped", value, spaced)
            return
        for index, part in enumerate(value.split(",")):
            if index:
                self.add("op", ",", False)
            self.add("num", part, spaced and index == 0)

    def read_styled(self, text: str, position: int, name: str, spaced: bool, nesting: int) -> int:
        """`\\text{…}` and similar: words become one token, formulas are split into theirs."""
        start = position
        while text[start : start + 1].isspace():
            start += 1
        close = match_brace(text, start) if text[start : start + 1] == "{" else -1
        if close < 0:
            return position
        content = text[start + 1 : close]
        if name not in ("color", "textcolor"):  # what it colors follows
            self.group(content, name, spaced, nesting)
        return close + 1

    def group(self, content: str, name: str, spaced: bool, nesting: int) -> None:
        if name in ("mathrm", "text"):
            content = content.replace("\\cdot", " ")  # J·s is a unit
        points = "".join(content.split())
        named = points.isalpha() and (len(points) < 5 or len(content.split()) == 1)
        stripped = _LAYOUT.sub(" ", content).replace("$", "").strip()
        plain = stripped.strip("()[].,:; ")
        wordy = name.startswith(_WORD_STYLES) and bool(_WORDY.search(stripped))
        wordy = wordy and "\\" not in stripped and "{" not in stripped
        first = len(self.tokens)
        if name in ("vec", "overrightarrow") and len(points) > 1 and named:
            self.add("name", "vec " + points, spaced)  # \vec{AB} is not \vec{BA}
        elif stripped in _PUNCTUATION:
            if stripped in (",", ";", ":"):
                self.add("op", stripped, spaced)
        elif content.strip().lstrip("\\") in CURRENCIES:
            self.add("op", content.strip()[-1], spaced)
        elif stripped.strip(". ") in CURRENCY_WORDS:
            self.add("word", stripped.strip(". "), spaced)
        elif "^" in stripped and _UNITS.fullmatch(stripped):  # m s^{-1}
            self.read(stripped, nesting + 1)
            for index, token in enumerate(self.tokens[first:], first):
                if token.kind == "word":
                    self.tokens[index] = Token("text", token.value, True)
        elif (alias := _ALIASES.get(stripped, stripped)) in FUNCTIONS or stripped in CONSTANTS:
            self.add("word", alias if alias in FUNCTIONS else stripped, spaced)
        elif wordy and (len(stripped) != len(plain) or "," in plain or _is_mixed(plain)):
            if nesting < 4:
                self.read(stripped, nesting + 1)
                if first < len(self.tokens):
                    self.tokens[first] = self.tokens[first]._replace(spaced=True)
        elif wordy and (len(stripped) > 1 or name != "mathbf"):
            ordinal = content in _ORDINALS and not spaced  # 3\text{rd}
            self.add("word" if ordinal else "text", stripped, not ordinal)
        elif nesting < 8:
            # braces keep `\mathbf{ab}^2` together; they vanish in the parser
            self.add("op", "{", spaced)
            self.read(content, nesting + 1)
            self.add("op", "}", False)


def _is_mixed(text: str) -> bool:
    """Whether a `\\text{…}` contains digits or operators."""
    return any(c.isdigit() or c in "=<>+*$" for c in text)
