"""Verbs that state a quantity: `is`, `equals`, `sold`, `will take`. Any other verb states nothing.

Left out on purpose are verbs of opinion, of trial and of relation (`says`, `guesses`, `tries`,
`divides`, `exceeds`, `starts`, `begins`, `ends`): a number after them is no result.
"""

from __future__ import annotations

import functools


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


COPULAS = _names(
    """is are was were be been being equals equal equalled makes make made totals totaled totalling
    totaling becomes become became comprises has have had having 's 're gives give gave giving
    yields yield yielded yielding gets get got getting obtain obtains obtained find finds found
    finding leaves leave left leaving simplifies reduces evaluates amounts comes came
    corresponds converges converge consists exist exists
    making conclude concludes contains contain contained"""
)
_STEMS = _names(
    """bike count chop recycle skate solve treat raise hop crawl trim peel rent hang pull push tie
    invite need earn cost receive use walk climb pick watch rain purchase score study travel
    work play carry deliver produce collect gain save charge owe require weigh measure last
    finish complete plant bake cook pack fill order share donate return remain visit drop add
    serve consume harvest pour print paint wash clean miss gather deposit withdraw invest borrow
    lend increase decrease reduce jump dance type fold knit sew crochet build help call text
    mail ship load store arrive pass join cover hold age live stay hike jog row sail skip cycle
    contribute award reward tip generate accumulate attend enroll hire employ recruit feed water
    adopt own possess bring total equal number average reach cross cut bottle
    exercise practice train create design assemble prepare repair fix install move stack place
    arrange exchange trade swap retain keep hatch lay milk catch fish hunt trap shoot tally
    accomplish process handle manage sort file spread press squeeze slice mow rake shovel drive
    ride fly tow haul lift drink eat read write sell buy pay spend lose win take send teach
    throw run swim sing draw see know grow meet hear go put"""
)
_IRREGULAR = _names(
    """gotten ran spent ate read sold bought drank drove rode flew lost won took taken wrote
    written sent kept paid saw seen grew grown met heard went gone put sang sung swam drew drawn
    threw thrown taught brought caught held fed cut hit set shot lent slept swept laid built
    hung rose fell fallen rise rises fall falls knew known hid dug wore wove blew broke stole
    driven eaten drunk flown ridden swum given done stolen woven torn
    spoke there're expand expands expanded turns turn remains """
)


_NOUNS = _names("total number average count score cost age order share answer play plant milk fish")


def is_order(word: str, nouns: bool = False) -> bool:
    """Whether a word at the start of a sentence is an order: `take`, `read`, but not `get`.

    Args:
        word: a lower-case word.
        nouns: whether a word that may be a noun is one too: `count`.
    """
    return word in _STEMS and word not in COPULAS and (nouns or word not in _NOUNS)


@functools.lru_cache(maxsize=8_192)
def is_stating(word: str) -> bool:
    """Whether a lower-case word is a form of a verb that states a quantity."""
    if word in COPULAS or word in _STEMS or word in _IRREGULAR:
        return True
    if word[-1:] not in ("s", "d", "g"):
        return False  # as none of the endings
    for ending, instead in (
        ("ies", "y"), ("ied", "y"), ("es", ""), ("ed", ""), ("ed", "e"), ("es", "e"), ("s", ""),
        ("ing", ""), ("ing", "e"),
    ):  # fmt: skip
        if word.endswith(ending):
            stem = word[: -len(ending)] + instead
            if stem in _STEMS or (len(stem) > 3 and stem[-1] == stem[-2] and stem[:-1] in _STEMS):
                return True
    return False
