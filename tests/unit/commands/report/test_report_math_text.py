"""Formulas of a text as MathML that can only show mathematics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.commands.report.math_text import ATTRIBUTES, ELEMENTS, is_display, split, to_tree

MARKUP = r"""
$ $$ \[ \] \( \) \boxed{ } { \begin{align} \end{align} x 5 \frac < & ^ _ \\
"""
PIECES = st.sampled_from([*MARKUP.split(), " ", "\n", r"\href{javascript:1}{y}"])


def nodes(tree):
    yield tree
    if isinstance(tree[1], list):
        for child in tree[1]:
            yield from nodes(child)


@given(st.lists(PIECES, max_size=40).map("".join))
def test_pieces_join_to_the_text_and_formulas_are_harmless(text):
    pieces = split(text)
    assert "".join(one if isinstance(one, str) else one[0] for one in pieces) == text
    for piece in pieces:
        tree = None if isinstance(piece, str) else to_tree(piece[1])
        for name, content, *attributes in nodes(tree) if tree else ():
            assert name in ELEMENTS and isinstance(content, str | list)
            assert set(*attributes) <= set(ATTRIBUTES)


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        (r"so $x^2$, \(y\) and \boxed{\frac{1}{2}}.", ["x^2", "y", r"\boxed{\frac{1}{2}}"]),
        (r"\[ a < b \] $$c$$", [" a < b ", "c"]),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", [r"\begin{pmatrix}1\\2\end{pmatrix}"]),
        ("it costs $5 and then $6 more", []),
        (r"\$5 and $ x $", []),
        (r"\boxed{never closed, $x$", ["x"]),
        ("$" + "x" * 403 + "$", []),
    ],
)
def test_delimiters(text, formulas):
    assert [piece[1] for piece in split(text) if not isinstance(piece, str)] == formulas


def test_a_text_of_nothing_but_openings():
    for opening in (r"\[", r"\(", "$$", "$", r"\boxed{", r"\begin{align}", r"\boxed{{{"):
        text = opening * (20_000 // len(opening))
        pieces = split(text)
        assert "".join(one if isinstance(one, str) else one[0] for one in pieces) == text


def test_formulas_are_converted_to_mathml():
    assert [one[0] for one in nodes(to_tree(r"\frac{1}{2}"))] == ["math", "mfrac", "mn", "mn"]
    boxed = [one[0] for one in nodes(to_tree(r"\boxed{\frac{1}{2}}"))]
    assert boxed == ["math", "menclose", "mfrac", "mn", "mn"]
    # References of the library to signs are the signs.
    assert ["mo", "<"] in list(nodes(to_tree("a < b")))
    link = to_tree(r"\href{javascript:alert(1)}{x} \color{red}{y} \class{z}{w}")
    assert link is not None and "javascript" not in str(link) and "red" not in str(link)


@pytest.mark.parametrize("latex", ["x_{1}_{2}", "}{", "^", "{" * 3000, r"\frac" * 100])
def test_text_without_formulas_is_unchanged(latex):
    assert to_tree(latex) is None


def test_commands_cannot_be_defined():
    """Ten of these double the formula ten times."""
    assert to_tree(r"\newcommand{\a}{\b\b}\a") is None
    assert to_tree(r"\def\a{x}\a") is None


def test_display_formulas_are_recognized():
    assert is_display("$$x$$") and is_display(r"\[x\]") and not is_display("$x$")
