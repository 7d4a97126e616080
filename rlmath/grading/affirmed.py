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

import re

from rlmath.grading.verbs import COPULAS, is_stating


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WINDOW = 400
_TOKEN = re.compile(
    r"\\[a-z]+|[a-z]+(?:['’][a-z]+)?|\.?\d+(?:[.,:]\d+)*|[\u3040-\u9fff]+|[^\sa-z\d\u3040-\u9fff]"
)
_FORMULA = re.compile(r"\$\$?([^$\n]*)\$\$?|\\\((.*?)\\\)")
_MARKUP = _names('_ ` # ~ [ ] " “ ” ‘ $ € £ ¥ \\ \\left \\right \\quad &')
# Of the whole sentence: somebody's opinion, a falsehood, a guess, a trial, an example.
_DISOWNED = _names(
    """doubt doubts doubtful mistake mistakes mistaken mistakenly erroneous erroneously wrongly
    incorrectly falsely fallacy bogus fake trap decoy distractor naive naively trivial says said
    say claims claimed claim claiming according suggests suggested suggest alleges allegedly
    supposedly hint hints hinted rumor pretend pretends imagine hypothetical hypothetically
    conjecture conjectured example instance eg e.g placeholder dummy nobody tempting tempted
    misread misreading misconception careless prove proves proving"""
)
# Of a sentence that computes nothing, these too: doubt, negation, a question, a step before.
_UNCLEAR = _DISOWNED | _names(
    """guess guesses guessing hunch wrong incorrect false untrue expects expected wants believes
    believe believed think thinks thought feels feel argues argue argued assume assumes assumed
    assuming suppose supposes supposed supposing hypothesis sample test testing tests try tries
    trying tried trial attempt attempts random randomly arbitrary arbitrarily nothing none
    neither nor never cannot no maybe perhaps possibly presumably probably conceivably seemingly
    apparently arguably whether wonder wonders ask asks asked asking tell tells told compute
    computes determine calculate evaluate choose choosing consider considers considering wlog
    generality let preliminary tentative tentatively provisional interim intermediate estimate
    estimates estimated estimation bound bounds bounded ceiling floor threshold candidate
    candidates hope hopes wish wishes user format template unlike despite instead rather unless
    until contrary otherwise alternatively either xor isn't wasn't aren't won't wouldn't don't
    doesn't didn't can't couldn't shouldn't hasn't haven't hadn't weren't nay nope"""
)
# Of the clause of the number.
_NOT_IN_CLAUSE = _names(
    """if might may begin begins began depends depend depending rounds successor predecessor
    reciprocal twice half thrice"""
)
_REFERENCES = _names(
    "step page theorem lemma equation eq example problem exercise section chapter figure table line"
)
# Between the verb and the number: `leaves remainder 12`.
_NOT_BETWEEN = _NOT_IN_CLAUSE | _names(
    """remainder digits digit factor factors multiple multiples opposite double triple plus squared
    cubed square cube times divided multiplied not or but than least most"""
)
_ORDERS = _names(
    """find compute calculate determine evaluate prove show let suppose assume choose pick consider
    try verify guess solve simplify estimate why what who does do did can could should would
    will"""
)
_IMPERATIVES = _ORDERS | _names(
    "take given if when how which is are was were write give express note recall say see check use"
)
_BOUNDARIES = _names(", ; : so thus therefore hence then which giving → ⇒ \\implies \\rightarrow"
                     " \\to \\therefore ∴ that because since and but where")  # fmt: skip
