"""What stands around `the answer is 5`: a clause that only announces it, and nothing after it that
takes it back."""

from __future__ import annotations

import re

from rlmath.grading import lexicon
from rlmath.grading.affirmed import affirms, closes, is_number, tokens
from rlmath.grading.last_number import last_match
from rlmath.grading.verbs import is_order

_DIGITS = "0123456789"


def is_retracted(text: str, start: int) -> bool:
    """Whether what follows a statement takes it back: `Wait, that is wrong`.

    Args:
        text: begins with the value that is stated.
        start: where the statement ends.
    """
    rest = text[start : start + 4 * lexicon.WINDOW]
    another = lexicon.NEXT_TASK.search(rest)
    rest = rest[: another.start()] if another else rest
    paragraphs = rest.split("\n\n")
    first = paragraphs[0]
    numbers = _numbers(text[:start])
    renamed = _names_another(rest, numbers)
    if not _goes_on(first.lstrip(" .!*_$\\)]}\"'"), numbers, renamed):
        return True
    if renamed and numbers and _is_replaced(rest, numbers):
        return True
    later = (paragraph.lstrip()[: lexicon.OPENING] for paragraph in paragraphs[1:])
    return lexicon.is_retraction("\0".join(dict.fromkeys([first, *later])))


def _is_replaced(rest: str, numbers: set[str]) -> bool:
    """Whether a label or the last conclusion after a number states another one."""
    relabeled = lexicon.RELABELED.search(rest)
    if relabeled is not None and relabeled[1].strip(".,") not in numbers:
        return True
    if any(bare[1].strip(".,") not in numbers for bare in lexicon.BARE_LINE.finditer(rest)):
        return True
    figure = _last_figure(rest)
    last = _last_from_end(lexicon.END, rest[: figure.start()]) if figure else None
    begins = (last, _last_from_end(lexicon.CONCLUDING, rest), lexicon.UNEXPLAINED.match(rest))
    return any(_states_another(rest, found.end(), numbers) for found in begins if found is not None)


def _states_another(rest: str, start: int, numbers: set[str]) -> bool:
    """Whether the sentence at `start` states a number that is not one of these."""
    end = lexicon.END.search(rest, start)
    sentence = rest[: end.end() if end else len(rest)]
    first = lexicon.FIGURE.search(sentence, start)
    reason = lexicon.CIRCUMSTANCE.search(sentence, first.end()) if first else None
    stated = sentence[: reason.start()] if reason else sentence
    found = _last_figure(stated, start)
    if found is None or found[0].strip(".,") in numbers:
        return False
    return affirms(sentence, found.start(), found.start() + len(found[0].rstrip(".,")))


def _numbers(text: str) -> set[str]:
    return {number.strip(".,") for number in set(lexicon.FIGURE.findall(text))}


def _names_another(text: str, numbers: set[str]) -> bool:
    """Whether a text may have a number that is not in a set, also in a fraction or a range."""
    return "/" in text or ".." in text or not numbers.issuperset(_numbers(text))


def _last_figure(text: str, start: int = 0) -> re.Match[str] | None:
    """The last match of `FIGURE`."""
    if not text.isascii():
        return last_match(lexicon.FIGURE, text, start)
    last = max(map(text.rfind, _DIGITS))
    begin = len(text[: last + 1].rstrip(_DIGITS + ".,"))
    return lexicon.FIGURE.search(text, max(start, begin))


def _last_from_end(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of a pattern whose matches do not depend on those before them."""
    low, size = len(text), 160
    while low > 0:
        low, size = max(0, low - size), 4 * size
        found = last_match(pattern, text, low)
        if found is not None:
            return found
    return None


def _goes_on(rest: str, numbers: set[str], renamed: bool) -> bool:
    """Whether a text after a statement closes it or explains it: not `Not.` or `I made that up`.

    Args:
        rest: the paragraph after the statement.
        numbers: those of the statement.
        renamed: False if the paragraph has no other number.
    """
    following = lexicon.END.split(rest, maxsplit=1)[0] if rest else ""
    if renamed and _is_restated(rest, numbers):
        return False
    found = tokens(following)
    renamed = renamed and not numbers.issuperset(_numbers(following))
    if found and renamed:
        last = set(found[-6:])
        if found[0] in lexicon.ALSO or "second" in found or not lexicon.ALSO.isdisjoint(last):
            return False  # 30 works too
    if not found or not found[0][0].isalpha() or not following.isascii():
        return True
    if found[0] not in lexicon.EXPLAINING and not closes(rest, 0) and not _is_settled(found):
        return False
    if found[0] in lexicon.EXPLAINING or closes(rest, 0):
        return lexicon.DISMISSED.isdisjoint(found)
    if not renamed:
        denies = not lexicon.DENYING.isdisjoint(found)
        return lexicon.DOUBTING.isdisjoint(found) and not (
            denies and (len(found) < 5 or not lexicon.DENIED.isdisjoint(found))
        )
    return len(found) > 4 and any(map(is_number, found)) and found[0] not in ("recheck", "no")


def _is_restated(rest: str, numbers: set[str]) -> bool:
    """Whether a later sentence states another number as the answer was stated: `It is 6.`"""
    others = [
        found.start()
        for found in lexicon.ENDING_NUMBER.finditer(rest)
        if found[1].strip(".,") not in numbers and _may_restate(rest[: found.start()][-80:])
    ]
    if not others:
        return False
    low = max(0, others[0] - lexicon.WINDOW)
    return any(
        restated[1].strip(".,") not in numbers for restated in lexicon.RESTATED.finditer(rest, low)
    )


def _may_restate(before: str) -> bool:
    """Whether `RESTATED` may match a number behind these words, by their last one."""
    if not before.isascii():
        return True
    last = before.rstrip()[-9:]
    return not last or last.lower().rstrip(",:").endswith(lexicon.RESTATING_ENDS)


def _is_settled(found: list[str]) -> bool:
    """Whether a sentence after the answer leaves it: not `I might be wrong` or `Cancel that`."""
    if not lexicon.UNSETTLED.isdisjoint(found) and "you" not in found:
        return False
    if found[0] == "i" and lexicon.SETTLED.isdisjoint(found):
        return False
    if is_order(found[0], nouns=True) or found[0] in ("cancel", "change", "ignore", "erase"):
        return False
    return len(found) != 2 or found[0] != found[1]


def announces(text: str, start: int) -> bool:
    """Whether the clause before `the answer is` only announces it: not `Bob says the answer is`."""
    low = max(0, start - lexicon.WINDOW)
    before = text[low:start]
    cut = max(
        before.rfind(stop) + len(stop) if stop in before else 0 for stop in lexicon.SENTENCE_ENDS
    )
    clause = before[cut:]
    if lexicon.is_unending(text, low + cut):
        return False
    if lexicon.CJK.search(clause[-6:]) or lexicon.CJK.match(text, start):
        return lexicon.DOUBTED_CJK.search(clause[-20:]) is None
    found = tokens(clause)
    if not lexicon.DISOWNED.isdisjoint(found) or (found and found[0] in lexicon.CONDITIONS):
        return "then" in found
    cuts = lexicon.BOUNDARIES - {"that"}
    begins = max((i + 1 for i, word in enumerate(found) if word in cuts), default=0)
    words = (word for word in found[begins:] if word[0].isalpha())
    return all(word in lexicon.ANNOUNCING for word in words)
