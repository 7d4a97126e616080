"""Cut an answer into tokens: LaTeX and plain notation alike, layout commands dropped."""

from __future__ import annotations

import re
from typing import NamedTuple

from rlmath.grading.box import match_brace
from rlmath.grading.syntax import CONSTANTS, CURRENCIES, CURRENCY_WORDS, FUNCTIONS, words


class Token(NamedTuple):
    """One token.

    Attributes:
        kind: `num` (digits, perhaps with a point), `grouped` (a number with thousands
            separators that could also be a list, such as `1,234`), `word` (a run of letters),
            `cmd` (a LaTeX command, without its backslash), `text` (content of `\\text{…}`),
            `op` (one character), `begin`, `end` (environment name), `name` (of a vector: `vec AB`).
        value: the text; for `grouped` with its commas.
        spaced: whether white space stands before it.
    """

    kind: str
    value: str
    spaced: bool

    @property
    def is_word(self) -> bool:
        """Whether it is a run of letters, bare or in `\\text{…}`."""
        return self.kind in ("word", "text")

    @property
    def is_digits(self) -> bool:
        """Whether it is an integer, without a point or an exponent."""
        return self.kind == "num" and self.value.isdigit()


END = Token("end of answer", "", True)


class TooLong(Exception):
    """The answer has more tokens than the settings allow."""


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
    "gt": ">", "times": "*", "cdot": "*", "ast": "*", "div": "/", "bullet": "*", "lbrace": "{}",
    "rbrace": "}", "lbrack": "[", "rbrack": "]", "vert": "|", "lvert": "|", "rvert": "|",
    "mid": "|", "Vert": "||", "lVert": "||", "rVert": "||", "colon": ":", "varnothing": "emptyset",
    "simeq": "approx", "sim": "approx", "thickapprox": "approx", "dots": "ldots", "cdots": "ldots",
    "dotsc": "ldots", "dotsb": "ldots", "varphi": "phi", "varepsilon": "epsilon",
    "vartheta": "theta",
    "infin": "infty", "land": "and", "wedge": "and", "lor": "or", "vee": "or", "to": "to",
    "rightarrow": "to", "degree": "circ", "lparen": "(", "rparen": ")", "euro": "€", "pounds": "£",
    "yen": "¥", "textdollar": "$", "arcosh": "acosh", "tg": "tan", "ctg": "cot", "arctg": "arctan",
    "backslash": "setminus", "smallsetminus": "setminus", "bigcup": "cup", "bigcap": "cap",
    "i": "i", "imath": "i", "ln": "ln", "dot": "dot", "prime": "'",
}  # fmt: skip
_SIGNS = words("""< > * / [ ] | ( ) : € £ ¥ $ ' ||""")
_ENVIRONMENTS = {
    "dcases": "cases", "cases*": "cases", "dcases*": "cases", "psmallmatrix": "pmatrix",
    "bsmallmatrix": "bmatrix", "vsmallmatrix": "vmatrix",
}  # fmt: skip
_CHARACTER_COMMANDS = {
    "%": "%", "$": "$", "{": "\\{", "}": "\\}", "#": "#", "&": "&", "_": "_", "|": "||",
}  # fmt: skip
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
_WORDY = re.compile(r"[^\W\d_]")


def lex(text: str, max_tokens: int) -> list[Token]:
    """Tokens of `text`, which holds no typographic characters (`unicode.to_latex` comes first).

    Raises:
        TooLong: there are more than `max_tokens`.
    """
    tokens: list[Token] = []
    _lex_into(text, tokens, max_tokens, 0)
    return tokens


def _lex_into(text: str, tokens: list[Token], max_tokens: int, nesting: int) -> None:
    position, depth, spaced, size = 0, 0, False, len(text)
    scan = _LEX.match
    while position < size:
        match = scan(text, position)
        if match is None:  # unreachable: the last alternative takes any character
            break
        kind, value = match.lastgroup or "op", match.group()
        position = match.end()
        if kind == "space":
            spaced = True
            continue
        if len(tokens) >= max_tokens:
            raise TooLong
        if kind == "group":
            tokens.append(Token("num", value.replace(" ", ""), spaced))
        elif kind == "num":
            _number(value, depth, spaced, tokens)
        elif kind == "cmd":
            name = value[1:]
            if name in _SKIPPED:
                position = _skip_null_delimiter(text, position, name)
                spaced = True
                continue
            if name in _TEXT:
                position = _styled(text, position, name, spaced, tokens, max_tokens, nesting)
            elif name in ("begin", "end"):
                found = _NAME.match(text, position)
                if found is not None:
                    position = found.end()
                    plain = _ENVIRONMENTS.get(found[1], found[1])
                    tokens.append(Token(name, plain, spaced))
            else:
                alias = _ALIASES.get(name, name)
                if alias in _SIGNS:
                    tokens.append(Token("op", alias, spaced))
                elif name in ("lbrace", "rbrace"):
                    tokens.append(Token("op", "\\{" if name == "lbrace" else "\\}", spaced))
                else:
                    tokens.append(Token("cmd", alias, spaced))
        elif kind == "esc":
            character = value[1]
            if character in "()[]":
                spaced = True
                continue  # \( \) \[ \] delimit a formula
            if character == "\\":
                tokens.append(Token("cmd", "newline", spaced))
            elif character in "{}":
                depth += 1 if character == "{" else -1
                tokens.append(Token("op", value, spaced))
            elif character == "$":
                tokens.append(Token("op", "$", spaced))
            else:
                tokens.append(Token("op", _CHARACTER_COMMANDS.get(character, character), spaced))
        elif kind == "word":
            tokens.append(Token("word", value, spaced))
        elif kind == "dots":
            tokens.append(Token("cmd", "ldots", spaced))
        else:
            if value in _OPENERS:
                depth += 1
            elif value in _CLOSERS:
                depth -= 1
            elif value == "$":
                following = text[position : position + 1]
                if not (following.isdigit() and text.count("$") % 2 == 1):
                    spaced = True
                    continue  # delimits a formula
            tokens.append(Token("op", value, spaced))
        spaced = False


