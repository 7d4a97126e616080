"""Decide whether two answers are equal, layer by layer, cheapest first.

Verdicts are three-valued: True, False, or None if only SymPy can decide. The fast layers call
`Comparer` without an oracle; a worker passes one that uses SymPy for pairs of expressions. The
structure of an answer (tuples, sets, intervals, equations) is therefore judged by the same code.
"""

from __future__ import annotations

import re

from rlmath.grading import units
from rlmath.grading.answer import Answer, read
from rlmath.grading.language_tables import ENGLISH
from rlmath.grading.list_comparer import MAX_ITEMS
from rlmath.grading.listing import assignments, every, hoist_units, is_listing, unwrap
from rlmath.grading.matrices import fold_matrices
from rlmath.grading.options import CHOICES, names_another
from rlmath.grading.quantity_comparer import QuantityComparer
from rlmath.grading.scalars import SCALARS, Verdict, has_remainder, with_constant_of
from rlmath.grading.syntax import Node, is_numeric, words
from rlmath.grading.wording import absence

_TEXT_SEPARATOR = re.compile(r"[,;&]|\band\b|\n")
_YES_OR_NO = ("yes", "no")
_NOT = words("not no never cannot impossible false wrong t")
_UNSURE = ENGLISH.words["unsure"]
_NO_WORD = re.compile(r"\\(?:text|mathrm|textbf|mbox)|[{}()$.!?:\"']")
_WORDS = re.compile(r"[A-Za-z\d ,.;:'’()%$/-]+")  # in the text of an option


