"""Whether the sentence around a number states it: a subject, a verb and the value, all understood.

No list of hedges is complete. So a number that stands in a sentence without a box counts only if
the sentence has one of a few affirmative forms; what this small grammar does not understand states
nothing:

- a computed chain (`3 * 4 = 12`), a name and its value (`x = 12`), or a label (`Result: 12`);
- a subject, a verb of `verbs` and the value: `she will need to buy a total of 12 apples`;
- the value and a verb: `so 12 apples are left`.

A subject may have any words but those that say that the statement is somebody's, or is of a trial,
an example, an earlier step or a part of the answer. What follows the sentence may only close the
text. A few hundred characters are read, however long the text is.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable

from rlmath.grading import lexicon
from rlmath.grading.verbs import COPULAS, is_order, is_stating
from rlmath.grading.wording import changes_value

_REPORTED = frozenset(
    [
        *(("answer", "key"), ("show", "that"), ("keep", "getting"), ("appears", "that")),
        *(("appears", "to"), ("looks", "like"), ("looks", "as"), ("lies", "that")),
    ]
)
_EQUALS = ("=", "≈", "\\approx")
_OPENING = frozenset("({}+*")
_REPEATED = 240  # characters, from which on words of a text are counted before they are read
_LONG_SIDE = 400
_NO_SIGNS = frozenset("0123456789\\(")
_TWO_LETTERS = re.compile("[A-Za-z]'?[A-Za-z]")
_LAST_SIGN = operator.itemgetter(-1)
_MARKS = lexicon.MARKUP.__contains__
_IN_TEXT = frozenset(("\\text", "\\mathrm", "{", "}")).__contains__


def affirms(text: str, start: int, end: int, lead: str = "", *, whole: bool = False) -> bool:
    """Whether the sentence around the number or formula at [start, end) states it.

    Args:
        text: the response, or one sentence of it.
        start: where the number, or the formula that it ends, begins.
        end: where it ends.
        lead: words that stand before the text: `the answer is`.
        whole: whether the whole formula is the answer, not its last side.
    """
    equals = -1
    for sign in _EQUALS:
        place = text.rfind(sign, start, end)
        equals = place if place > equals else equals
    computed = 0
    if equals >= 0:
        computed = _equated(text, start, equals) if whole else 0
        if not whole or computed == 2:
            start = equals + 1
    low = max(0, start - lexicon.WINDOW)
    begin = low
    for end_sign in lexicon.ASCII_ENDS if text.isascii() else lexicon.SENTENCE_ENDS:
        place = text.rfind(end_sign, low, start)
        if place >= 0 and place + len(end_sign) > begin:
            begin = place + len(end_sign)
    before = text[begin:start]
    if not lead and _hangs_on(text, begin):
        return False
    if lexicon.is_unending(text, begin):
        return False  # I doubt that \\]. So it is 5.
    shown = before.lstrip()
    if not lead and shown.startswith(("$$", "\\[", "\\begin", "&")):
        above = _line_before(text, begin).lower()
        if not lexicon.UNFINISHED.isdisjoint(lexicon.TOKEN.findall(above)):
            return False
    if lexicon.CJK_WORDS.search(before[-12:]) or lexicon.CJK.match(text, end):
        return _states_cjk(before, text, end)
    if text[end : end + 2].lstrip().startswith("["):
        return False  # 15 [citation needed]
    numbered = text[max(0, begin - 4) : begin].strip(" .").isdigit()
    if begin > 1 and text[begin - 2] in ".!?" and not numbered and not before.strip(" *$"):
        return False  # I give up. 15.
    stop = lexicon.END.search(text, end, end + lexicon.WINDOW)
    after_end = stop.start() if stop else min(len(text), end + lexicon.WINDOW)
    if text[end - 1 : end] in (".", "!", "?"):
        after_end = end
    if not lead and not closes(text, after_end):
        return False
    found, after = tokens(before), tokens(text[end:after_end])
    equation = whole and computed == 1
    led = lead and begin == 0
    if led and _states([*lead.split(), *found], after, equation):
        return True
    if led and found and found[-1] in ("by", "be"):
        return False  # the answer is increased by 24
    return _states(found, after, equation)


def _states_cjk(before: str, text: str, end: int) -> bool:
    """Chinese and Japanese; `hedges` and `sentences` have more of their rules."""
    if lexicon.UNSURE_CJK.search(before):
        return False
    clause = re.split("[,，、]", before)[-1]
    if lexicon.DOUBTED_CJK.search(clause) or lexicon.CJK_VAGUE.match(text, end):
        return False
    clause = re.split("[,，、。！？\n]", text[end : end + 40])[0]
    if lexicon.CONDITIONAL_CJK.search(clause):
        return False  # 12 個あれば足りる
    return lexicon.CJK.match(text, end) is None or lexicon.CJK_AFTER.match(text, end) is not None


def orders(text: str) -> bool:
    """Whether a text begins with an order: `put n = 5`, `find the value`."""
    found = tokens(text[:40])
    return bool(found) and (found[0] in lexicon.ORDERS or is_order(found[0]))


def tokens(text: str) -> list[str]:
    """The words, numbers and signs of a text in lower case, without markup."""
    plain = text.lower().replace("**", " ")
    found = _repeated(plain) if len(plain) > _REPEATED else lexicon.PLAIN_TOKEN.findall(plain)
    return list(itertools.filterfalse(_MARKS, found)) if "\\" in plain else found


def _repeated(text: str) -> list[str]:
    """The tokens of a long text: a part between white space, `+` and `=` is read once.

    No token has white space in it, and these two signs are tokens wherever they stand.
    """
    parts = text.replace("+", " + ").replace("=", " = ").split()
    different = set(parts)
    if 3 * len(different) > len(parts):
        return lexicon.PLAIN_TOKEN.findall(text)
    table = {part: lexicon.PLAIN_TOKEN.findall(part) for part in different}
    return list(itertools.chain.from_iterable(map(table.__getitem__, parts)))


def _equated(text: str, start: int, end: int) -> int:
    """`_equates` of the formula [start, end), of which it reads the part from the last `=` on."""
    side = text[max(start, text.rfind("=", start, end)) : end]
    computed = lexicon.COMPUTATION.fullmatch(side) is not None
    if computed and any(sign in side for sign in "+-/^"):
        return 2
    if len(side) > _LONG_SIDE and side.isascii():
        signs = set(side.lower())
        plain = signs.isdisjoint(_NO_SIGNS) and lexicon.PARTED.isdisjoint(signs)
        if plain and not _TWO_LETTERS.search(side):  # each sign is a token, and none is a number
            return int(lexicon.UNKNOWN.isdisjoint(signs))
    return _equates(tokens(side))


def _hangs_on(text: str, begin: int) -> bool:
    """Whether the line directly above is an unfinished `suppose` or `I doubt that`.

    A title, and what a blank line ends, is finished: `Find how many are left`.
    """
    above = text[max(0, begin - lexicon.WINDOW) : begin]
    if not above.endswith("\n"):
        return False
    above = above[above.rfind("\n", 0, -1) + 1 :].strip()
    if not above or above[-1] in ".!?:。：？！" or above.startswith("#"):
        return False
    formula = above.endswith(("$", "\\]", "\\)"))
    if not formula:
        lowered = above.lower()
        if not any(word in lowered for word in lexicon.HANGING):
            return False
    found = tokens(above)
    if not found:
        return False
    if "doubt" in found[:3]:
        return True
    if found[-1] in ("that", "if"):
        return len(found) == 1 or not lexicon.UNCLEAR.isdisjoint(found)
    if formula and not lexicon.DISOWNED.isdisjoint(found):
        return True
    return found[0] in lexicon.TRIALS and not above.startswith(("- ", "* ", "• ", "**"))


def _line_before(text: str, begin: int) -> str:
    """The last line above a displayed formula."""
    above = text[max(0, begin - lexicon.WINDOW) : begin].rstrip(" \n$\\[*_#")
    cut = max(
        above.rfind(stop) + len(stop) if stop in above else 0 for stop in lexicon.SENTENCE_ENDS
    )
    return above[cut:].rstrip(".") + " "


def closes(text: str, start: int) -> bool:
    """Whether what follows the sentence only ends the text: `This completes the proof.`"""
    rest = text[start : start + lexicon.WINDOW]
    signs = lexicon.CLOSING_SIGNS.match(rest)
    passed = signs.end() if signs else 0
    if passed == len(rest):
        return True
    rest = rest.lower()
    signed = "-" in rest or "~" in rest
    if not signed:
        first = lexicon.TOKEN.match(rest, passed)
        if first is not None and first[0] == ".":
            first = lexicon.TOKEN.search(rest, first.end())
        if first is not None and first[0] not in lexicon.CLOSERS:
            return False
    if lexicon.CLOSERS.issuperset(lexicon.TOKEN.findall(" ".join(set(rest.split())))):
        return True
    if not signed:
        return False
    for line in rest.split("\n"):
        if line.lstrip()[:1] in ("~", "-") and len(line.split()) < 5:
            continue  # a signature
        if not lexicon.CLOSERS.issuperset(lexicon.TOKEN.findall(line)):
            return False
    return True


def _states(found: list[str], after: list[str], equation: bool = False) -> bool:
    words = set(found)  # a window of signs has few different ones
    if not lexicon.DISOWNED.isdisjoint(words):
        return False
    size = len(found)
    found = _simplified(found)
    if len(found) < size:
        words = set(found)
    last = found[-1] if found else ""
    if last == ">" and found[-2:-1] in (["-"], ["="]):
        last = "so" if len(found) != 3 or is_number(found[0]) else ">"  # x -> 5 is a limit
    computed = _equates(found[:-1], after) if last in ("=", "≈", "\\approx") else 0
    following = set(after)
    if not (lexicon.AFTER_COMPUTED if computed == 2 else lexicon.AFTER).isdisjoint(following):
        return False
    if not (
        lexicon.BEING.isdisjoint(following) or lexicon.PARTITIVES.isdisjoint(following)
    ) and any(v in lexicon.BEING and w in lexicon.PARTITIVES for v, w in itertools.pairwise(after)):
        return False  # n = 36 is one of the solutions, 36 cows were expected
    if computed == 2:
        return True
    if "that" in words and _is_denied_that(found):
        return False
    if last == "," and len(found) > 1 and is_number(found[-2]):
        return False  # one of 10, 11, 12
    if found and found[0] in ("suppose", "assume", "imagine", "pretend") and "then" not in found:
        return False
    concluded, said = found, words
    if not lexicon.CONCLUDES.isdisjoint(words):
        concluded = _after_conclusion(found)
        said = set(concluded)
    if not lexicon.UNCLEAR.isdisjoint(said):
        return False
    if not lexicon.SOURCED.isdisjoint(said) and _is_sourced(concluded, bool(after)):
        return False
    if found and found[0] == "if" and "were" in words:
        return False  # if the remainder were 4, then n =
    if last in ("=", "≈", "\\approx"):
        return computed > 0 and _names_a_value(found[:-1], words)
    if found and found[0] in ("of", "out", "among") and "," not in words:
        return False
    if found and lexicon.LABEL.issuperset(found):
        return _predicates(after)
    if lexicon.OPENERS.issuperset(found) or last in lexicon.STARTS_CLAUSE:
        return (bool(after) or equation or last not in (",", "and", "that", "but", "or")) and (
            _predicates(after)
        )
    if equation and (last == "," or last in lexicon.NAMING):
        return lexicon.NOT_IN_CLAUSE.isdisjoint(words) and found[0] not in lexicon.ORDERS
    if last == ":":
        if "i" in found and lexicon.FOUND.isdisjoint(found):
            return False  # I give up:
        if after and after[0] in COPULAS and not _predicates(after):
            return False  # : 24 is just a label
        if len(found) > 24 or found[0] in lexicon.IMPERATIVES or found[-2:-1] == [":"]:
            return False
        if any(w == "of" and v in lexicon.PARTS for v, w in itertools.pairwise(found)):
            return False  # one of the following:
        return lexicon.NO_LABEL.isdisjoint(found)
    if found[0] == "had" or (found[0] == "if" and "would" in found):
        return False
    return _governs(_clause(found, words), found, after)


def _simplified(found: list[str]) -> list[str]:
    """The tokens without brackets, asides and phrases that leave the statement as it is."""
    size = len(found)
    while size and found[size - 1] in _OPENING:
        size -= 1
    found = found[:size]
    if found[:3] == ["as", "a", "result"]:
        found = found[3:]
    found = _without_asides(found)
    return [*found[:-2], "gives"] if found[-2:] == ["results", "in"] else found


def _is_sourced(found: list[str], unit: bool) -> bool:
    """Whether a source, or a qualified value, is stated: `the key has`, `the old value is`.

    Args:
        found: the words before the number.
        unit: whether words follow it: `the goal is 5 books` states a number, `the goal is 5` not.
    """
    for index, word in enumerate(found):
        if word not in lexicon.SOURCED:
            continue
        after = found[index + 1] if index + 1 < len(found) else ""
        if word in lexicon.SOURCES and (
            after in (*lexicon.SOURCE_VERBS, ":")
            or not {"in", "from", "per", "by"}.isdisjoint(found[max(0, index - 2) : index])
        ):
            return True
        if (
            word in lexicon.QUALIFIERS
            and after in lexicon.QUALIFIED
            and found[index + 2 : index + 3] != ["of"]
        ):
            return True
        if word in ("estimated", "expected") and after in lexicon.RESULTS:
            return True
        if word in lexicon.LIMITS and after in ("is", "was", "are", "were", ":") and not unit:
            return True
        if (word, after) in _REPORTED:
            return True
    return False


def _is_denied_that(found: list[str]) -> bool:
    """Whether what stands after `that` is denied: `it is not the case that`.

    Not after `it is not hard to see that`.
    """
    if not lexicon.EASY.isdisjoint(found):
        return False
    before = found[: len(found) - 1 - found[::-1].index("that")]
    return any(word in lexicon.DENYING or word.endswith("n't") for word in before)


def _after_conclusion(found: list[str]) -> list[str]:
    """The tokens after the last `so`, `which` or colon before the number."""
    for index in range(len(found) - 2, -1, -1):
        if found[index] in lexicon.CONCLUDES:
            return found[index + 1 :]
    return found


def _names_a_value(left: list[str], words: set[str]) -> bool:
    """Whether only known words, or nouns after an article, stand before the name: not `put n`.

    `words` has all of `left`, and no more of `BOUNDARIES` or words.
    """
    begins = 0 if lexicon.BOUNDARIES.isdisjoint(words) else _clause_begin(left)
    size = max(begins, _end_of_words(left, words))
    clause = left[begins:size]
    ordered = not begins and bool(clause) and is_order(clause[0])
    if left[-2:-1] and left[-2] in lexicon.CONDITIONAL:
        return False  # only when n =
    if left[-2:-1] == ["case"] and left[-3:-2] in (["the"], ["a"], ["special"], ["each"]):
        return False  # the case n = 36
    if ordered or (clause and (clause[0] in lexicon.ORDERS or left[0] in ("had", "were"))):
        return False
    if len(clause) == len(left) - begins or (clause and is_stating(clause[-1])):
        return True  # a label in words, or `the length is x =`
    for index, word in enumerate(clause):
        if len(word) == 1 or not word[0].isalpha():
            continue
        known = (
            word in lexicon.BARE
            or word in lexicon.OPENERS
            or word in COPULAS
            or word in lexicon.NAMING
        )
        noun = index > 0 and clause[index - 1] in lexicon.ARTICLES
        if not (known or noun):
            return False
    return True


def _without_asides(found: list[str]) -> list[str]:
    """The tokens without `(to one significant figure)` directly before the number."""
    if found[-1:] == [")"] and "(" in found:
        opened = len(found) - 1 - found[::-1].index("(")
        if all(word.isalpha() for word in found[opened + 1 : -1]) and len(found) - opened > 4:
            return found[:opened]
    return found


def _clause_begin(found: list[str]) -> int:
    """The index after the last boundary, 0 without one."""
    if lexicon.BOUNDARIES.isdisjoint(found):
        return 0
    index = len(found)
    while found[index - 1] not in lexicon.BOUNDARIES:
        index -= 1
    return index


def _clause(found: list[str], words: set[str]) -> list[str]:
    """The tokens after the last boundary that has a verb or `=` after it."""
    if lexicon.BOUNDARIES.isdisjoint(words):
        return found
    if "=" not in words and not any(word == "up" or is_stating(word) for word in found[-10:]):
        return found
    stated = False
    for index in range(len(found) - 1, -1, -1):
        if stated and found[index] in lexicon.BOUNDARIES:
            return found[index + 1 :]
        stated = stated or found[index] == "=" or is_stating(found[index])
    return found


def _equates(left: list[str], after: list[str] | None = None) -> int:
    """2 if `left =` is a computation, 1 if it is a name or a label, 0 for `x + 3 =` or `2x =`."""
    begin, chained = 0, False
    kinds = set(left)
    if not lexicon.PARTED.isdisjoint(kinds):
        begin = len(left)
        while left[begin - 1] not in lexicon.PARTED:
            begin -= 1
        chained = left[begin - 1] == "="
        kinds = set(left[begin:])
    tail = left[begin:] if begin else left
    start = _end_of_words(tail, kinds)
    formula = tail[start:] if start else tail
    in_formula = set(formula) if start else kinds
    numbers = _has_number(kinds)
    if numbers and not lexicon.SIGNS.isdisjoint(kinds):
        known = ("a", "x", after[0] if after else "")  # 140 m - 100 m = 40 m
        letters = any(len(w) == 1 and w.isalpha() and w not in known for w in in_formula)
        if not letters and ("x" not in in_formula or _is_times(formula)):
            return 2
    if chained and numbers:
        return 1
    if len(formula) > 3 and formula[1] == "(" and formula[-1] == ")" and formula[0][-1].isalpha():
        return 1  # f(50) =
    if start and not formula:
        return int(lexicon.NOT_IN_CLAUSE.isdisjoint(tail))
    if _has_number(in_formula):
        return int(lexicon.SIGNS.isdisjoint(in_formula) and not is_number(formula[0]))
    return int(lexicon.UNKNOWN.isdisjoint(in_formula))


def _end_of_words(found: list[str], kinds: set[str]) -> int:
    """The index after the last word of more than one letter, 0 without one.

    Args:
        found: tokens.
        kinds: the different ones.
    """
    if not any(word[0].isalpha() for word in [word for word in kinds if len(word) > 1]):
        return 0
    size = len(found)
    while size and (len(found[size - 1]) == 1 or not found[size - 1][0].isalpha()):
        size -= 1
    return size


def _has_number(found: Iterable[str]) -> bool:
    """Whether one of these tokens is a number."""
    return any(map(str.isdigit, map(_LAST_SIGN, found)))


def is_number(token: str) -> bool:
    return token[-1].isdigit()


def _is_times(tail: list[str]) -> bool:
    """Whether every x stands between numbers: `10 x 6`."""
    for index, word in enumerate(tail):
        if word == "x" and not (
            index < len(tail) - 1
            and (not index or is_number(tail[index - 1]) or tail[index - 1] in ")%")
            and (is_number(tail[index + 1]) or tail[index + 1] == "(")
        ):
            return False
    return True


def _predicates(after: list[str]) -> bool:
    """Whether what follows a number at the start of a sentence states it: `apples are left`."""
    after = list(itertools.filterfalse(_IN_TEXT, after))
    if not after:
        return True
    if after[:1] == ["as"]:
        return all(word in lexicon.PREDICATES for word in after[1:])  # 36 as the result
    if not lexicon.POSSIBLE.isdisjoint(after) and "only" not in after:
        return False  # 17 is a candidate
    if not lexicon.SHORT_OF.isdisjoint(after):
        return False  # 36 cows would be enough
    if after[0] in COPULAS:
        return all(word in lexicon.PREDICATES or is_stating(word) for word in after[1:])
    if after[0] in lexicon.MODALS or after[0] == "(" or after[0][0].isdigit():
        return False
    compared = after[0] == "more" and after[1:2] in ([], ["than"])
    if compared or (after[0] != "more" and changes_value(after[0])):
        return False
    objects = len(after) > 1 and (
        after[1] in lexicon.OBJECTS or (len(after[1]) == 1 and after[1].isalpha())
    )
    return not (after[0].endswith("s") and objects)  # 15 divides x, 15 violates the rule


def _is_phrase(verb: str, between: list[str], after: list[str]) -> bool:
    """Whether unknown words may stand there: `a profit of`, `took Ivanka`, `sold the car for`."""
    if between[-1] == "of" or verb in lexicon.GIVING:
        return True
    if verb in ("has", "have", "had", "at") or "at" in between:
        return between[-1] in lexicon.ATTRIBUTES
    timed = bool(after) and after[0].rstrip("s") in lexicon.TIMES
    if timed and (between[-1] in ("in", "after") or after[1:2] == ["ago"]):
        return True
    return verb not in lexicon.IS and between[-1] in lexicon.TOWARDS


def _is_subject(subject: list[str]) -> bool:
    """Whether a formula before `is` may be what is asked for: not the `2x` of `so 2x is`."""
    start = _end_of_words(subject, set(subject))
    if start and subject[start - 1] == "of":
        return True
    formula = subject[start:]
    variable = any(len(word) == 1 and word.isalpha() and word != "a" for word in set(formula))
    return not variable or _equates(subject) > 0


def _is_on_the_way(subject: list[str], verb: str) -> bool:
    """Whether a verb tells what was done, or was not: `by adding`, `should have had`, `I tried`."""
    last = subject[-1] if subject else ""
    if verb.endswith("ing") and last in lexicon.MEANS:
        return True
    if last in ("have", "'ve") and not lexicon.UNREAL_PAST.isdisjoint(subject[-4:-1]):
        return True
    return last == "i" and verb not in lexicon.FOUND


def _governs(clause: list[str], found: list[str], after: list[str]) -> bool:
    """Whether a stating verb leads to the number, over a few known words."""
    if found[-1] == "of" and found[-2:-1] in (["total"], ["answer"], ["value"]):
        return True
    place = -1
    for index in range(len(clause) - 1, max(-1, len(clause) - 11), -1):
        word, before = clause[index], clause[index - 1] if index else ""
        if word == "up" and before in ("end", "ends", "ended", "ending"):
            place = index
            break
        noun = word not in COPULAS and before in (
            lexicon.DETERMINERS
            if word in ("total", "number", "cost", "average")
            else lexicon.POSSESSIVES
        )
        if is_stating(word) and not noun:
            place = index
            break
    if place < 0:
        return False
    subject, between = clause[:place], clause[place + 1 :]
    if _is_on_the_way(subject, clause[place]):
        return False
    unknown = sum(word not in lexicon.BETWEEN for word in between)
    if unknown and not _is_phrase(clause[place], between, after):
        return False
    if unknown > 3 or not (
        lexicon.NOT_IN_CLAUSE.isdisjoint(subject) and lexicon.NOT_BETWEEN.isdisjoint(between)
    ):
        return False
    if any(w == "of" and v in lexicon.PARTS for v, w in itertools.pairwise(between)):
        return False
    if clause[place] in lexicon.IS and not _is_subject(subject):
        return False
    if clause[place] in ("be", "been") and not lexicon.UNREAL.isdisjoint(subject[-4:]):
        return False  # it could be, it should have been, it used to be
    if not lexicon.OPERATORS.isdisjoint(subject) and any(
        w in lexicon.OPERATORS and not is_number(v) for v, w in itertools.pairwise(subject)
    ):
        return False  # x plus one is
    if (
        subject
        and subject[-1] == "to"
        and (len(subject) < 2 or subject[-2] not in lexicon.INFINITIVES)
    ):
        return False
    if not lexicon.ANSWERS.isdisjoint(found):
        named = max(index for index, word in enumerate(found) if word in lexicon.ANSWERS)
        begins = _clause_begin(found[:named])
        if not lexicon.EARLIER.isdisjoint(after):
            return False
        if subject[-2:] == ["required", "to"]:
            return False
        rest = found[begins : len(found) - len(between) - 1]
        known = all(word in lexicon.BARE or word in lexicon.ANSWERS for word in rest)
        if (
            clause[place] not in lexicon.IS
            or not known
            or unknown
            or not lexicon.AWAY.isdisjoint(between)
        ):
            return False
    if not place and len(clause) == len(found) and is_order(clause[0], nouns=True):
        return False
    first = lexicon.IMPERATIVES if len(clause) == len(found) else lexicon.ORDERS
    return found[0] not in first
