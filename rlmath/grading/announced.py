"""What stands around `the answer is 5`: a clause that only announces it, and nothing after it that
takes it back."""

from __future__ import annotations

from rlmath.grading import lexicon
from rlmath.grading.affirmed import affirms, closes, is_number, tokens
from rlmath.grading.last_number import last_match
from rlmath.grading.verbs import is_order


def is_retracted(text: str, start: int) -> bool:
    """Whether what follows a statement takes it back: `Wait, that is wrong`.

    Args:
        text: begins with the value that is stated.
        start: where the statement ends.
    """
    rest = text[start : start + 4 * lexicon.WINDOW]
    another = lexicon.NEXT_TASK.search(rest)
    paragraphs = rest[: another.start() if another else len(rest)].split("\n\n")
    first = paragraphs[0]
    if not _goes_on(first.lstrip(" .!*_$\\)]}\"'"), text[:start]):
        return True
    if _is_replaced(rest[: another.start() if another else len(rest)], text[:start]):
        return True
    later = (paragraph.lstrip()[: lexicon.OPENING] for paragraph in paragraphs[1:])
    looked_at = [first, *filter(None, later)]
    return any(
        any(part in one for part in lexicon.RETRACTIONS)
        and lexicon.RETRACTED.search(one) is not None
        for one in looked_at
    )


def _is_replaced(rest: str, stated: str) -> bool:
    """Whether a label or the last conclusion after a number states another one."""
    numbers = _numbers(stated)
    if not numbers or not lexicon.FIGURE.search(rest):
        return False
    relabeled = lexicon.RELABELED.search(rest)
    if relabeled is not None and relabeled[1].strip(".,") not in numbers:
        return True
    if any(bare[1].strip(".,") not in numbers for bare in lexicon.BARE_LINE.finditer(rest)):
        return True
    figure = last_match(lexicon.FIGURE, rest)
    last = last_match(lexicon.END, rest[: figure.start()]) if figure else None
    begins = (last, last_match(lexicon.CONCLUDING, rest), lexicon.UNEXPLAINED.match(rest))
    return any(_states_another(rest, found.end(), numbers) for found in begins if found is not None)


def _states_another(rest: str, start: int, numbers: set[str]) -> bool:
    """Whether the sentence at `start` states a number that is not one of these."""
    end = lexicon.END.search(rest, start)
    sentence = rest[: end.end() if end else len(rest)]
    first = lexicon.FIGURE.search(sentence, start)
    reason = lexicon.CIRCUMSTANCE.search(sentence, first.end()) if first else None
    stated = sentence[: reason.start()] if reason else sentence
    found = last_match(lexicon.FIGURE, stated, start)
    if found is None or found[0].strip(".,") in numbers:
        return False
    return affirms(sentence, found.start(), found.start() + len(found[0].rstrip(".,")))


def _numbers(text: str) -> set[str]:
    return {number.strip(".,") for number in lexicon.FIGURE.findall(text)}


def _goes_on(rest: str, stated: str) -> bool:
    """Whether a text after a statement closes it or explains it: not `Not.` or `I made that up`."""
    following = lexicon.END.split(rest, maxsplit=1)[0] if rest else ""
    numbers = _numbers(stated)
    for restated in lexicon.RESTATED.finditer(rest):
        if restated[1].strip(".,") not in numbers:
            return False
    found = tokens(following)
    if found and any(number not in numbers for number in _numbers(following)):
        last = set(found[-6:])
        if found[0] in lexicon.ALSO or "second" in found or not lexicon.ALSO.isdisjoint(last):
            return False  # 30 works too
    if not found or not found[0][0].isalpha() or not following.isascii():
        return True
    if found[0] not in lexicon.EXPLAINING and not closes(rest, 0) and not _is_settled(found):
        return False
    if found[0] in lexicon.EXPLAINING or closes(rest, 0):
        return lexicon.DISMISSED.isdisjoint(found)
    if all(number.strip(".,") in numbers for number in lexicon.FIGURE.findall(following)):
        denies = not lexicon.DENYING.isdisjoint(found)
        return lexicon.DOUBTING.isdisjoint(found) and not (
            denies and (len(found) < 5 or not lexicon.DENIED.isdisjoint(found))
        )
    return len(found) > 4 and any(map(is_number, found)) and found[0] not in ("recheck", "no")


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
    if lexicon.UNENDING.search(text, max(0, low + cut - lexicon.OPENING), low + cut):
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
