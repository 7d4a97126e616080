"""Words and patterns by which `affirmed` and `announced` tell a statement from what only looks like
one. Words are in lower case, as the tokens are that they are compared with.
"""

from __future__ import annotations

import re


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


WINDOW = 400
# A word, a number, a command, a run of Chinese or Japanese, or one sign. Each form begins with a
# sign or a class of signs, which the `re` module compares before it tries the form: with `[a-z]+`
# first, a window of signs takes twice as long.
_WORD = r"[a-z][a-z]*(?:['’][a-z]+)?"
_NUMERAL = r"\d\d*(?:[.,:]\d+)*|\.(?:\d+(?:[.,:]\d+)*)?"
_RUN = r"[\u3040-\u9fff][\u3040-\u9fff]*"
_CONTROL = r"\x00-\x08\x0e-\x1b\x7f"
_SPACE = r"\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # `\s` without ASCII
TOKEN = re.compile(
    rf"[!-\-/:-\[\]-`{{-~{_CONTROL}]|{_WORD}|{_NUMERAL}|\\[a-z]*|{_RUN}"
    rf"|[^\x00-\x7f{_SPACE}]"
)
# The same without most of MARKUP, which is then no token at all.
PLAIN_TOKEN = re.compile(
    rf"[!%'-\-/:-Z^{{|}}{_CONTROL}]|{_WORD}|{_NUMERAL}|\\[a-z]+|{_RUN}"
    rf"|[^\x00-\x7f{_SPACE}“”‘€£¥]"
)
MARKUP = _names("\\left \\right \\quad")
# Words of a line above, one of which it needs to leave the number below it open.
HANGING = ("doubt", "that", "if", "suppose", "assume", "imagine", "pretend")
# Of the whole sentence: somebody's opinion, a falsehood, a guess, a trial, an example.
DISOWNED = _names(
    """doubt doubts doubtful mistake mistakes mistaken mistakenly erroneous erroneously wrongly
    incorrectly falsely fallacy bogus fake trap decoy distractor naive naively trivial says
    said say insists insisted denies denied asserts asserted swears bets
    claims claimed claim claiming according suggests suggested suggest alleges
    allegedly supposedly hint hints hinted rumor pretend pretends imagine hypothetical
    hypothetically conjecture conjectured example instance eg e.g placeholder dummy nobody
    tempting tempted misread misreading misconception careless prove proves proving"""
)
# Of a sentence that computes nothing, these too: doubt, negation, a question, a step before.
UNCLEAR = DISOWNED | _names(
    """unclear uncertain debatable disputed questionable wikipedia
    guess guesses guessing hunch wrong incorrect false untrue
    wants believes believe believed think thinks thought feels feel argues
    argue argued assume assumes assumed assuming suppose supposes supposed supposing
    thinking let's hypothesis testing try trying tried attempt attempts
    randomly arbitrary arbitrarily nothing none neither nor never cannot no maybe
    perhaps possibly presumably probably conceivably seemingly apparently arguably whether
    wonder wonders ask asks asked asking tell tells told compute computes determine
    calculate evaluate choose choosing consider considers considering wlog generality let
    preliminary tentative tentatively provisional interim intermediate estimate estimates
    estimation bounded hope hopes hoped hoping wish wishes wished format template unlike despite
    instead rather unless until contrary otherwise alternatively either xor
    hardly scarcely barely seldom rarely almost nearly except besides excluding
    seem seems seemed impossible improbable implausible
    isn't wasn't aren't won't wouldn't don't
    doesn't didn't can't couldn't shouldn't hasn't haven't hadn't weren't nay nope"""
)
# A source states nothing (`the key has 5`), nor does a value that is qualified (`a sample answer`);
# as the noun before another verb they are like any other: `the key costs $5`.
SOURCES = _names("key manual calculator textbook input user test sample")
SOURCE_VERBS = _names(
    "say says show shows give gives has have read reads state states list lists want"
)
QUALIFIERS = SOURCES | _names(
    """old previous target goal random trial candidate threshold floor ceiling upper lower
    favorite lucky starting given"""
)
QUALIFIED = _names(
    """value values answer answers result results number output outcome solution solutions total
    guess figure bound bounds one case"""
)
LIMITS = _names("bound bounds threshold candidate candidates goal target input error errors")
RESULTS = _names("answer answers result results output solution outcome")
# Where `affirmed` looks for one of these; a sentence without them needs no look.
SOURCED = (
    SOURCES | QUALIFIERS | LIMITS | _names("estimated expected answer show keep appears looks lies")
)
# Of the clause of the number.
NOT_IN_CLAUSE = _names(
    """if might may begin begins began depends depend depending rounds successor predecessor
    reciprocal twice half thrice proof response explanation derivation paragraph"""
)
REFERENCES = _names(
    "step page theorem lemma equation eq example problem exercise section chapter figure table line"
)
# Of a label: `Confidence: 36%` says nothing of the answer.
NO_LABEL = (
    NOT_IN_CLAUSE
    | REFERENCES
    | _names(
        "confidence certainty difficulty rating tokens attempt try version draft seed date given"
        " default todo dummy placeholder fallback ref seed label"
    )
)
# Of the line above a displayed formula; a task there is none of its doubts: `Evaluate the sum`.
UNFINISHED = (UNCLEAR | NOT_IN_CLAUSE) - _names("compute computes determine calculate evaluate")
TRIALS = _names("suppose assume imagine pretend")
# Between the verb and the number: `leaves remainder 12`.
NOT_BETWEEN = (
    NOT_IN_CLAUSE
    | REFERENCES
    | _names(
        """remainder digits digit factor factors multiple multiples opposite double triple plus
    share part portion fraction piece percentage
    squared within ends begins starts cubed square cube times divided multiplied start end not or
    but
    than least most"""
    )
)
ORDERS = _names(
    """say find compute calculate determine evaluate prove show let suppose assume choose pick
    consider try verify guess solve simplify estimate why what who does do did can could
    should would will"""
)
IMPERATIVES = ORDERS | _names(
    "take given if when how which is are was were write give express note recall say see check use"
)
BOUNDARIES = _names(", ; : so thus therefore hence then which giving → ⇒ \\implies \\rightarrow"
                     " \\to \\therefore ∴ that because since and but where")  # fmt: skip
