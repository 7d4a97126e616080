"""The value that the last sentence of a response states, without a box and without a marker."""

from __future__ import annotations

import itertools
import re

from rlmath.grading import hedges

_DIGIT = re.compile(r"\d")
_STATES = re.compile(
    r"(?:is|are|be|was|were|equals?|has|have|had|gets?|pays?|needs?|makes?|gives?|costs?|total|"
    r"there|left|remains?|obtain|find|answer|paid|spent|earned|owed|saved|received)\b|="
)
_REASON = r"(?:because|since|given that|rather than|instead of|as opposed to|unlike|whereas)\b"
_AMOUNT = re.compile(r"\b(?:is|are|was|were|equals|=) \$\d[\d,.]*\Z")
_GIVES_REASON = re.compile(rf",? (?:{_REASON}|as\b|while\b)", re.IGNORECASE)
# A class of signs comes first, so that `re` skips all others quickly.
_CLAUSE = re.compile(
    rf"[, ](?:(?<=,) (?:{_REASON}"
    r"|(?:as|where|which|when|with|attained|achieved|occurring|reached|but not|and not|not)\b)"
    rf"|(?<= )(?:{_REASON}|(?:and|but) not\b"
    r"|\((?=[a-z]{2,} [a-z]{2,}"
    r"|(?:not|about|and|or|since|because|as|where|for|with|when|here)\b)))",
    re.IGNORECASE,
)
_CONTRAST = re.compile(
    r"(?<!\btimes),? \b(?:because|since|which|where|so|as|rather than|instead of|"
    r"as opposed to|unlike)\b"
    r"|,? (?:whereas|while) (?=\$?\d)"
    r"|[;,]? (?:and |but )?not (?=[-$\\(\d])|(?<=[^(]) \((?=[^()]*[a-z]{2})",
    re.IGNORECASE,
)
_CLAUSE_WORDS = (
    *(
        "because",
        "since",
        "given",
        "rather",
        "instead",
        "opposed",
        "unlike",
        "whereas",
        " as",
        " not",
    ),
    *("where", "which", "when", "with", "attained", "achieved", "occurring", "reached", " ("),
)
_NEGATING = (
    *("maybe", "perhaps", "twice", "half", "than", "not", "never", "cannot", "neither", "nor"),
    *("except", "excluding", "without", "no longer", "≠", "\\ne", "n't"),
)
_NEGATED = re.compile(
    r"(?:\b(?:maybe|perhaps|twice|half of|(?:less|more|fewer|greater|smaller|larger|bigger) than"
    r"|not|never|cannot|neither|nor|except|excluding|without|no longer)|n't|≠|\\neq?)"
    r"(?: (?:be|equal|equal to|exactly|the|a|get|have|simply|just|really)){0,3} ?[($\\]*$",
    re.IGNORECASE,
)
# A relation states no value, nor does one of two numbers; `->` and `=>` are arrows.
_RELATED = re.compile(
    r"(?:(?<![-=])[<>]|[≤≥±∓¬]|\\(?:le|ge|leq|geq|lt|gt|pm|mp|lnot|neg|log|ln|lg|exp|sqrt|a?r?c?(?:sin|"
    r"cos|tan)|cot|sec|csc)|\bone of ?\}?|\d[^\s,;]{0,20} or) ?[($\\]*$",
    re.IGNORECASE,
)
_RELATED_ENDS = (*"<>≤≥±∓¬}", "one of", "one of ", " or")
_MINUS = re.compile(r"(?:(?P<before>\S+)\s+|^\s*)(?:minus|negative) ?\$?$", re.IGNORECASE)
_SCALED = re.compile(
    r"(?:\$|\\\))?[ -](?:dozens?|hundreds?|thousands?|millions?|billions?|trillions?|lakhs?|crores?"
    # 5 squared units are 5 of them.
    r"|factorial|(?:squared|cubed)"
    r"(?! (?:units?|f(?:ee|oo)t|inch|yard|mile|[a-z]*met(?:er|re)|[ckm]?m\b)))\b",
    re.IGNORECASE,
)
_RELATES = re.compile(r"\$? ?(?:<(?![|/])|>(?=\s*[\w\\])|[≠≤≥]|\\(?:ne|neq|le|ge|leq|geq|lt|gt)\b)")
_NEGATED_CJK = re.compile(
    r"(?:不是|不等于|不为|不会是|不可能是|不选|没有?|無|无|非|小于|大于|少于|多于|超过|不到|除了?|或|か)\s*$"
)
_DENIED_CJK = re.compile(
    r"\s*(?:では?な|でな|ではあ|じゃ|は(?:間違|誤|違|不)|の(?:倍数|約数|2乗|二乗|平方|立方|逆数|階乗)|分之|分の|的(?:倍数|约数|因数|平方|立方|两倍|一半|倒数|阶乘)|是(?:错|不)|以外|を超|以上|以下|未満|より|不对|是错|倍|或|か\d)"
)
_SENTENCE = re.compile(r"[.!?](?=\s)|[。！？\n]")
_SENTENCE_STOPS = (". ", "! ", "? ", "\n", ".\t", "。", "！", "？")
_ASCII_STOPS = _SENTENCE_STOPS[:5]
_STYLE = re.compile(r"\\(?:textbf|textit|text|mathbf|mathrm)\s*")
_CONCLUSION = re.compile(
    r"[,;:]? (?:and )?(?:so|hence|thus|therefore|thereby)\b|;|(?<!option)(?<!choice)(?<!answer):",
    re.IGNORECASE,
)
_LETTER = r"\(?(?P<letter>[A-J])\)?"
_RIGHT = r"(?:is correct|is right|is true|holds)"
_ENDING = rf"(?:\s*(?:{_RIGHT}|is the (?:correct|right) \w+|is it|works))?\s*[.!]?\s*"
# Before it: `which corresponds to option C`, but not `the majority voted for option D`.
_KNOWN = (
    r"(?:.*\b(?:is|be|match(?:es)?|(?:corresponds?|leads?(?: us)?|equal) to|gives?|have|get|thus|so"
    r"|therefore|hence|means?|choose|select|pick|with|only|answer|,|:)\s+|[\s,]*)"
    r"(?:(?:the|correct|right|best|final|answer|this|our|my) )*"
)
_CHOOSERS = "we|i|you|one|so|thus|therefore|hence|and|must|should|will"
_CHOOSER = re.compile(rf"\b(?:{_CHOOSERS})\Z")
_OPTION = tuple(
    re.compile(form + r"\Z", re.IGNORECASE)
    for form in (
        rf"{_KNOWN}(?:option|choice)s?(?: is)?:?\s+{_LETTER}{_ENDING}",
        rf".*\banswer(?: is)?:?\s+(?:option |choice )?{_LETTER}{_ENDING}",
        # `Students often choose C` states nothing.
        rf"(?:.*\b(?:{_CHOOSERS})\s+|\s*)"
        rf"(?:choose|select|pick)\s+(?:option |choice |answer )?{_LETTER}\s*[.!]?\s*",
        r"(?:so|thus|therefore|hence)?[\s,]*(?:option |choice |answer )?"
        rf"{_LETTER}\s*"
        rf"(?:{_RIGHT}|is the (?:correct|right|best) (?:answer|option|choice|one))\s*[.!]?\s*",
    )
)
_CHOSEN = _OPTION[2]
_OPTION_CJK = re.compile(
    r"(?:故选|应选|选择|答案选|选|正解は|答えは|正确(?:的)?(?:选项|答案)(?:是|为|应为)?|选项(?:是|为))"
    r"\s*[:：]?\s*\(?([A-J])\)?"
)
# One of them is in what each form matches. Neither s nor i: without regard to case, `ſ` is an s.
_OPTION_PARTS = (
    ("opt", "cho"),
    ("wer",),
    ("cho", "elect", "ck"),
    ("orrect", "ght", "true", "hold", "best"),
)
_CJK_OPTION_PARTS = ("选", "正解は", "答えは", "正确")
_ANY_OPTION_PART = (*{part for parts in _OPTION_PARTS for part in parts}, *_CJK_OPTION_PARTS)
_DENIAL = re.compile(
    r"\b(?:not|no|never|cannot|neither|nor|either|or|but|ruled?|rules|except|wrong|incorrect|false|maybe|perhaps|"
    r"possibly|might|could|may|eliminat\w+|exclud\w+|reject\w*|rule|unlike|unlikely|doubtful|guess|unless|if|but|than|fail(?:s|ed)?|"
    r"contradict\w*|violat\w*|invalid|impossible|discard\w*|dismiss\w*|trap|distractor"
    r"|decoy|is out|students?|people|friend|teacher|everyone|some would|popular|most common"
    r"|commonly|often|usually|typically|tempting|(?<!I )say|says|said|claims?|claimed|thinks?"
    r"|thought|believes?|insists?|argues?|first (?:choice|option|answer|guess)|initially|at first"
    r")\b|n't|不|非|错|ではな|じゃな|或|以外|\?|？",
    re.IGNORECASE,
)
# Not the word `I`. A class of signs comes first, so that `re` skips all others quickly.
_ANY_LETTER = re.compile(r"([A-J])(?<![A-Za-z'].)(?![A-Za-z'])(?<!I(?=\s+[a-z]))")
_MAX_SENTENCE = 600


