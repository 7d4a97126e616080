"""Extract the final answer of a response: the last box, or without one as `fallback` allows.

Every search starts at the end, so its cost does not depend on the text before the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlmath.grading import beside_box, box_rows, last_number, marker, struck
from rlmath.grading.box import box_content, last_boxes, last_command, last_spans
from rlmath.grading.settings import Fallback
from rlmath.grading.words_in_other_languages import is_untabled

Source = Literal["box", "tag", "marker", "number", "whole", "words", "none"]


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer text and its source.

    `text` is None if nothing was found. A box that is empty or never closed gives the empty string
    with source `box`: the response did answer, and wrongly. `untabled`: the text beside the box is
    in a language without a table, so it was not judged.
    """

    text: str | None
    source: Source
    untabled: bool = False


NOTHING = Extraction(None, "none")
_TAIL_CHARS = 8_000  # searched for an answer without a box
_BESIDE_CHARS = 100
_MAX_WHOLE_CHARS = 400  # of a response that is only an answer
_MAX_WHOLE_WORDS = 6


def after_thinking(response: str) -> str | None:
    """The text after the last `</think>`; None if a `<think>` is open at the end."""
    if "<" not in response or "hink>" not in response:  # which is faster in a flood of `<`
        return response
    end = response.rfind("</think>")
    tail = response if end < 0 else response[end + len("</think>") :]
    return None if "<think>" in tail else tail


def extract(
    response: str,
    fallback: Fallback,
    *,
    task: str = "math",
    boxes: int = 1,
    ordered: bool = False,
    items: int = 1,
    is_answer: Callable[[str], bool] = lambda text: False,
) -> Extraction:
    """Extract the final answer.

    Only the text after the last `</think>` counts. The last box decides; without one, `fallback`
    selects what else is searched (see `GradingSettings.fallback`).

    Args:
        response: the whole completion.
        fallback: `none`, `marker` or `number`.
        task: `multiple_choice` looks for the last option letter instead of the last number.
        boxes: number of boxes that the accepted answer is joined from; as many are joined here.
        ordered: whether they are joined to a tuple.
        items: number of values that an accepted answer in one box lists; as many boxes in a row are
            combined.
        is_answer: whether a short text is a complete answer rather than prose; a response that is
            only an answer is used as a whole before its last number is searched.
    """
    text = after_thinking(response)
    if text is None:
        return NOTHING
    if "\b" in text:  # a string literal ate the backslash of \\boxed
        text = text.replace("\boxed", "\\boxed")
    if "~" in text and "~~" in text:  # one sign is found much faster than two
        unstruck = struck.without_struck_boxes(text)
        if unstruck is None:
            return Extraction("", "box")
        text = unstruck
    final = last_command(text, len(text))
    if final is not None:
        value = _boxed_value(text, final, boxes, ordered, items)
        beside = text[max(0, final[0] - _BESIDE_CHARS) : final[1] + _BESIDE_CHARS]
        return Extraction(value, "box", not beside.isascii() and is_untabled(beside))
    if fallback == "none":
        return NOTHING
    return _extract_unboxed(text[-_TAIL_CHARS:], fallback, task, is_answer)


def _extract_unboxed(
    text: str, fallback: Fallback, task: str, is_answer: Callable[[str], bool]
) -> Extraction:
    tagged = marker.find_tagged(text)
    announced = marker.find_announced(text if tagged is None else tagged)
    if tagged is not None:
        return Extraction(tagged if announced is None else announced, "tag")
    if announced is not None:
        if fallback == "number" and task == "math" and not is_answer(announced):
            announced = last_number.last_number(announced) or announced
        return Extraction(announced, "marker")
    if fallback == "marker":
        return NOTHING
    whole = text.strip()
    if 0 < len(whole) <= _MAX_WHOLE_CHARS and "\n" not in whole:
        if is_answer(whole):
            return Extraction(whole, "whole")
        few = len(whole.split()) <= _MAX_WHOLE_WORDS and not any(map(str.isdigit, whole))
        if few and task != "multiple_choice":
            return Extraction(whole, "words")  # a name or a day: an answer if it is the gold
    choice = task == "multiple_choice"
    found = last_number.last_option(text) if choice else last_number.last_number(text)
    return NOTHING if found is None else Extraction(found, "number")


def _boxed_value(text: str, final: tuple[int, int], boxes: int, ordered: bool, items: int) -> str:
    """Value of the last box, or of the last boxes combined; "" if the text beside denies it.

    `final` is the span of the last box's command.
    """
    value, end = box_content(text, final[1])
    if not value and boxes == 1:
        return ""
    taken, count = None, boxes
    if boxes > 1:
        taken = box_rows.join_boxes(last_boxes(text, boxes), boxes, ordered)
    elif items > 1 and last_command(text, final[0]) is not None:
        taken, count = box_rows.list_boxes(last_boxes(text, items + 1), items), items
    elif last_command(text, final[0]) is not None:
        taken, count = box_rows.guesses(last_boxes(text, 2)), 2
    begin = final[0]
    if taken is not None:
        value, begin = taken, last_spans(text, count)[0][0]
    if not beside_box.stands_alone(text, begin, end) or struck.STRUCK.fullmatch(value):
        return ""
    return value + beside_box.other_value(text, end, value)
