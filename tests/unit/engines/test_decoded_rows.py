"""Tokens that come as arrays are those that come one by one: order, versions, ends of turns."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from rlmath.engines.decoded_rows import DecodedRows
from rlmath.engines.requests import Request
from rlmath.engines.running_request import RunningRequest
from rlmath.engines.turn_end import TurnEnd
from rlmath.model.tiny_tokenizer import build_tokenizer


class Letters:
    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(chr, token_ids))


LETTERS = Letters()


def running(names, stop):
    """Every other one ends its turn at a text."""
    return {
        name: RunningRequest.of(
            Request(name, 0, (1,), 99, 1.0, 1.0, 0, stop=stop if number % 2 else ()), LETTERS
        )
        for number, name in enumerate(names)
    }


def outcome(one):
    return one.token_ids.tolist(), one.log_probs.tolist(), one.spans


@pytest.mark.parametrize("rounds", [1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_arrays_give_each_sequence_what_single_tokens_give(seed, rounds):
    draw, stop = random.Random(seed), (("a", "b"),)
    ours, theirs = (running("pqrstu", stop) for _ in range(2))
    rows, ended, version = DecodedRows(), {"ours": [], "theirs": []}, 1
    for step in range(60):
        version += draw.random() < 0.1
        # Some sequences come separately, as after a preemption; some are aborted.
        ids = [name for name in ours if draw.random() < 0.95]
        if draw.random() < 0.05 and ids:
            gone = ids.pop()
            del ours[gone], theirs[gone]
        tokens = np.array(
            [[ord(draw.choice("abcdefgh")) for _ in range(rounds)] for _ in ids], np.int32
        ).reshape(len(ids), rounds)
        log_probs = -tokens.astype(np.float32) / 7
        rows.add(SimpleNamespace(ids=ids, tokens=tokens, log_probs=log_probs), version, ours)
        now = rows.ended_turns()
        for name in set(ours) - set(ids):
            rows.flush()
            for one in (ours[name], theirs[name]):
                one.begin(version)
                one.token_ids.append(step)
                one.log_probs.append(0.5)
        for name, its, values in zip(ids, tokens, log_probs, strict=True):
            one = theirs[name]
            one.begin(version)
            one.token_ids.extend(its.tolist())
            one.log_probs.extend(values.tolist())
            if one.ends_turn(its.tolist()):
                ended["theirs"].append((name, theirs.pop(name)))
        ended["ours"] += [(name, ours.pop(name)) for name in now]
    rows.flush()
    sides = ((ended["ours"], ours), (ended["theirs"], theirs))
    found, wanted = ([(name, *outcome(one)) for name, one in (*e, *r.items())] for e, r in sides)
    assert found == wanted and ended["ours"]


def test_cleared_rows_reach_no_request():
    rows, held = DecodedRows(), running("pq", ())
    step = SimpleNamespace(ids=["p", "q"], tokens=np.ones((2, 1), np.int32), log_probs=np.ones(2))
    rows.add(step, 1, held)
    rows.clear()
    rows.flush()
    assert not any(one.token_ids or one.spans for one in held.values())


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