DOUBTED_CJK = re.compile(
    r"假设|假如|如果|若|假定|倘若|错误|認為|认为|猜|可能|有人|他说|她说|觉得|估计|据说|听说|もし|仮に|誤"
    r"|と言|と思"
)
CONDITIONAL_CJK = re.compile("れば|なら|たら|場合|的话|的話|就矛盾")
UNSURE_CJK = re.compile(r"不知道|不清楚|不确定|分からない|わからない")
# A counter, a polite ending and the end of the clause.
CJK_AFTER = re.compile(
    r"[\s$)）*]*(?:[\u3400-\u9fffつり的]{0,10}|[\u30a0-\u30ff]{1,6})(?:です|である|であり|となる|になる"
    r"|になります|となります|だ|が答え|が残る)?[\s$)）*]*(?:[^\w]|\Z|因|而|ので|が|種|是|也)"
)
CJK_VAGUE = re.compile(
    r"[\s$]*(?:左右|上下|以上|以下|未満|多|余|还是|或|くらい|ぐらい|ほど|程度|吗|么|呢|か|だろ|でしょ)"
    r"|[\s$]*[\u3040-\u9fff]{1,3}(?:左右|以上|以下|以内|未満|未满|くらい|ぐらい|ほど|程度|より)"
)
OPENERS = _names(
    """> so thus therefore hence then finally consequently accordingly altogether overall all
    in total together implying whence only
    exactly just precisely and the a of now this that means is there are it's
    that's conclusion result , : ∴ \\therefore → ⇒ - – — = we get"""
)
BETWEEN = _names(
    """originally initially already minus negative a an the total sum of exactly only precisely
    just now still also then therefore thus hence indeed equal to be him her them us me it
    you for in after at by with into up another additional extra more approximately about
    around roughly all altogether together out on from every each his their its my our your
    value number same given simply clearly finally actually currently presently today worth as - –
    : ( { [ + = \\text
    \\textbf \\mathbf \\boldsymbol \\mathrm \\bf \\displaystyle \\boxed"""
)
INFINITIVES = _names(
    """need needs needed has have had going able order wants want managed manages expects plans
    required used left enough continue happen happens supposed out get gets got will minutes
    hours days weeks months years"""
)
LABEL = _names("the final correct answer answers result results solution solutions")
NAMING = _names(
    """solution function polynomial formula value constant summary shows means gives case line
    achieved attained"""
)
ARTICLES = _names("the a an of our its smallest largest least only total unknown original at for")
DETERMINERS = _names("a an the of in their his her its average")
POSSESSIVES = _names("a an the his her their its my our your")  # no verb stands behind them
STARTS_CLAUSE = _names(", and that but or so thus hence therefore then means meaning namely")
CONCLUDES = _names(": ; so thus hence therefore which ∴ \\therefore")
IS = _names("is are was were be equals equal becomes become comes turns 's gives")
ANSWERS = _names("answer answers result results")
AWAY = _names("after at in by with into up out on from for another additional extra more every")
GIVING = _names("take takes took cost costs give gives gave leave leaves pay pays paid save saves")
UNREAL = _names("could should would might may used ought")
# `by adding 5`, `should have had 5`: done on the way, or not at all.
MEANS = _names("by after before without of while when from on for with despite upon until since")
UNREAL_PAST = _names("could should would might may ought must")
# What the writer does to the answer, and not to find it: `I made 12 attempts`.
FOUND = _names(
    """get got find found have had obtain obtained conclude compute counted count see know need
    needed am calculate calculated"""
)
OPERATORS = _names("plus minus squared cubed times")
# How a sentence begins that explains the answer before it.
EXPLAINING = _names(
    """because since this the we as here so thus explanation note to where in there each for it let
    first given step solution which that hence therefore proof by and if with when from
    these all both our their his her they he she using details reason reasoning justification
    hope"""
)
PARTS = _names("one any some none each either both two all")
ATTRIBUTES = _names(
    """length width height area volume perimeter period degree order rank slope radius diameter
    mass weight age value size norm magnitude probability point points"""
)
TIMES = _names("second minute hour day week month year sec min hr")
TOWARDS = _names("for at in by with after to on into")
BARE = _names(
    """must we seek want wanted looking for obtain the a an our my this that its so thus
    therefore hence final correct right only desired required exact unique numerical numeric
    is are was be indeed then get see conclude have and to problem question in total overall
    , : i of"""
)
MODALS = _names("would could might may should can must will seems looks does do did")
OBJECTS = _names("the this that our it an any all")
PREDICATES = _names(
    """indeed choice minimal maximal that works work the a an our my only unique final correct
    right required desired answer answers solution solutions value values result maximum
    minimum largest smallest greatest least possible total number sum of root roots integer
    in all it and , exactly what we want wanted such time age years old positive negative
    real x n prime possibility option candidate"""
)
# Before `answer is`, in its clause; words without letters too.
ANNOUNCING = (
    BARE
    | OPENERS
    | _names(
        """for given part simplified complete actual that deduce find follows it here with as
    best required can shown clear obvious evident easy using above which overall original numeric
    simplest closest requested sought asked"""
    )
)
CONDITIONS = _names("if suppose let assume assuming had were when unless until whether given")
AFTER = _names(
    """decoy trap distractor guess placeholder impossible unlikely supposedly allegedly
    mistaken forced false untrue if find compute determine example recall typo kidding joking
    unless assuming provided guessing rejected discarded dismissed confuse confuses confused
    perhaps maybe possibly probably fails but however though although except contradicts
    violates invalid absurd reversed inverted swapped negated doubled halved tripled transposed
    attempts guesses candidates minus says said claims claimed insists believes thinks"""
)
AFTER_COMPUTED = AFTER - DISOWNED - _names("if believes thinks")
BEING = _names("is are was were")
PARTITIVES = _names("one some any none most many expected supposed promised intended planned")
POSSIBLE = _names("possibility option candidate")  # the only one of them is the answer
SHORT_OF = _names("enough sufficient insufficient too")
EASY = _names("hard difficult only just")
EARLIER = _names("before until previously formerly originally initially earlier")
# Of the sentence after the answer: it takes it back without naming another.
DISMISSED = _names(
    "trap decoy distractor placeholder bogus fake typo kidding joking lie lied lies liar guessing"
    " joke half slip forget incomplete unfinished partial"
    " nonsense"
)
DOUBTING = DISMISSED | DISOWNED | (AFTER - _names("if find compute determine recall unless"))
# A sentence after the answer is not about it: `Someone should verify it`, `Cancel that`.
UNSETTLED = _names("should must might may could would wrong slip mind salt joke half forget back")
SETTLED = FOUND | _names("hope used checked verified confirmed am")
ALSO = _names("also too another second other alternative both and or plus")
DENYING = _names("not no nope never nor or unsure random")
DENIED = _names("answer right correct true it that this so sure be really quite")
CLOSERS = _names(
    """this completes complete the solution proof answer i hope it is correct so we are done
    that final thus hence therefore qed as desired required requested wanted and problem
    solved finished to question our result check verified confirmed checks out end which you
    can see let me know if have any questions helps great job good luck s im_end _end_
    eot_id endoftext user assistant human ! . , \\ □ [ ] ■ ∎ ✓ ✅ $ * # : - ~ ( ) \\square
    \\blacksquare \\] \\) \\boxed } { \\end align equation aligned gathered | < > / _ `"""
)
# Those of them that are one sign, and white space.
CLOSING_SIGNS = re.compile(r"[\s!,#$*:~()\[\]{}|<>/_`□■∎✓✅-]*")
# The end of a sentence that needs another clause, behind a formula that is not one.
_UNENDING = re.compile(
    r"\b(?:that|if|whether|says?|suppose|assume|imagine) {1,3}(?=[\\$}])"
    r"(?:[^\w.!?\n]|\\[a-z]{1,12}(?:\{[a-z]{1,12}\})?){1,20}"
    r"[.!?\n]\s{0,8}\Z",
    re.IGNORECASE,
)
_UNENDING_PARTS = ("hat ", "if ", "whether ", "say", "suppose ", "assume ", "imagine ")
CONDITIONAL = _names("when if unless once until whenever")
# Something is missing from the answer: `I forgot the calves`, `one must still add 4`.
_UNDONE = (
    r"my bad|strike that|never ?mind|(?:don['’]t|do not|not) (?:trust|convinced)"
    r"|(?:this|that|it) (?:fails|violates|contradicts|breaks)"
    r"|then (?:we |i |you )?(?:add|subtract|doubl|halv|multipl|divid|squar)"
    r"|forgot(?:ten)?|overlooked|(?:this|that|it) (?:ignores|neglects|misses|overlooks)|off by"
    r"|left out|(?:must|needs? to|ha(?:s|ve) to|should) (?:still |then |also |now )?(?:be )?"
    r"(?:add|subtract|doubl|halv|multipl|divid|squar|negat|invert|chang|correct|adjust|replac)"
)
_RETRACTED = re.compile(
    r"\b(?:wait|hmm+|correction|oops|sorry|scratch that|on second thought|(?:that|this|it)(?:'s| is"
    r"| was) (?:wrong|incorrect|false|not right|not correct)|"
    r"(?:isn|wasn)['’]t (?:right|correct|true|it)\b|mistake|made an? error|miscounted|"
    r"miscalculated|retract|disregard|ignore (?:that|this|the)|"
    r"should (?:actually|instead|really) be|"
    r"actually,? (?:it|the|that|this|we|i)\b|no,|alternatively|or maybe|or perhaps|let me "
    r"(?:re|double|try|check)|i was wrong|(?:that|this|it) (?:can't|cannot|can not) be|"
    rf"on reflection|{_UNDONE}|made (?:that|this|it) up|"
    r"just kidding|reconsider|i give up)|不对|错了|更正|等等|抱歉|間違|訂正",
    re.IGNORECASE,
)
_RETRACTED_LOWER = re.compile(_RETRACTED.pattern)  # of a text in lower case, four times as fast
FIGURE = re.compile(r"\d[\d.,]*")
# Another value, said as the answer was: `It is 6.`
_VALUE_AT_END = r"[$*]{0,3}(\d[\d,./]*)(?=[$*]{0,3}(?:[.!]?\s*$|[.!]\s| instead\b))"
RESTATED = re.compile(
    r"(?:\b(?:it|that|this|(?:true|correct|real|right|actual|final)\s+[a-z]+|answer|result)"
    r"(?:'s| is| was| equals| (?:should|must|could|may|might) be)"
    r"(?: actually| really| in fact| rather)?"
    r"|\b(?:in fact|make (?:that|it)|take|rather|instead|use)[,:]?|[-=]>|→)"
    rf"\s+{_VALUE_AT_END}",
    re.IGNORECASE,
)
ENDING_NUMBER = re.compile(rf"\s{_VALUE_AT_END}", re.IGNORECASE)  # what `RESTATED` ends in
# How the words of `RESTATED` before the number end, without `:` and `,`; all white space may.
RESTATING_ENDS = (
    *("'s", "is", "was", "equals", "be", "actually", "really", "fact", "rather", "that", "it"),
    *("take", "instead", "use", ">", "→"),
)
# Another value under a label: `Edit: 6`.
RELABELED = re.compile(
    r"(?:^|\n)[ \t*_#-]{0,6}(?:(?:edit|updat|correct|revis|fix)(?:ed|e|ion)?|new|final"
    r"|real|actual|true|right|erratum|ps|result|total|value)\b(?: [a-z]{1,12})?[\s*]{0,4}"
    r"[:=—–-]{1,2}[\s*$]{0,4}(\d[\d,./]*)",
    re.IGNORECASE,
)
# A number that is all of a later line: `17\n18`, `17... 18`.
BARE_LINE = re.compile(r"(?:\n|\.\.|[.!] )[ \t*$_#.]{0,8}(\d[\d,./]*)[ \t*$_.!]{0,8}(?=\n|\Z)")
# A conclusion after the answer: `Therefore she has 7 apples.`
CONCLUDING = re.compile(
    r"(?:^|[.!?\n][ \t*_#-]{0,6}|[,;] (?:and )?)(?:so|thus|therefore|hence|then|altogether|overall"
    r"|finally|consequently|as a result|all in all|in (?:total|all|conclusion|summary|the end)"
    r"|(?:this|that|which) (?:means|gives|makes|leaves))\b",
    re.IGNORECASE,
)
# A sentence directly after the answer that does not begin as an explanation does.
UNEXPLAINED = re.compile(
    rf"[.!*$\\)\]}} ]{{0,12}}[.!][*$\s]{{1,6}}(?!(?:{'|'.join(sorted(EXPLAINING))})\b)[A-Z]",
    re.IGNORECASE,
)
# Where a conclusion stops: `7 apples after he gave 2 away`.
CIRCUMSTANCE = re.compile(r" (?:after|because|since|when|while|where|if|before|by|from|as)\b")
NEXT_TASK = re.compile(r"\n[*#_ ]{0,6}(?:Question|Q\s?\d*:|Problem|Human|User|Exercise)")
OPENING = 60  # characters of a later paragraph that may take back what stands above it
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
        *("orgot", "verlooked", "gnores", "eglects", "isses", "verlooks", "ff by", "eft out"),
        *(
            "y bad",
            "trike",
            "ever",
            "rust",
            "onvinced",
            "ails",
            "iolates",
            "ontradicts",
            "reaks",
            "hen ",
        ),
        *("ust ", "eed to", "eeds to", "ave to", "as to"),
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
PARTED = _names("= : ; ≈ \\approx ,")  # where a formula before `=` begins
SIGNS = _names(r"+ - * / ^ | ! · × − – \cdot \times \sqrt \frac \div ÷ x % per ( )")
COMPUTATION = re.compile(r"=?\s*\d[\d\s.+*/^()-]*")
UNKNOWN = _names(r"| ^ \sqrt")  # of one name: `|x| =`
SENTENCE_ENDS = (". ", "! ", "? ", "\n", "。", "！", "？")
ASCII_ENDS = SENTENCE_ENDS[:4]
# The sign comes first and what stands before it after that: other signs are skipped quickly.
END = re.compile(
    r"[.!?。！？\n](?:(?<=[。！？\n])|(?=\s+[A-Z\\$\d(~*#<-]|\s*$)"
    r"(?<!\bMr.)(?<!\bMrs.)(?<!\bMs.)(?<!\bDr.)(?<!\bSt.))"
)
CJK = re.compile(r"[\u3000-\u9fff]")
CJK_WORDS = re.compile(r"[\u3000-\u9fff]{2}|[\u3400-\u9fff]")


def is_unending(text: str, end: int) -> bool:
    """Whether a sentence that needs another clause ends at `end`: `I doubt that \\].`"""
    low = max(0, end - OPENING)
    opening = text[low:end]
    if "\\" not in opening and "$" not in opening and "}" not in opening:
        return False
    if opening.isascii():  # the `re` module matches `if` with a letter outside ASCII too
        lowered = opening.lower()
        if not any(part in lowered for part in _UNENDING_PARTS):
            return False
    return _UNENDING.search(text, low, end) is not None


def is_retraction(text: str) -> bool:
    """Whether a text has words that take back what stands before it: `Wait, that is wrong.`"""
    lowered = text.lower()
    if not any(part in lowered for part in _RETRACTIONS):
        return False
    return (_RETRACTED_LOWER if text.isascii() else _RETRACTED).search(lowered) is not None
