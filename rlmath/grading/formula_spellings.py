"""Normalize unusual spellings of formulas before an answer is tokenized."""

from __future__ import annotations

import re

# `42</s>`, `42<|im_end|>`, `42\`
_STRAY_END = re.compile(r"(?:<\|[^|<>]{1,40}\|>|</?s>|(?<!\\)\\(?=\s*\Z)|\s)+\Z")
_OPERATOR = r"[-+*/=<>]|\\(?:times|cdot|div|pm|mp|le|ge|leq|geq|ne|neq|lt|gt|in|cup|cap)"
_BRACED_OPERATOR = re.compile(
    rf"(?P<command>\\(?:text|mathrm|math(?:bin|rel|ord|op))\s*|\\[A-Za-z]+\s*|[\^_]\s*|\}})?"
    rf"\{{\s*(?P<operator>{_OPERATOR})\s*\}}"
)
_DROPPED = re.compile(r"\\(?:text|mathrm|math(?:bin|rel|ord|op))\s*")
_BOUND_OPERATOR = re.compile(rf"\\math(?:bin|rel|ord)\s*(?P<operator>{_OPERATOR})")
_RATIO = re.compile(r"\$?(\d+)\$?\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*to\s*\}|to)\s*\$?(\d+)\$?\.?")
_BUILDER = re.compile(
    r"(?<![\\A-Za-z\d_^}])\{\s*(?P<name>[a-zA-Z])\s*(?:\||∣|\\mid\b|\\vert\b|:)(?P<condition>(?:[^{}]|\{[^{}]*\})+)\}"
)
_COMPLEMENT = re.compile(r"\s*\\complement\s*(?:_\{?[A-Z]\}?)?\s*(?:[A-Z]|\([^()=]{1,20}\))\s*=")
_CHOOSE = re.compile(
    r"(?:\{\}|(?<![A-Za-z\\}]))(?:(?P<left>\d{1,4})|_\{?(?P<under>\d{1,4})\}?)?"
    r"(?:\\(?:mathrm|text|rm|operatorname)\s*\{(?P<roman>[CPA])\}|(?P<plain>[CPA]))"
    r"\s*(?:_\{?(?P<low>\d{1,4})\}?\s*\^\{?(?P<high>\d{1,4})\}?"
    r"|\^\{?(?P<high2>\d{1,4})\}?\s*_\{?(?P<low2>\d{1,4})\}?|_\{?(?P<right>\d{1,4})\}?)"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LABEL = re.compile(r"\s*[A-Za-z]\s*=")
_NAMES = re.compile(r"[A-Za-z]")
_MICRO = re.compile(
    r"\\mu\s*\\(?:text|mathrm|rm)\s*\{\s*(?P<unit>[A-Za-z]{1,3})\s*\}"
    r"|\\(?:text|mathrm|rm)\s*\{\s*\\mu\s*(?P<inner>[A-Za-z]{1,3})\s*\}"
)
_BRACKETED_UNIT = re.compile(
    r"\(\s*\\(?:text|mathrm|rm)\s*\{(?P<unit>[^{}()]+)\}(?P<power>\^\{?\d\}?)?\s*\)\s*\Z"
)


def usual(text: str) -> str:
    """The answer with unusual spellings replaced."""
    if text.endswith((">", "\\")):
        text = _STRAY_END.sub("", text) or text
    ratio = _RATIO.fullmatch(text) if "to" in text else None
    if ratio is not None:
        return f"{ratio[1]}:{ratio[2]}"  # 3 to 4
    if "{" in text:
        text = _BRACED_OPERATOR.sub(_strip_braces, text)
        text = _BOUND_OPERATOR.sub(r" \g<operator> ", text)
        text = _BUILDER.sub(r"\\{\g<name> | \g<condition>\\}", text)
    if "\\complement" in text:
        text = _COMPLEMENT.sub("A=", text)
    if "\\mu" in text:
        text = _MICRO.sub(lambda m: f"\\text{{ u{m['unit'] or m['inner']}}}", text)
    if "(" in text:
        text = _BRACKETED_UNIT.sub(_with_power, text)
    if "_" in text:
        counted = _CHOOSE.sub(_spell_choice, text)
        if not _NAMES.search(_COMMAND.sub("", _LABEL.sub("", counted))):
            text = counted  # P_1^2 beside other names is a square
    return text


def _with_power(match: re.Match[str]) -> str:
    return f"\\text{{ {match['unit']}{match['power'] or ''}}}"


def _strip_braces(match: re.Match[str]) -> str:
    """` - ` for `{-}` and `\\text{-}`; a script, an argument and `\\mathbb{R}^{+}` are kept."""
    command = match["command"] or ""
    if command and not _DROPPED.fullmatch(command):
        return match[0]
    return f" {match['operator']} "


def _spell_choice(match: re.Match[str]) -> str:
    """`\\binom{10}{3}` for `C_{10}^{3}`, and 10!/7! for `A_{10}^{3}`; other indices are kept."""
    under = match["under"] or match["left"]
    low, high = match["low"] or match["low2"], match["high"] or match["high2"]
    total, part = (under, match["right"]) if under else (low, high)
    if total is None or part is None or int(part) > int(total):
        return match[0]
    if (match["roman"] or match["plain"]) == "C":
        return f"\\binom{{{total}}}{{{part}}}"
    return f"\\frac{{{total}!}}{{{int(total) - int(part)}!}}"