def _skip_null_delimiter(text: str, position: int, name: str) -> int:
    return (
        position + 1
        if name in ("left", "right") and text[position : position + 1] == "."
        else position
    )


def _number(value: str, depth: int, spaced: bool, tokens: list[Token]) -> None:
    # `{,}`, `,\!` and thin spaces always group digits; a plain comma only outside brackets
    if "{,}" in value or "\\" in value:
        value = value.replace("{,}", "").replace("\\!", "").replace("\\,", "").replace("\\;", "")
        value = value.replace("\\:", "").replace("\\ ", "").replace(" ", "")
        if _COMMA_GROUPS.fullmatch(value):
            value = value.replace(",", "")
    if depth <= 0 and _DECIMAL_COMMA.fullmatch(value):
        value = value.replace(",", ".")
    if "," not in value:
        tokens.append(Token("num", value, spaced))
    elif depth <= 0 and _COMMA_GROUPS.fullmatch(value):
        tokens.append(Token("grouped", value, spaced))
    else:
        for index, part in enumerate(value.split(",")):
            if index:
                tokens.append(Token("op", ",", False))
            tokens.append(Token("num", part, spaced and index == 0))


def _styled(
    text: str,
    position: int,
    name: str,
    spaced: bool,
    tokens: list[Token],
    max_tokens: int,
    nesting: int,
) -> int:
    """`\\text{…}` and its like: words become one token, formulas are cut into theirs."""
    start = position
    while text[start : start + 1].isspace():
        start += 1
    if text[start : start + 1] != "{":
        return position
    close = match_brace(text, start)
    if close < 0:
        return position
    content = text[start + 1 : close]
    if name in ("mathrm", "text"):
        content = content.replace("\\cdot", " ")  # J·s is a unit
    points = "".join(content.split())
    named = points.isalpha() and (len(points) < 5 or len(content.split()) == 1)
    if name in ("vec", "overrightarrow") and len(points) > 1 and named:
        tokens.append(Token("name", "vec " + points, spaced))
        return close + 1  # \vec{AB} is not \vec{BA}
    if name in ("color", "textcolor"):
        return close + 1  # the color; what it colors follows
    stripped = (
        content.replace("~", " ").replace("\\,", " ").replace("\\ ", " ").replace("$", "").strip()
    )
    if stripped in _PUNCTUATION:
        if stripped in (",", ";", ":"):
            tokens.append(Token("op", stripped, spaced))
        return close + 1
    if content.strip().lstrip("\\") in CURRENCIES:
        tokens.append(Token("op", content.strip()[-1], spaced))
        return close + 1
    if stripped.strip(". ") in CURRENCY_WORDS:
        tokens.append(Token("word", stripped.strip(". "), spaced))
        return close + 1
    if "^" in stripped and _UNITS.fullmatch(stripped):
        first = len(tokens)
        _lex_into(stripped, tokens, max_tokens, nesting + 1)
        for index, token in enumerate(tokens[first:], first):
            if token.kind == "word":
                tokens[index] = Token("text", token.value, True)
        return close + 1  # m s^{-1}
    if _ALIASES.get(stripped) in FUNCTIONS:
        stripped = _ALIASES[stripped]
    if stripped in FUNCTIONS or stripped in CONSTANTS:
        tokens.append(Token("word", stripped, spaced))
        return close + 1
    wordy = name.startswith(
        ("text", "mbox", "hbox", "mathrm", "operatorname", "emph", "rm", "mathbf")
    )
    if wordy and _WORDY.search(stripped) and not set("\\{") & set(stripped):
        plain = stripped.strip("()[].,:; ")
        if len(stripped) != len(plain) or "," in plain or _mixed(plain):
            if nesting < 4:
                first = len(tokens)
                _lex_into(stripped, tokens, max_tokens, nesting + 1)
                if first < len(tokens):
                    tokens[first] = tokens[first]._replace(spaced=True)
            return close + 1
        if len(stripped) > 1 or name != "mathbf":
            tokens.append(Token("text", stripped, True))
            return close + 1
    if nesting < 8:
        # braces keep `\mathbf{ab}^2` together; they vanish in the parser
        tokens.append(Token("op", "{", spaced))
        _lex_into(content, tokens, max_tokens, nesting + 1)
        tokens.append(Token("op", "}", False))
    return close + 1


def _mixed(text: str) -> bool:
    """Whether a `\\text{…}` holds more than words: digits or operators."""
    return any(c.isdigit() or c in "=<>+*$" for c in text)
