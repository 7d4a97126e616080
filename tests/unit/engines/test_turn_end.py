import pytest

from rlmath.engines.turn_end import TurnEnd
from rlmath.model.tiny_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(1000)
PYTHON = (("```python", "\n```"),)


class Words:
    """A tokenizer of given pieces, which may hold several characters or parts of one."""

    def __init__(self, *pieces):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]

    def decode(self, token_ids, skip_special_tokens):
        assert not skip_special_tokens
        return b"".join(self.pieces[i] for i in token_ids).decode(errors="replace")


def place(text, stop=PYTHON, begun=0):
    ids = TOKENIZER.encode(text)
    end = TurnEnd(TOKENIZER, stop, ids[:begun])
    for count, token in enumerate(ids[begun:], start=begun + 1):
        if end.add([token]) is not None:
            return count
    return None


@pytest.mark.parametrize("begun", [0, 5, 14, 20])
def test_a_block_ends_the_turn_at_its_closing_fence_and_not_before(begun):
    text = "so ```python\nprint('``')\n```\nmore ```python\n1\n```"
    assert place(text, begun=begun) == text.index("\n```\nmore") + 4


@pytest.mark.parametrize(
    "text", ["```\nx\n```", "```latex\nx\n```\n", "\n```python", "```python\nx\n``", "é``` `é"]
)
def test_fences_of_other_languages_do_not_end_the_turn(text):
    assert place(text) is None


def test_the_earliest_of_several_texts_counts_and_an_opening_may_be_empty():
    assert place("abc", (("", "c"), ("", "b"))) == 2
    assert place("bab", (("a", "b"),)) == 3
    assert place("x\N{EURO SIGN}y", (("", "\N{EURO SIGN}"),)) == 4


def test_tokens_of_several_characters_or_of_parts_of_one():
    words = Words("```", "python", "\n", "x\n``", "`\n\n", b"\xe2\x82", b"\xac", "b")
    end = TurnEnd(words, PYTHON)
    assert end.add([0, 1, 2, 3, 4, 7]) == 5
    assert TurnEnd(words, (("", "\N{EURO SIGN}"),)).add([7, 5, 6, 7]) == 3
