"""Parts of a long text that come again are read once, and its tokens stay what they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlmath.grading import lexicon
from rlmath.grading.affirmed import _REPEATED, tokens

# What tokens are made of, white space of several kinds, and letters outside ASCII.
PIECES = ["+", "=", "x+x", "=5", "5", "3.14", "1,000", "\\frac", "\\,", "\\", "don't", "it’s", "so"]
PIECES += ["**", "<|", "s!", "é", "和", "\u00a0", "\u3000", "\x1c", "\n", "\t", " ", "-", "x_1"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), min_size=1, max_size=8))
def test_tokens_of_a_repeated_text_are_those_of_the_text(parts: list[str]) -> None:
    text = "".join(parts) + " "
    text *= _REPEATED // len(text) + 4
    plain = text.lower().replace("**", " ")
    found = lexicon.PLAIN_TOKEN.findall(plain)
    assert tokens(text) == [one for one in found if "\\" not in plain or one not in lexicon.MARKUP]