def last_sentence(text: str, end: int) -> tuple[int, int]:
    """(start, end) of the sentence around position `end`, within a few hundred characters."""
    after = _SENTENCE.search(text, end, end + _MAX_SENTENCE)
    stop = after.start() if after else min(len(text), end + _MAX_SENTENCE)
    return _sentence_start(text, end), stop


def _sentence_start(text: str, end: int) -> int:
    low = end - _MAX_SENTENCE if end > _MAX_SENTENCE else 0
    for stop in _ASCII_STOPS if text.isascii() else _SENTENCE_STOPS:
        place = text.rfind(stop, low, end)  # of the rest only: the window gets shorter
        if place >= 0:
            low = place + 1
    return low


def without_reasons(text: str, end: int) -> int:
    """Where the statement before position `end` stops: reasons and contrasts are left out.

    `48, as 47 is odd` stops after 48. `end` itself if the sentence states nothing before them.
    """
    for _ in range(3):
        start = _sentence_start(text, end)
        lowered = text[start:end].lower()
        if not any(part in lowered for part in ("e", "o", "s", "h", " (")):
            return end  # one of them is in each of these words
        for word in _CLAUSE_WORDS:
            if word in lowered:
                break
        else:
            return end
        stated = _first_value(lowered)
        if stated < 0:
            return end
        for match in _CLAUSE.finditer(text, start + stated, end):
            if not _is_in_formula(text, start, match.start(), end):
                end = match.start()
                break
        else:
            return end
    return end