# Before `answer is`: a part or a function of the answer, or somebody's.
_NOT_ANNOUNCING = _names(
    """square squared cube root inverse twice half double triple digit digits sum product bound
    bounds multiple multiples factor factors divisor divisors reciprocal negative opposite times
    minus plus incorrect wrong false neither no not if when until before remainder parity
    logarithm log"""
)
_ANNOUNCED_CJK = re.compile(r"假设|假如|如果|若|假定|倘若|错误|認為|认为|猜|可能|もし|仮に|誤")
_OPENERS = _names(
    """> so thus therefore hence then finally consequently accordingly altogether overall all in
    total only exactly just precisely and the a of now this that means is there are it's that's
    conclusion result , : ∴ \\therefore → ⇒ - – — = we get"""
)
_BETWEEN = _names(
    """minus negative a an the total sum of exactly only precisely just now still also then
    therefore thus hence indeed equal to be him her them us me it you for in after at by with
    into up another additional extra more approximately about around roughly all altogether
    together out on from every each his their its my our your value number same given simply
    clearly finally actually as - – : ( { [ + = \\text \\textbf \\mathbf \\boldsymbol \\mathrm
    \\bf \\displaystyle \\boxed"""
)
_INFINITIVES = _names(
    """need needs needed has have had going able order wants want managed manages expects plans
    required used left enough continue happen happens supposed out get gets got will minutes
    hours days weeks months years"""
)
_LABEL = _names("the final correct answer answers result results solution solutions")
_NAMING = _names(
    "solution function polynomial formula value constant summary shows means gives case line"
)
_DETERMINERS = _names("a an the of in their his her its average")
_STARTS_CLAUSE = _names(", and that but or so thus hence therefore then means meaning")
_CONCLUDES = _names(": ; so thus hence therefore which ∴ \\therefore")
_IS = _names("is are was were be equals equal becomes become comes turns 's gives")
_ANSWERS = _names("answer answers result results")
_BARE = _names(
    """must we seek want wanted looking for obtain the a an our my this that its so thus therefore
    hence final correct right only desired required exact unique numerical numeric is are was be
    indeed then get see conclude have and to problem question in total overall , : i of"""
)
_PREDICATES = _names(
    """indeed choice minimal maximal that works work the a an our my only unique final correct
    right required desired answer answers solution solutions value values result maximum minimum
    largest smallest greatest least possible total number sum of root roots integer in all it
    and , exactly what we want wanted such time age years old positive negative real x n prime"""
)
_AFTER = _names(
    """decoy trap distractor guess placeholder impossible unlikely supposedly allegedly mistaken
    forced unless assuming provided guessing rejected discarded dismissed confuse confuses
    confused perhaps maybe possibly probably fails"""
)
_CLOSERS = _names(
    """this completes complete the solution proof answer i hope it is correct so we are done that
    final thus hence therefore qed as desired required requested wanted and problem solved
    finished to question our result check verified confirmed checks out end which you can see
    let me know if have any questions helps great job good luck s im_end _end_ eot_id endoftext
    user assistant human ! . , \\ □ [ ] ■ ∎ ✓ ✅ $ * # : - ~ ( ) \\square \\blacksquare \\] \\)
    \\boxed } { \\end align equation aligned gathered | < > / _ `"""
)
_RETRACTED = re.compile(
    r"\b(?:wait|hmm+|correction|oops|sorry|scratch that|on second thought|(?:that|this|it)(?:'s| is"
    r"| was) (?:wrong|incorrect|false|not right|not correct)|mistake|made an? error|miscounted|"
    r"miscalculated|retract|disregard|ignore (?:that|this|the)|"
    r"should (?:actually|instead|really) be|"
    r"actually,? (?:it|the|that|this|we|i)\b|no,|alternatively|or maybe|or perhaps|let me "
    r"(?:re|double|try|check)|i was wrong)|不对|错了|更正|等等|抱歉|間違|訂正",
    re.IGNORECASE,
)
_RETRACTIONS = (
    *("ait", "mm", "orrection", "ops", "orry", "cratch", "second thought", "wrong", "ncorrect"),
    *("false", "not ", "rror", "istake", "mis", "etract", "gnore", "isregard", "hould", "ctually"),
    *(
        "o,",
        "lternatively",
        "aybe",
        "erhaps",
        "et me",
        "不对",
        "错了",
        "更正",
        "等等",
        "抱歉",
        "間違",
        "訂正",
    ),
)
_SIGNS = _names(r"+ - * / ^ | · × − – \cdot \times \sqrt \frac \div ÷ x % per ( )")
_UNKNOWN = _names(r"| ^ \sqrt")  # of one name: `|x| =`
_SENTENCE_ENDS = (". ", "! ", "? ", "\n", "。", "！", "？")
_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)[.!?](?=\s+[A-Z\\$\d(~*#<-]|\s*$)|[。！？\n]"
)
_CJK = re.compile(r"[\u3040-\u9fff]")


def is_retracted(text: str, start: int) -> bool:
    """Whether what follows a statement takes it back: `Wait, that is wrong`."""
    rest = text[start : start + 4 * _WINDOW]
    if not any(part in rest for part in _RETRACTIONS):
        return False
    return _RETRACTED.search(rest) is not None


def announces(text: str, start: int) -> bool:
    """Whether the clause before `the answer is` only announces it: not `Bob says the answer is`."""
    low = max(0, start - _WINDOW)
    before = text[low:start]
    cut = max(before.rfind(stop) + len(stop) if stop in before else 0 for stop in _SENTENCE_ENDS)
    clause = before[cut:]
    if _CJK.search(clause[-6:]) or not clause.isascii():
        return _ANNOUNCED_CJK.search(clause[-20:]) is None
    found = _tokens(clause)
    if not _DISOWNED.isdisjoint(found) or found[:1] in (["suppose"], ["if"], ["let"], ["assume"]):
        return "then" in found
    begins = max((i + 1 for i, word in enumerate(found) if word in _BOUNDARIES), default=0)
    return _NOT_ANNOUNCING.isdisjoint(found[begins:])


def affirms(text: str, start: int, end: int, lead: str = "", *, whole: bool = False) -> bool:
    """Whether the sentence around the number or formula at [start, end) states it.

    Args:
        text: the response, or one sentence of it.
        start: where the number, or the formula that it ends, begins.
        end: where it ends.
        lead: words that stand before the text: `the answer is`.
        whole: whether the whole formula is the answer, not its last side.
    """
    equals = max(text.rfind(sign, start, end) for sign in ("=", "≈", "\\approx"))
    computed = 0
    if equals >= 0:
        computed = _equates(_tokens(text[start:equals]))
        if not whole or computed == 2:
            start = equals + 1
    low = max(0, start - _WINDOW)
    begin = low
    for end_sign in _SENTENCE_ENDS:
        place = text.rfind(end_sign, low, start)
        if place >= 0:
            begin = max(begin, place + len(end_sign))
    before = text[begin:start]
    shown = before.lstrip()
    if not lead and shown.startswith(("$$", "\\[", "\\begin", "&")):
        above = _TOKEN.findall(_line_before(text, begin).lower())
        if not (_UNCLEAR | _NOT_IN_CLAUSE).isdisjoint(above):
            return False
    if _CJK.search(before):
        return True  # `hedges` and `sentences` have the rules of these languages
    stop = _END.search(text, end, end + _WINDOW)
    after_end = stop.start() if stop else min(len(text), end + _WINDOW)
    if text[end - 1 : end] in (".", "!", "?"):
        after_end = end
    if not lead and not _closes(text, after_end):
        return False
    found, after = _tokens(before), _tokens(text[end:after_end])
    equation = whole and computed == 1
    if lead and begin == 0 and _states([*lead.split(), *found], after, equation):
        return True
    return _states(found, after, equation)


def _tokens(text: str) -> list[str]:
    plain = text.lower().replace("**", " ")
    return [token for token in _TOKEN.findall(plain) if token not in _MARKUP]


def _line_before(text: str, begin: int) -> str:
    """The last line above a displayed formula."""
    above = text[max(0, begin - _WINDOW) : begin].rstrip(" \n$\\[*_#")
    cut = max(above.rfind(stop) + len(stop) if stop in above else 0 for stop in _SENTENCE_ENDS)
    return above[cut:].rstrip(".") + " "


def _closes(text: str, start: int) -> bool:
    """Whether what follows the sentence only ends the text: `This completes the proof.`"""
    rest = text[start : start + _WINDOW].lower()
    for line in rest.split("\n"):
        if line.lstrip()[:1] in ("~", "-") and len(line.split()) < 5:
            continue  # a signature
        if any(token not in _CLOSERS for token in _TOKEN.findall(line)):
            return False
    return True


def _states(found: list[str], after: list[str], equation: bool = False) -> bool:
    if not _DISOWNED.isdisjoint(found) or not _AFTER.isdisjoint(after):
        return False
    while found and found[-1] in ("(", "{", "+", "*"):
        found = found[:-1]
    if found[:3] == ["as", "a", "result"]:
        found = found[3:]
    found = _without_asides(found)
    last = found[-1] if found else ""
    if last == ">" and found[-2:-1] in (["-"], ["="]):
        last = "so"  # an arrow
    computed = _equates(found[:-1], after) if last in ("=", "≈", "\\approx") else 0
    if computed == 2:
        return True
    if not _UNCLEAR.isdisjoint(_after_conclusion(found)):
        return False
    if last in ("=", "≈", "\\approx"):
        return computed > 0
    if found and all(word in _LABEL for word in found):
        return _predicates(after)
    if all(word in _OPENERS for word in found) or last in _STARTS_CLAUSE:
        return (bool(after) or equation or last not in (",", "and", "that", "but", "or")) and (
            _predicates(after)
        )
    if equation and (last == "," or last in _NAMING):
        return _NOT_IN_CLAUSE.isdisjoint(found) and found[0] not in _ORDERS
    if last == ":":
        if len(found) > 24 or found[0] in _IMPERATIVES or found[-2:-1] == [":"]:
            return False
        return (_NOT_IN_CLAUSE | _REFERENCES).isdisjoint(found)
    if found[0] == "if" and "would" in found:
        return False
    return _governs(_clause(found), found)


def _after_conclusion(found: list[str]) -> list[str]:
    """The tokens after the last `so`, `which` or colon before the number."""
    for index in range(len(found) - 2, -1, -1):
        if found[index] in _CONCLUDES:
            return found[index + 1 :]
    return found


def _without_asides(found: list[str]) -> list[str]:
    """The tokens without `(to one significant figure)` directly before the number."""
    if found[-1:] == [")"] and "(" in found:
        opened = len(found) - 1 - found[::-1].index("(")
        if all(word.isalpha() for word in found[opened + 1 : -1]) and len(found) - opened > 4:
            return found[:opened]
    return found


def _clause(found: list[str]) -> list[str]:
    """The tokens after the last boundary that has a verb or `=` after it."""
    stated = False
    for index in range(len(found) - 1, -1, -1):
        if stated and found[index] in _BOUNDARIES:
            return found[index + 1 :]
        stated = stated or found[index] == "=" or is_stating(found[index])
    return found


def _equates(left: list[str], after: list[str] | None = None) -> int:
    """2 if `left =` is a computation, 1 if it is a name or a label, 0 for `x + 3 =` or `2x =`."""
    tail: list[str] = []
    chained = False
    for word in reversed(left):
        if word in ("=", ":", ";", "≈", "\\approx", ","):
            chained = word == "="
            break
        tail.insert(0, word)
    numbers = any(map(_is_number, tail))
    words = [w for w in tail if len(w) > 1 and w[0].isalpha()]
    formula = tail
    for index in range(len(tail) - 1, -1, -1):
        if len(tail[index]) > 1 and tail[index][0].isalpha():
            formula = tail[index + 1 :]
            break
    unit = after[0] if after else ""  # 140 m - 100 m = 40 m
    letters = any(len(w) == 1 and w.isalpha() and w not in ("a", "x", unit) for w in formula)
    signs = not _SIGNS.isdisjoint(tail)
    if numbers and signs and not letters and ("x" not in formula or _is_times(formula)):
        return 2
    if chained and numbers:
        return 1
    if len(formula) > 3 and formula[1] == "(" and formula[-1] == ")" and formula[0][-1].isalpha():
        return 1  # f(50) =
    if words and not formula:
        return int(_NOT_IN_CLAUSE.isdisjoint(words))
    if any(map(_is_number, formula)):
        return int(_SIGNS.isdisjoint(formula))
    return int(_UNKNOWN.isdisjoint(formula))


def _is_number(token: str) -> bool:
    return token[-1].isdigit()


def _is_times(tail: list[str]) -> bool:
    """Whether every x stands between numbers: `10 x 6`."""
    for index, word in enumerate(tail):
        if word == "x" and not (
            index < len(tail) - 1
            and (not index or _is_number(tail[index - 1]) or tail[index - 1] in ")%")
            and (_is_number(tail[index + 1]) or tail[index + 1] == "(")
        ):
            return False
    return True


def _predicates(after: list[str]) -> bool:
    """Whether what follows a number at the start of a sentence states it: `apples are left`."""
    if not after:
        return True
    if after[0] in COPULAS:
        return all(word in _PREDICATES or is_stating(word) for word in after[1:])
    return True


def _governs(clause: list[str], found: list[str]) -> bool:
    """Whether a stating verb leads to the number, over a few known words."""
    if found[-2:] == ["total", "of"]:
        return True
    place = -1
    for index in range(len(clause) - 1, max(-1, len(clause) - 11), -1):
        word, before = clause[index], clause[index - 1] if index else ""
        if word == "up" and before in ("end", "ends", "ended", "ending"):
            place = index
            break
        noun = word in ("total", "number", "cost", "average") and before in _DETERMINERS
        if is_stating(word) and not noun:
            place = index
            break
    if place < 0:
        return False
    subject, between = clause[:place], clause[place + 1 :]
    unknown = sum(word not in _BETWEEN for word in between)
    if unknown > 3 or not (_NOT_IN_CLAUSE.isdisjoint(subject) and _NOT_BETWEEN.isdisjoint(between)):
        return False
    if subject and subject[-1] == "to" and (len(subject) < 2 or subject[-2] not in _INFINITIVES):
        return False
    if not _ANSWERS.isdisjoint(found):
        named = max(index for index, word in enumerate(found) if word in _ANSWERS)
        begins = max((i + 1 for i in range(named) if found[i] in _BOUNDARIES), default=0)
        rest = found[begins : len(found) - len(between) - 1]
        known = all(word in _BARE or word in _ANSWERS for word in rest)
        if clause[place] not in _IS or not known or unknown:
            return False
    first = _IMPERATIVES if len(clause) == len(found) else _ORDERS
    return found[0] not in first