class Comparer(QuantityComparer):
    """Compares answers under one set of settings."""

    def same(self, answer: Answer, gold: Answer, task: str = "math") -> Verdict:
        """Whether `answer` is equal to the accepted answer `gold`."""
        self.last_layer = "exact"
        if answer.text == gold.text:
            return True
        self.last_layer = "normalized"
        if answer.key == gold.key:
            return True
        option = self.option(answer, gold, task)
        if option is not None:
            self.last_layer = "choice"
            return option
        if task == "text" or answer.node[0] == "text" or gold.node[0] == "text":
            self.last_layer = "text"
            return self.text(answer, gold)
        if answer.prose and answer.words == gold.words:
            self.last_layer = "text"
            return True
        if gold.boxes > 1 and gold.node[0] == "tup" and answer.node[0] == "list":
            self.last_layer = "structure"
            return self.in_order(answer.node, gold.node)
        if "empty" in (answer.node[0], gold.node[0]) and "rel" in (answer.node[0], gold.node[0]):
            self.last_layer = "structure"  # x in the empty set
            return all(absence("", "", node) for node in (answer.node, gold.node))
        if self.breaks(answer.node):
            self.last_layer = "structure"
            return False
        if answer.parameters or gold.parameters:
            self.last_layer = "family"
            return self.families(
                answer.node, gold.node, dict(answer.parameters), dict(gold.parameters)
            )
        self.last_layer = "numeric"
        if has_remainder(answer.node) != has_remainder(gold.node):
            return False  # 9 mod 10 is a class, and 3x mod 7 is not 3x
        return self.nodes(with_constant_of(answer.node, gold.node), gold.node)

    def breaks(self, node: Node) -> bool:
        """Whether an item of a list, or a named value, is a false chain: `x = 9 = 1, 2`."""
        for item in node[1][:MAX_ITEMS] if node[0] == "list" else (node,):
            if item[0] == "rel" and len(item[2]) > 2 and set(item[1]) == {"="}:
                value = item[2][-1]
                plain = value[1] if value[0] == "unit" else value
                numbers = filter(is_numeric, item[2][1:-1])
                if any(self.roughly(side, plain) is False for side in numbers):
                    return True
        return False

    def in_order(self, listing: Node, joined: Node) -> Verdict:
        """`3, 7` against `x is 3 and y is 7` from two boxes of a gold, item by item."""
        if listing[2] == "or" or len(listing[1]) != len(joined[3]):
            return False
        named = assignments(listing)
        if named is not None and len({name for name, _ in named}) == len(named):
            return self.labeled_tuple(listing, joined)  # y = 3, x = 7
        return self.each(listing[1], joined[3])

    def option(self, answer: Answer, gold: Answer, task: str) -> Verdict:
        """Multiple choice: by letter if both have one, else by the text of the option."""
        if task == "multiple_choice" and gold.letter and len(answer.text) == 1:
            return answer.text.upper() == gold.letter
        if gold.options or answer.options:
            return self.several(answer, gold, task)
        if answer.letter and gold.letter:
            same = answer.letter == gold.letter
            if same and answer.rest and gold.rest:
                return self.same(read(answer.rest), read(gold.rest))
            if same and answer.rest:
                another = names_another(answer.rest, gold.letter)
                return False if another else self.option_texts(answer.rest, "")
            if gold.rest or task == "multiple_choice":
                return same
            return False if answer.rest else same or None
        if gold.letter and gold.rest:
            return self.same(answer, read(gold.rest))
        if answer.letter and answer.rest:
            return self.same(read(answer.rest), gold)
        made = _is_made_of(answer.node, choice=task == "multiple_choice")
        return False if gold.plain_letter and answer.node != gold.node and made else None

    def several(self, answer: Answer, gold: Answer, task: str) -> Verdict:
        """Several options: all of them, in any order. None if one side is not a choice."""
        if answer.options and gold.options:
            if [letter for letter, _ in answer.options] != [letter for letter, _ in gold.options]:
                return False
            pairs = zip(answer.options, gold.options, strict=True)
            return every(self.option_texts(x, y) for (_, x), (_, y) in pairs)
        if answer.options:
            return False if gold.letter or task == "multiple_choice" else None
        if task == "multiple_choice" and answer.text == "".join(x for x, _ in gold.options):
            return True  # AC
        return False if answer.letter or task == "multiple_choice" else None

    def option_texts(self, answer: str, gold: str) -> Verdict:
        """Whether the texts after a letter are equal; an empty text matches."""
        if answer and gold:
            return self.same(read(answer), read(gold))
        added = read(answer)
        return (
            not answer
            or added.node[0] != "text"
            or (added.prose and bool(_WORDS.fullmatch(answer)))
        )

    def text(self, answer: Answer, gold: Answer) -> bool:
        if not answer.words or not gold.words:
            return False
        if _strip_braces(answer.words) == _strip_braces(gold.words):
            return True
        if gold.words in _YES_OR_NO and answer.prose:
            return answer.words.startswith(gold.words) and _explains(answer.text, gold.words)
        if answer.prose and gold.prose and _text_items(answer.text) == _text_items(gold.text):
            return True
        absent = absence(answer.text, answer.words, answer.node)
        return bool(absent) and absent == absence(gold.text, gold.words, gold.node)

    def nodes(self, answer: Node, gold: Node) -> Verdict:
        """Whether the two trees are equal answers."""
        if answer == gold:
            return True
        a, g = hoist_units(fold_matrices(unwrap(answer))), hoist_units(fold_matrices(unwrap(gold)))
        if a[0] in ("n", "d", "/", "neg", "rep") and g[0] in ("n", "d", "/", "neg", "rep"):
            return self.scalars(a, g)
        self.last_layer = "structure"
        listed = is_listing(a) or is_listing(g)
        several = listed or not {"tup", "setop"}.isdisjoint((a[0], g[0]))
        if (a[0] == "rel") != (g[0] == "rel") and not several:
            return self.relations(a, g)
        if a[0] in ("unit", "pct") or g[0] in ("unit", "pct"):
            return self.with_units(a, g)
        if listed:
            return self.listings(a, g)
        if a[0] == "rel" or g[0] == "rel":
            return self.relations(a, g)
        kinds = {a[0], g[0]}
        if kinds & {"tup", "setop"} or any(
            str(n[1]).startswith("domain_") for n in (a, g) if n[0] == "s"
        ):
            return self.tuples(a, g)
        by_kind = {
            "set": self.sets, "matrix": self.matrices, "pieces": self.pieces_of,
            "ratio": self.special, "clock": self.special, "base": self.special,
            "setb": self.same_real_set,
        }  # fmt: skip
        for kind, compare in by_kind.items():
            if kind in kinds:
                return compare(a, g)
        return self.scalars(a, g) if kinds.isdisjoint(("empty", "blank", "text")) else False


def _is_made_of(node: Node, *, choice: bool) -> bool:
    """Whether a formula is not an option letter: `1A`, `A = B`, and in a choice `x = B`."""
    if node[0] == "rel":
        name = str(node[2][0][1]) if node[2][0][0] == "s" else ""
        return choice or name in CHOICES
    return node[0] in SCALARS or node[0] in ("unit", "pct")


def _explains(text: str, stated: str) -> bool:
    """Whether a sentence follows the yes or no without retracting it."""
    head, comma, rest = _NO_WORD.sub(" ", text).lower().partition(",")
    found = set(rest.split())
    denied = stated == "yes" and not found.isdisjoint(_NOT)
    return bool(comma) and head.split() == [stated] and not denied and found.isdisjoint(_UNSURE)


def _text_items(text: str) -> list[str]:
    """Sorted names in a list of words such as `Alice and Bob`, in the singular."""
    parts = _TEXT_SEPARATOR.split(text.lower())
    return sorted(
        " ".join(units.singular(word) for word in _NO_WORD.sub(" ", part).split()) for part in parts
    )


def _strip_braces(words: str) -> str:
    """`ABC` for `{ ABC }`, which remains of `\\boldsymbol{ABC}`."""
    inner = words[2:-2]
    whole = words.startswith("{ ") and words.endswith(" }") and not {"{", "}"} & set(inner)
    return inner if whole else words