def _is_in_formula(text: str, start: int, place: int, end: int) -> bool:
    """Whether a `$` that opens a formula stands before `place`: not that of `$45, whereas`."""
    if text.count("$", start, place) % 2 == 0:
        return False
    if _GIVES_REASON.match(text, place) is None and (
        text[place : place + 7] != ", which" or _AMOUNT.search(text, start, place) is None
    ):
        return True  # 15% of $80, which is $12
    closer = text.find("$", place, end)
    return closer < 0 or not (text[closer - 1] == " " and text[closer + 1 : closer + 2].isdigit())


def _first_value(lowered: str) -> int:
    """Where the first number ends that a verb or `=` states within its sentence, or -1."""
    passed = -1
    for match in _STATES.finditer(lowered):
        first = match.start()
        inside = first > 0 and match[0] != "=" and (lowered[first - 1].isalnum())
        if first < passed or inside:
            continue
        stop = lowered.find(".", match.end())
        digit = _DIGIT.search(lowered, match.end(), stop if stop >= 0 else len(lowered))
        if digit is not None:
            return digit.end()
        if stop < 0:
            return -1
        passed = stop
    return -1


def without_contrast(line: str, *, option: bool = False) -> str:
    """What a sentence states before its reason or contrast: `47` of `47 rather than 48`."""
    if " " not in line:
        return line
    value = _ANY_LETTER if option else _DIGIT
    for match in _CONTRAST.finditer(line):
        stops = match.start()
        if value.search(line, 0, stops) and not _is_in_formula(line, 0, stops, len(line)):
            return line[:stops]
    return line


def is_denied(text: str, start: int, end: int) -> bool:
    """Whether the number at [start, end) is negated, an aside in brackets, or one of several."""
    before = text[max(0, start - 40) : start]
    lowered = before.lower()
    negating = False
    for word in _NEGATING:  # faster than `any` with a generator
        negating = negating or word in lowered
    if (negating and _NEGATED.search(before)) or _NEGATED_CJK.search(before.rstrip("$ ")):
        return True
    if _DENIED_CJK.match(text, end):
        return True
    opened = text.rfind("(", max(0, start - 120), start)
    if opened >= 0 and text.find(")", opened, start) < 0 and text[opened - 1 : opened] == " ":
        return len(re.findall(r"[A-Za-z]{2,}", text[opened:start])) >= 2
    return False


