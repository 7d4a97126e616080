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
import re

from rlmath.grading.verbs import COPULAS, is_order, is_stating
from rlmath.grading.wording import changes_value


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
    incorrectly falsely fallacy bogus fake trap decoy distractor naive naively trivial says
    said say claims claimed claim claiming according suggests suggested suggest alleges
    allegedly supposedly hint hints hinted rumor pretend pretends imagine hypothetical
    hypothetically conjecture conjectured example instance eg e.g placeholder dummy nobody
    tempting tempted misread misreading misconception careless prove proves proving"""
)
# Of a sentence that computes nothing, these too: doubt, negation, a question, a step before.
_UNCLEAR = _DISOWNED | _names(
    """unclear uncertain debatable disputed questionable wikipedia
    guess guesses guessing hunch wrong incorrect false untrue
    wants believes believe believed think thinks thought feels feel argues
    argue argued assume assumes assumed assuming suppose supposes supposed supposing
    hypothesis testing try trying tried attempt attempts
    randomly arbitrary arbitrarily nothing none neither nor never cannot no maybe
    perhaps possibly presumably probably conceivably seemingly apparently arguably whether
    wonder wonders ask asks asked asking tell tells told compute computes determine
    calculate evaluate choose choosing consider considers considering wlog generality let
    preliminary tentative tentatively provisional interim intermediate estimate estimates
    estimation bounded hope hopes wish wishes format template unlike despite
    instead rather unless until contrary otherwise alternatively either xor
    isn't wasn't aren't won't wouldn't don't
    doesn't didn't can't couldn't shouldn't hasn't haven't hadn't weren't nay nope"""
)
# A source states nothing (`the key has 5`), nor does a value that is qualified (`a sample answer`);
# as the noun before another verb they are like any other: `the key costs $5`.
_SOURCES = _names("key manual calculator textbook input user test sample")
_SOURCE_VERBS = _names(
    "say says show shows give gives has have read reads state states list lists want"
)
_QUALIFIERS = _SOURCES | _names(
    """old previous target goal random trial candidate threshold floor ceiling upper lower"""
)
_QUALIFIED = _names(
    """value values answer answers result results number output outcome solution solutions total
    guess figure bound bounds one case"""
)
_LIMITS = _names("bound bounds threshold candidate candidates goal target input")
_RESULTS = _names("answer answers result results output solution outcome")
# Of the clause of the number.
_NOT_IN_CLAUSE = _names(
    """if might may begin begins began depends depend depending rounds successor predecessor
    reciprocal twice half thrice"""
)
_REFERENCES = _names(
    "step page theorem lemma equation eq example problem exercise section chapter figure table line"
)
# Of the line above a displayed formula; a task there is none of its doubts: `Evaluate the sum`.
_UNFINISHED = (_UNCLEAR | _NOT_IN_CLAUSE) - _names("compute computes determine calculate evaluate")
_TRIALS = _names("suppose assume imagine pretend")
# Between the verb and the number: `leaves remainder 12`.
_NOT_BETWEEN = (
    _NOT_IN_CLAUSE
    | _REFERENCES
    | _names(
        """remainder digits digit factor factors multiple multiples opposite double triple plus
    squared within ends begins starts cubed square cube times divided multiplied start end not or
    but
    than least most"""
    )
)
_ORDERS = _names(
    """say find compute calculate determine evaluate prove show let suppose assume choose pick
    consider try verify guess solve simplify estimate why what who does do did can could
    should would will"""
)
_IMPERATIVES = _ORDERS | _names(
    "take given if when how which is are was were write give express note recall say see check use"
)
_BOUNDARIES = _names(", ; : so thus therefore hence then which giving → ⇒ \\implies \\rightarrow"
                     " \\to \\therefore ∴ that because since and but where")  # fmt: skip
