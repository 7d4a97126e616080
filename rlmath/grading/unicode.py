"""Convert typographic characters to LaTeX."""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣʸ", "0123456789+-()nixy", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙₓ", "0123456789+-()nx", strict=True))
_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒↉"
_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-", "－": "-",
    "×": r"\times ", "✕": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ",
    "•": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "∗": "*", "±": r"\pm ", "∓": r"\mp ",
    "≤": r"\le ", "⩽": r"\le ", "≦": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≧": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "≃": r"\approx ", "≅": r"\cong ", "≡": r"\equiv ",
    "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∉": r"\notin ",
    "∅": r"\emptyset ", "⌀": r"\emptyset ", "∖": r"\setminus ", "⊂": r"\subset ",
    "⊆": r"\subseteq ", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∜": r"\sqrt[4] ",
    "°": r"^{\circ}", "º": r"^{\circ}", "˚": r"^{\circ}", "℃": r"^{\circ}C", "℉": r"^{\circ}F",
    "′": "'", "’": "'", "‘": "'", "″": "''", "“": '"', "”": '"',
    "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "…": r"\ldots ", "⋯": r"\ldots ", "→": r"\to ", "⇒": r"\Rightarrow ",
    "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "∂": r"\partial ", "∠": r"\angle ",
    "∥": r"\| ", "∧": r"\land ", "∨": r"\lor ", "\u00c5": r"\AA ", "\u212b": r"\AA ", "ℓ": r"\ell ",
    "μ": r"\mu ", "µ": r"\mu ", "Ω": r"\Omega ", "ﬁ": "fi", "\u00a0": " ", "\u202f": r"\,",
    "\u2009": r"\,", "\u2007": r"\,", "\u3000": " ", "、": ",", "，": ",", "。": ".",
    "；": ";", "：": ":", "（": "(", "）": ")", "【": "[", "】": "]", "｛": r"\{", "｝": r"\}",
    "％": r"\%", "＄": r"\$", "＝": "=", "＜": "<", "＞": ">", "＋": "+", "｜": "|",
    "和": " and ", "或": " or ", "ⅈ": "i", "ⅇ": "e", "𝑖": "i", "𝑒": "e",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ϵ": "epsilon",
    "ζ": "zeta", "η": "eta", "θ": "theta", "ι": "iota", "κ": "kappa", "λ": "lambda",
    "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "υ": "upsilon",
    "φ": "phi", "ϕ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta",
    "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi",
}  # fmt: skip
_SIGNS.update({sign: f"\\{name} " for sign, name in _GREEK.items()})
_INVISIBLE = dict.fromkeys(
    "\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u200f\u2061\u2062\u2063\u2064", ""
)
_MIXED_VULGAR = re.compile("(\\d)\\s?([" + _VULGAR + "])")
_RAISED = re.compile("[" + re.escape("".join(_SUPERSCRIPTS)) + "]+")
_LOWERED = re.compile("[" + re.escape("".join(_SUBSCRIPTS)) + "]+")
_STACKED = re.compile("([⁰¹²³⁴-⁹]+)[⁄/∕]([₀-₉]+)")
_ROOT = re.compile(r"(√|∛|∜)\s*(\d+(?:\.\d+)?|[A-Za-z])")
_OVERLINED = re.compile("((?:[0-9]\u0305)+)")
_COMBINING_DOT = re.compile("([0-9])\u0307")
_ESCAPES = {"\a": "a", "\b": "b", "\f": "f", "\v": "v", "\t": "t", "\r": "r"}
_CONTROL = frozenset(_ESCAPES)
_EATEN = re.compile("[\a\b\f\v](?=[a-z])|\t(?=ext|imes|heta|an|frac|au)|\r(?=ight|ho|angle|floor)")
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z]{2,}|[{}%$,;!])")


def _plain(text: str) -> str:
    """Superscripts or subscripts as plain signs."""
    return "".join(_SUPERSCRIPTS.get(c) or _SUBSCRIPTS[c] for c in text)


def _fraction(sign: str) -> str:
    """`\\frac{1}{2}` for `½`."""
    top, bottom = unicodedata.normalize("NFKC", sign).split("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


_SIGNS.update({sign: f"{{{_fraction(sign)}}}" for sign in _VULGAR})
_TABLE = str.maketrans({**_SIGNS, **_INVISIBLE})


def _compatible(character: str) -> str:
    """The plain form of a full-width or styled character. A circled 4 is a label, not a 4."""
    if unicodedata.decomposition(character).startswith("<circle>"):
        return character
    return unicodedata.normalize("NFKC", character)


def unescape(text: str) -> str:
    """Undo damage from string literals: `\\\\frac` for `\\frac`, a form feed for `\\f`.

    Backslash pairs stay where they can end the row of a matrix.
    """
    if not _CONTROL.isdisjoint(text):
        text = _EATEN.sub(lambda m: "\\" + _ESCAPES[m[0]], text)
    if "\\\\" in text and "\\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    return text


def to_latex(text: str) -> str:
    """`text` with typographic characters written in LaTeX or ASCII; ASCII text is unchanged.

    Superscripts and subscripts, vulgar fractions (also in mixed numbers), roots, Greek letters,
    full-width forms, digits of every script, operators, and invisible characters.
    """
    if text.isascii():
        return text
    text = _OVERLINED.sub(lambda m: r"\overline{" + m[1].replace("\u0305", "") + "}", text)
    text = _COMBINING_DOT.sub(r"\\dot{\1}", text)
    text = _MIXED_VULGAR.sub(lambda m: m[1] + _fraction(m[2]), text)
    text = _STACKED.sub(lambda m: f"{{\\frac{{{_plain(m[1])}}}{{{_plain(m[2])}}}}}", text)
    text = _RAISED.sub(lambda m: f"^{{{_plain(m[0])}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{_plain(m[0])}}}", text)
    text = _ROOT.sub(lambda m: m[1] + "{" + m[2] + "}", text)
    text = text.translate(_TABLE)
    if text.isascii():
        return text
    text = "".join(_compatible(c) for c in text).translate(_TABLE)
    if text.isascii():
        return text
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