def changed(text: str, start: int, end: int) -> str | None:
    """What the number at [start, end) stands for with the words beside it that change it.

    `minus 5` is -5, but nothing in `7 minus 5`; `5 million` is graded as these words. None if they
    leave the number as it is, and the empty string if they state no value.
    """
    before = text[max(0, start - 40) : start]
    lowered = before.lower()
    # What `_RELATED` may end in, before the brackets that may follow it.
    bare = lowered.removesuffix("\n").rstrip("($\\").removesuffix(" ")
    command = bare[-1:].isalpha() and "\\" in bare
    related = (command or bare.endswith(_RELATED_ENDS)) and _RELATED.search(before)
    if related or _RELATES.match(text, end):
        return ""
    number = text[start:end].strip(" \t\r\n.,;:!?*_$")
    signed = lowered.rstrip(" $").endswith(("minus", "negative"))
    minus = _MINUS.search(before) if signed else None
    if hedges.is_negative_cjk(text, start):
        return f"-{number}"
    if minus is not None:
        return "" if _DIGIT.search(minus["before"] or "") else f"-{number}"
    scale = scale_after(text, end)
    return number + scale if scale and not number.endswith("{") else None


def scale_after(text: str, end: int) -> str:
    """The word that scales the number or formula that ends at `end`: ` million`; else empty."""
    found = _SCALED.match(text, end)
    return "" if found is None else found.group().lstrip("$\\)")


def last_letter(text: str) -> str | None:
    """The last option letter; None if its sentence denies it, doubts it or names another one."""
    tail = text.rstrip()[-_MAX_SENTENCE:]
    letters = list(_ANY_LETTER.finditer(tail))
    if not letters:
        letters = list(_ANY_LETTER.finditer(text))[-1:]
        return letters[0].group(1) if letters else None
    place = letters[-1].start()
    start, end = last_sentence(tail.rstrip(".!。"), place)
    end += 1  # with its question mark
    sentence = tail[start:end]
    if len(set(_ANY_LETTER.findall(sentence))) > 1 or _DENIAL.search(sentence):
        return None
    return letters[-1].group(1)


def _without_markup(sentence: str) -> str:
    if "\\text" in sentence or "\\math" in sentence:
        sentence = _STYLE.sub("", sentence)
    for sign in "*`_$\\{}":
        sentence = sentence.replace(sign, "")
    return sentence


def _may_state_option(sentence: str) -> bool:
    """Whether a form of `_OPTION` may match: it needs one of a few words."""
    lowered = sentence.lower()
    return any(part in lowered for part in _ANY_OPTION_PART)


def _is_chosen(before: str) -> bool:
    """Whether `_CHOSEN` may match a letter after these words: `we choose`, `so pick option`."""
    words = before.rstrip(" (").split()[-3:]
    if words and words[-1] in ("option", "choice", "answer"):
        words.pop()
    if not words or words.pop() not in ("choose", "select", "pick"):
        return False
    return not words or _CHOOSER.search(words[-1]) is not None


def stated_option(text: str) -> str | None:
    """The letter of `So option **B** holds.`; "" if letters are named and none is stated."""
    tail = text.rstrip()[-_MAX_SENTENCE:]
    if _ANY_LETTER.search(tail) is None:
        return None
    ends = [m.end() for m in _SENTENCE.finditer(tail.rstrip(".!。"))]
    sentence = _without_markup(tail[ends[-1] :] if ends else tail)
    if not _may_state_option(sentence):
        return None
    clause = _CONCLUSION.split(sentence)[-1]
    letters = list(itertools.islice(_ANY_LETTER.finditer(clause), 2))
    if len(letters) != 1:
        return None
    lowered = clause.lower()
    cjk = _OPTION_CJK.search(clause)
    found = cjk.group(1) if cjk else None
    for form, parts in zip(_OPTION, _OPTION_PARTS, strict=True):
        tried = any(part in lowered for part in parts)
        if form is _CHOSEN and tried:  # slow in a flood of `select`
            tried = _is_chosen(lowered[: letters[0].start()])
        match = form.match(clause) if tried else None
        if match is not None and match["letter"].isupper():
            found = match["letter"]
    if found is None:
        return None
    return "" if _DENIAL.search(clause) else found