_DOUBTED_CJK = re.compile(
    r"假设|假如|如果|若|假定|倘若|错误|認為|认为|猜|可能|有人|他说|她说|觉得|估计|据说|听说|もし|仮に|誤"
    r"|と言|と思"
)
_UNSURE_CJK = re.compile(r"不知道|不清楚|不确定|分からない|わからない")
# A counter, a polite ending and the end of the clause.
_CJK_AFTER = re.compile(
    r"[\s$)）*]*(?:[\u3400-\u9fffつり的]{0,10}|[\u30a0-\u30ff]{1,6})(?:です|である|であり|となる|になる"
    r"|になります|となります|だ|が答え|が残る)?[\s$)）*]*(?:[^\w]|\Z|因|而|ので|が|種|是|也)"
)
_CJK_VAGUE = re.compile(
    r"[\s$]*(?:左右|上下|以上|以下|未満|多|余|还是|或|くらい|ぐらい|ほど|程度|吗|么|呢|か|だろ|でしょ)"
)
_OPENERS = _names(
    """> so thus therefore hence then finally consequently accordingly altogether overall all
    in total only exactly just precisely and the a of now this that means is there are it's
    that's conclusion result , : ∴ \\therefore → ⇒ - – — = we get"""
)
_BETWEEN = _names(
    """originally initially already minus negative a an the total sum of exactly only precisely
    just now still also then therefore thus hence indeed equal to be him her them us me it
    you for in after at by with into up another additional extra more approximately about
    around roughly all altogether together out on from every each his their its my our your
    value number same given simply clearly finally actually as - – : ( { [ + = \\text
    \\textbf \\mathbf \\boldsymbol \\mathrm \\bf \\displaystyle \\boxed"""
)
_INFINITIVES = _names(
    """need needs needed has have had going able order wants want managed manages expects plans
    required used left enough continue happen happens supposed out get gets got will minutes
    hours days weeks months years"""
)
_LABEL = _names("the final correct answer answers result results solution solutions")
_NAMING = _names(
    """solution function polynomial formula value constant summary shows means gives case line
    achieved attained"""
)
_ARTICLES = _names("the a an of our its smallest largest least only total unknown original at for")
_DETERMINERS = _names("a an the of in their his her its average")
_STARTS_CLAUSE = _names(", and that but or so thus hence therefore then means meaning")
_CONCLUDES = _names(": ; so thus hence therefore which ∴ \\therefore")
_IS = _names("is are was were be equals equal becomes become comes turns 's gives")
_ANSWERS = _names("answer answers result results")
_AWAY = _names("after at in by with into up out on from for another additional extra more every")
_GIVING = _names("take takes took cost costs give gives gave leave leaves pay pays paid save saves")
_UNREAL = _names("could should would might may used ought")
_OPERATORS = _names("plus minus squared cubed times")
# How a sentence begins that explains the answer before it.
_EXPLAINING = _names(
    """because since this the we as here so thus explanation note to where in there each for it let
    first given step solution which that hence therefore proof by and if with when from
    these all both our their his her they he she using details reason reasoning justification
    hope"""
)
_PARTS = _names("one any some none each either both two all")
_ATTRIBUTES = _names(
    """length width height area volume perimeter period degree order rank slope radius diameter
    mass weight age value size norm magnitude probability point points"""
)
_TIMES = _names("second minute hour day week month year sec min hr")
_TOWARDS = _names("for at in by with after to on")
_BARE = _names(
    """must we seek want wanted looking for obtain the a an our my this that its so thus
    therefore hence final correct right only desired required exact unique numerical numeric
    is are was be indeed then get see conclude have and to problem question in total overall
    , : i of"""
)
_MODALS = _names("would could might may should can must will seems looks does do did")
_OBJECTS = _names("the this that our it an any all")
_PREDICATES = _names(
    """indeed choice minimal maximal that works work the a an our my only unique final correct
    right required desired answer answers solution solutions value values result maximum
    minimum largest smallest greatest least possible total number sum of root roots integer
    in all it and , exactly what we want wanted such time age years old positive negative
    real x n prime"""
)
# Before `answer is`, in its clause; words without letters too.
_ANNOUNCING = (
    _BARE
    | _OPENERS
    | _names(
        """for given part simplified complete actual that deduce find follows it here with as
    required can shown clear obvious evident easy using above which overall original numeric
    simplest closest"""
    )
)
_CONDITIONS = _names("if suppose let assume assuming had were when unless until whether given")
_AFTER = _names(
    """decoy trap distractor guess placeholder impossible unlikely supposedly allegedly
    mistaken forced false untrue if find compute determine example recall typo kidding joking
    unless assuming provided guessing rejected discarded dismissed confuse confuses confused
    perhaps maybe possibly probably fails"""
)
# Of the sentence after the answer: it takes it back without naming another.
_DISMISSED = _names(
    "trap decoy distractor placeholder bogus fake typo kidding joking lie lied lies liar guessing"
    " nonsense"
)
_DOUBTING = _DISMISSED | _DISOWNED | (_AFTER - _names("if find compute determine recall unless"))
_DENYING = _names("not no nope never nor or unsure random")
_DENIED = _names("answer right correct true it that this so sure be really quite")
_CLOSERS = _names(
    """this completes complete the solution proof answer i hope it is correct so we are done
    that final thus hence therefore qed as desired required requested wanted and problem
    solved finished to question our result check verified confirmed checks out end which you
    can see let me know if have any questions helps great job good luck s im_end _end_
    eot_id endoftext user assistant human ! . , \\ □ [ ] ■ ∎ ✓ ✅ $ * # : - ~ ( ) \\square
    \\blacksquare \\] \\) \\boxed } { \\end align equation aligned gathered | < > / _ `"""
)
_RETRACTED = re.compile(
    r"\b(?:wait|hmm+|correction|oops|sorry|scratch that|on second thought|(?:that|this|it)(?:'s| is"
    r"| was) (?:wrong|incorrect|false|not right|not correct)|"
    r"(?:isn|wasn)['’]t (?:right|correct|true|it)\b|mistake|made an? error|miscounted|"
    r"miscalculated|retract|disregard|ignore (?:that|this|the)|"
    r"should (?:actually|instead|really) be|"
    r"actually,? (?:it|the|that|this|we|i)\b|no,|alternatively|or maybe|or perhaps|let me "
    r"(?:re|double|try|check)|i was wrong|(?:that|this|it) (?:can't|cannot|can not) be|"
    r"on reflection|made (?:that|this|it) up|"
    r"just kidding|reconsider|i give up)|不对|错了|更正|等等|抱歉|間違|訂正",
    re.IGNORECASE,
)
_FIGURE = re.compile(r"\d[\d.,]*")
# Another value, said as the answer was: `It is 6.`
_RESTATED = re.compile(
    r"(?:\b(?:it|that|this|(?:true|correct|real|right|actual|final)\s+[a-z]+|answer|result)"
    r"(?:'s| is| was| equals| (?:should|must|could|may|might) be)"
    r"(?: actually| really| in fact| rather)?"
    r"|\b(?:in fact|make (?:that|it)|take|rather|instead|use)[,:]?|[-=]>|→)"
    r"\s+[$*]{0,3}(\d[\d,./]*)(?=[$*]{0,3}(?:[.!]?\s*$|[.!]\s| instead\b))",
    re.IGNORECASE,
)
_NEXT_TASK = re.compile(r"\n[*#_ ]{0,6}(?:Question|Q\s?\d*:|Problem|Human|User|Exercise)")
_OPENING = 60  # characters of a later paragraph that may take back what stands above it
_RETRACTIONS = (
    *("ait", "mm", "orrection", "ops", "orry", "cratch", "second thought", "wrong", "ncorrect"),
    *("n't", "n’t"),
    *("false", "not ", "rror", "istake", "mis", "etract", "gnore", "isregard", "hould", "ctually"),
    *(
        "o,",
        "lternatively",
        "aybe",
        "erhaps",
        "et me",
        "an't",
        "annot",
        "eflect",
        "ade ",
        "idding",
        "econsider",
        "ive up",
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
_CJK = re.compile(r"[\u3000-\u9fff]")
_CJK_WORDS = re.compile(r"[\u3000-\u9fff]{2}|[\u3400-\u9fff]")


def is_retracted(text: str, start: int) -> bool:
    """Whether what follows a statement takes it back: `Wait, that is wrong`.

    Args:
        text: begins with the value that is stated.
        start: where the statement ends.
    """
    rest = text[start : start + 4 * _WINDOW]
    another = _NEXT_TASK.search(rest)
    paragraphs = rest[: another.start() if another else len(rest)].split("\n\n")
    first = paragraphs[0]
    if not _goes_on(first.lstrip(" .!*_$\\)]}\"'"), text[:start]):
        return True
    looked_at = [first, *(paragraph.lstrip()[:_OPENING] for paragraph in paragraphs[1:])]
    return any(
        any(part in one for part in _RETRACTIONS) and _RETRACTED.search(one) is not None
        for one in looked_at
    )


def _goes_on(rest: str, stated: str) -> bool:
    """Whether a text after a statement closes it or explains it: not `Not.` or `I made that up`."""
    following = _END.split(rest, maxsplit=1)[0] if rest else ""
    numbers = {number.strip(".,") for number in _FIGURE.findall(stated)}
    for restated in _RESTATED.finditer(rest):
        if restated[1].strip(".,") not in numbers:
            return False
    found = _tokens(following)
    if not found or not found[0][0].isalpha() or not following.isascii():
        return True
    if found[0] in _EXPLAINING or _closes(rest, 0):
        return _DISMISSED.isdisjoint(found)
    if all(number.strip(".,") in numbers for number in _FIGURE.findall(following)):
        denies = not _DENYING.isdisjoint(found)
        return _DOUBTING.isdisjoint(found) and not (
            denies and (len(found) < 5 or not _DENIED.isdisjoint(found))
        )
    return len(found) > 4 and any(map(_is_number, found)) and found[0] not in ("recheck", "no")


def announces(text: str, start: int) -> bool:
    """Whether the clause before `the answer is` only announces it: not `Bob says the answer is`."""
    low = max(0, start - _WINDOW)
    before = text[low:start]
    cut = max(before.rfind(stop) + len(stop) if stop in before else 0 for stop in _SENTENCE_ENDS)
    clause = before[cut:]
    if _CJK.search(clause[-6:]) or _CJK.match(text, start):
        return _DOUBTED_CJK.search(clause[-20:]) is None
    found = _tokens(clause)
    if not _DISOWNED.isdisjoint(found) or (found and found[0] in _CONDITIONS):
        return "then" in found
    cuts = _BOUNDARIES - {"that"}
    begins = max((i + 1 for i, word in enumerate(found) if word in cuts), default=0)
    words = (word for word in found[begins:] if word[0].isalpha())
    return all(word in _ANNOUNCING for word in words)


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
    if not lead and _hangs_on(text, begin):
        return False
    shown = before.lstrip()
    if not lead and shown.startswith(("$$", "\\[", "\\begin", "&")):
        above = _TOKEN.findall(_line_before(text, begin).lower())
        if not _UNFINISHED.isdisjoint(above):
            return False
    if _CJK_WORDS.search(before[-12:]) or _CJK.match(text, end):
        return _states_cjk(before, text, end)
    if text[end : end + 2].lstrip().startswith("["):
        return False  # 15 [citation needed]
    numbered = text[max(0, begin - 4) : begin].strip(" .").isdigit()
    if begin > 1 and text[begin - 2] in ".!?" and not numbered and not before.strip(" *$"):
        return False  # I give up. 15.
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


def _states_cjk(before: str, text: str, end: int) -> bool:
    """Chinese and Japanese; `hedges` and `sentences` have more of their rules."""
    if _UNSURE_CJK.search(before):
        return False
    clause = re.split("[,，、]", before)[-1]
    if _DOUBTED_CJK.search(clause) or _CJK_VAGUE.match(text, end):
        return False
    return _CJK.match(text, end) is None or _CJK_AFTER.match(text, end) is not None


def orders(text: str) -> bool:
    """Whether a text begins with an order: `put n = 5`, `find the value`."""
    found = _tokens(text[:40])
    return bool(found) and (found[0] in _ORDERS or is_order(found[0]))


def _tokens(text: str) -> list[str]:
    plain = text.lower().replace("**", " ")
    return [token for token in _TOKEN.findall(plain) if token not in _MARKUP]


def _hangs_on(text: str, begin: int) -> bool:
    """Whether the line directly above is an unfinished `suppose` or `I doubt that`.

    A title, and what a blank line ends, is finished: `Find how many are left`.
    """
    above = text[max(0, begin - _WINDOW) : begin]
    if not above.endswith("\n"):
        return False
    above = above[above.rfind("\n", 0, -1) + 1 :].strip()
    if not above or above[-1] in ".!?:。：？！" or above.startswith("#"):
        return False
    found = _tokens(above)
    if not found:
        return False
    if found[-1] in ("that", "if"):
        return len(found) == 1 or not _UNCLEAR.isdisjoint(found)
    if above.endswith(("$", "\\]", "\\)")) and not _DISOWNED.isdisjoint(found):
        return True
    return found[0] in _TRIALS and not above.startswith(("- ", "* ", "• ", "**"))


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
    if not _DISOWNED.isdisjoint(found):
        return False
    while found and found[-1] in ("(", "{", "}", "+", "*"):
        found = found[:-1]
    if found[:3] == ["as", "a", "result"]:
        found = found[3:]
    found = _without_asides(found)
    last = found[-1] if found else ""
    if last == ">" and found[-2:-1] in (["-"], ["="]):
        last = "so" if len(found) != 3 or _is_number(found[0]) else ">"  # x -> 5 is a limit
    computed = _equates(found[:-1], after) if last in ("=", "≈", "\\approx") else 0
    if not (_AFTER - {"if"} if computed == 2 else _AFTER).isdisjoint(after):
        return False
    if computed == 2:
        return True
    if last == "," and len(found) > 1 and _is_number(found[-2]):
        return False  # one of 10, 11, 12
    if found and found[0] in ("suppose", "assume", "imagine", "pretend") and "then" not in found:
        return False
    concluded = _after_conclusion(found)
    if not _UNCLEAR.isdisjoint(concluded) or _is_sourced(concluded, bool(after)):
        return False
    if last in ("=", "≈", "\\approx"):
        return computed > 0 and _names_a_value(found[:-1])
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
    return _governs(_clause(found), found, after)


def _is_sourced(found: list[str], unit: bool) -> bool:
    """Whether a source, or a qualified value, is stated: `the key has`, `the old value is`.

    Args:
        found: the words before the number.
        unit: whether words follow it: `the goal is 5 books` states a number, `the goal is 5` not.
    """
    for index, word in enumerate(found):
        after = found[index + 1] if index + 1 < len(found) else ""
        if word in _SOURCES and (
            after in (*_SOURCE_VERBS, ":")
            or not {"in", "from", "per", "by"}.isdisjoint(found[max(0, index - 2) : index])
        ):
            return True
        if word in _QUALIFIERS and after in _QUALIFIED and found[index + 2 : index + 3] != ["of"]:
            return True
        if word in ("estimated", "expected") and after in _RESULTS:
            return True
        if word in _LIMITS and after in ("is", "was", "are", "were", ":") and not unit:
            return True
        if (word, after) in (("answer", "key"), ("show", "that"), ("keep", "getting")):
            return True
    return False


def _after_conclusion(found: list[str]) -> list[str]:
    """The tokens after the last `so`, `which` or colon before the number."""
    for index in range(len(found) - 2, -1, -1):
        if found[index] in _CONCLUDES:
            return found[index + 1 :]
    return found


def _names_a_value(left: list[str]) -> bool:
    """Whether only known words, or nouns after an article, stand before the name: not `put n`."""
    begins = max((i + 1 for i, word in enumerate(left) if word in _BOUNDARIES), default=0)
    clause = left[begins:]
    while clause and not (len(clause[-1]) > 1 and clause[-1][0].isalpha()):
        clause = clause[:-1]
    ordered = not begins and bool(clause) and is_order(clause[0])
    if ordered or (clause and (clause[0] in _ORDERS or left[0] in ("had", "were"))):
        return False
    if len(clause) == len(left) - begins or (clause and is_stating(clause[-1])):
        return True  # a label in words, or `the length is x =`
    for index, word in enumerate(clause):
        known = word in _BARE or word in _OPENERS or word in COPULAS or word in _NAMING
        noun = index > 0 and clause[index - 1] in _ARTICLES
        if word[0].isalpha() and len(word) > 1 and not (known or noun):
            return False
    return True


def _without_asides(found: list[str]) -> list[str]:
    """The tokens without `(to one significant figure)` directly before the number."""
    if found[-1:] == [")"] and "(" in found:
        opened = len(found) - 1 - found[::-1].index("(")
        if all(word.isalpha() for word in found[opened + 1 : -1]) and len(found) - opened > 4:
            return found[:opened]
    return found


def _clause(found: list[str]) -> list[str]:
    """The tokens after the last boundary that has a verb or `=` after it."""
    if "=" not in found and not any(word == "up" or is_stating(word) for word in found[-10:]):
        return found
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
        return int(_SIGNS.isdisjoint(formula) and not _is_number(formula[0]))
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
    after = [word for word in after if word not in ("\\text", "\\mathrm", "{", "}")]
    if not after:
        return True
    if after[0] in COPULAS:
        return all(word in _PREDICATES or is_stating(word) for word in after[1:])
    if after[0] in _MODALS or after[0] == "(" or after[0][0].isdigit():
        return False
    compared = after[0] == "more" and after[1:2] in ([], ["than"])
    if compared or (after[0] != "more" and changes_value(after[0])):
        return False
    objects = len(after) > 1 and (
        after[1] in _OBJECTS or (len(after[1]) == 1 and after[1].isalpha())
    )
    return not (after[0].endswith("s") and objects)  # 15 divides x, 15 violates the rule


def _is_phrase(verb: str, between: list[str], after: list[str]) -> bool:
    """Whether unknown words may stand there: `a profit of`, `took Ivanka`, `sold the car for`."""
    if between[-1] == "of" or verb in _GIVING:
        return True
    if verb in ("has", "have", "had", "at") or "at" in between:
        return between[-1] in _ATTRIBUTES
    timed = bool(after) and after[0].rstrip("s") in _TIMES
    if timed and (between[-1] in ("in", "after") or after[1:2] == ["ago"]):
        return True
    return verb not in _IS and between[-1] in _TOWARDS


def _is_subject(subject: list[str]) -> bool:
    """Whether a formula before `is` may be what is asked for: not the `2x` of `so 2x is`."""
    start = len(subject)
    while start and not (len(subject[start - 1]) > 1 and subject[start - 1][0].isalpha()):
        start -= 1
    if start and subject[start - 1] == "of":
        return True
    formula = subject[start:]
    variable = any(len(word) == 1 and word.isalpha() and word != "a" for word in formula)
    return not variable or _equates(subject) > 0


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
        noun = word in ("total", "number", "cost", "average") and before in _DETERMINERS
        if is_stating(word) and not noun:
            place = index
            break
    if place < 0:
        return False
    subject, between = clause[:place], clause[place + 1 :]
    unknown = sum(word not in _BETWEEN for word in between)
    if unknown and not _is_phrase(clause[place], between, after):
        return False
    if unknown > 3 or not (_NOT_IN_CLAUSE.isdisjoint(subject) and _NOT_BETWEEN.isdisjoint(between)):
        return False
    if any(w == "of" and v in _PARTS for v, w in itertools.pairwise(between)):
        return False
    if clause[place] in _IS and not _is_subject(subject):
        return False
    if clause[place] in ("be", "been") and not _UNREAL.isdisjoint(subject[-4:]):
        return False  # it could be, it should have been, it used to be
    if any(w in _OPERATORS and not _is_number(v) for v, w in itertools.pairwise(subject)):
        return False  # x plus one is
    if subject and subject[-1] == "to" and (len(subject) < 2 or subject[-2] not in _INFINITIVES):
        return False
    if not _ANSWERS.isdisjoint(found):
        named = max(index for index, word in enumerate(found) if word in _ANSWERS)
        begins = max((i + 1 for i in range(named) if found[i] in _BOUNDARIES), default=0)
        rest = found[begins : len(found) - len(between) - 1]
        known = all(word in _BARE or word in _ANSWERS for word in rest)
        if clause[place] not in _IS or not known or unknown or not _AWAY.isdisjoint(between):
            return False
    if not place and len(clause) == len(found) and is_order(clause[0], nouns=True):
        return False
    first = _IMPERATIVES if len(clause) == len(found) else _ORDERS
    return found[0] not in first
