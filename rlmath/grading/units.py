"""Units of measurement, currencies and counting words that may follow or precede a number."""

from __future__ import annotations

from fractions import Fraction

from rlmath.grading.language_tables import ENGLISH

# Dimension: symbols with their factor to the base unit of that dimension.
_SYMBOLS = """
capacitance: farad 1
charge: coulomb 1
length: m 1, cm 1/100, mm 1/1000, μm=um=mum 1/1000000, nm 1/1000000000, km 1000, in 0.0254, ft
    0.3048, yd 0.9144, mi 1609.344
time: s=sec 1, min 60, h=hr 3600, day 86400, week 604800, ms 1/1000
month: month 1, yr 12
mass: g 1, kg 1000, mg 1/1000, ton 1000000, lb=lbs 453.59237, oz 28.349523125
volume: l=L 1, ml=mL 1/1000, gal 3.785411784, pint 0.473176473, quart 0.946352946
cup: cup 1
speed: mph=kph=kmh 1
angle: °=deg 1, arcmin 1/60, arcsec 1/3600
radian: rad 1
energy: J 1, kJ 1000, kWh 3600000
electronvolt: eV 1, keV 1000, MeV 1000000, GeV 1000000000
energy_cal: cal 1, kcal 1000
erg: erg 1
force: N 1
power: W 1, kW 1000
frequency: Hz 1, kHz 1000, MHz 1000000, GHz 1000000000
rotation: rpm 1
voltage: V 1
current: A=amp 1
resistance: ohm=Ω=Omega 1
temperature: K 1
celsius: °C 1
fahrenheit: °F 1
pressure: Pa 1, kPa 1000, MPa 1000000, atm 101325, mmHg 133.322387415
amount: mol 1
angstrom: Å=AA 1
parsec: pc 1
data: B 1, GB 1000000000, MB 1000000
usd: $=usd=USD 1, ¢ 1/100
eur: €=eur=EUR 1
gbp: £=gbp=GBP 1
jpy: ¥=yen=JPY=rmb=RMB=CNY 1
krw: ₩=won 1
rub: ₽ 1
brl: real 1
inr: ₹=INR=Rs=rs 1
unit: unit 1
"""


def _table() -> dict[str, tuple[str, Fraction]]:
    """(dimension, factor) by name: symbols, and the words of the English table for them."""
    found: dict[str, tuple[str, Fraction]] = {}
    for line in _SYMBOLS.replace("\n    ", " ").strip().splitlines():
        dimension, _, listed = line.partition(": ")
        for item in listed.split(", "):
            names, _, factor = item.rpartition(" ")
            found |= dict.fromkeys(names.split("="), (dimension, Fraction(factor)))
    return found | {word: found[name] for word, name in ENGLISH.units.items()}


_TABLE = _table()
# With the usual prefixes, where they are no units yet: 5 mA, 3 μF, 2 kV.
_PREFIXES = {"p": "1/1000000000000", "n": "1/1000000000", "u": "1/1000000", "m": "1/1000"}
_PREFIXES |= {"k": "1000", "M": "1000000", "G": "1000000000"}
_PREFIXED = {"A": "ampere", "V": "volt", "W": "watt", "J": "joule", "N": "newton", "F": "farad"}
_PREFIXED |= {"Pa": "pascal", "Hz": "hertz", "C": "coulomb", "s": "second", "m": "meter"}
_PREFIXED |= {"g": "gram", "L": "liter", "mol": "mole"}
_NEW = {
    prefix + symbol: (_TABLE[name][0], Fraction(factor) * _TABLE[name][1])
    for symbol, name in _PREFIXED.items()
    for prefix, factor in _PREFIXES.items()
    if prefix + symbol not in _TABLE
}
_TABLE.update(_NEW)

PERCENT = frozenset({"percent", "percentage", "pct", "%"})
ORDINALS = frozenset({"st", "nd", "rd", "th"})
_COMPOUND = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "kmph": "km/hour"}


def singular(word: str) -> str:
    """A plain English singular, good enough to compare `apples` with `apple`."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    if len(word) > 2 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


# Unit names that are products of usual symbols when no space or `\\text` sets them off: m·g, n·m.
LETTER_PRODUCTS = (
    frozenset(("mg", "Mg", "mG", "MG", "nm", "ms", "ml", "pc", "atm", "rpm")) | _NEW.keys()
)


def lookup(word: str) -> tuple[str, Fraction] | None:
    """(dimension, factor) of a unit word in any of its spellings, or None."""
    if word in _TABLE:
        return _TABLE[word]
    if len(word) > 2:  # `Ns` is no plural of newtons
        for candidate in (word.lower(), singular(word), singular(word.lower())):
            if candidate in _TABLE and (candidate == word.lower() or len(candidate) > 1):
                return _TABLE[candidate]
    elif word.lower() in _TABLE and len(word) > 1 and word.lower() not in _NEW:
        return _TABLE[word.lower()]
    return None


def is_unit_word(word: str) -> bool:
    """Whether a bare word of two letters or more is a unit, a percent word or a currency."""
    return word.lower() in PERCENT or lookup(word) is not None


def canonical(unit: str) -> tuple[str, Fraction, frozenset[str]]:
    """(dimension, factor, words) of a unit phrase such as `cm^2`, `km / h`, `square inches`.

    `dimension` is empty for a phrase with no unit that we know (`red apples`): then only the
    words can be compared.
    """
    text = unit.strip().strip(".()").replace("²", "^2").replace("³", "^3").replace(" per ", "/")
    text = _COMPOUND.get(text, text)
    power = 1
    for prefix, exponent in (("square ", 2), ("sq. ", 2), ("sq ", 2), ("cubic ", 3), ("cu ", 3)):
        if text.lower().startswith(prefix):
            text, power = text[len(prefix) :], exponent
    words = frozenset(singular(w) for w in text.lower().replace("/", " / ").split())
    dimension, factor = "", Fraction(1)
    for index, part in enumerate(text.replace("·", " ").split("/")):
        sign = 1 if index == 0 else -1
        for piece in part.split():
            name, _, raised = piece.strip(".()").partition("^")
            raised = raised.strip("{}()")
            plain = int(raised) if raised.lstrip("-").isdigit() else 1
            exponent = max(-9, min(9, plain)) * sign * power
            known = lookup(name)
            if known is None:
                return "", Fraction(1), words
            dimension += f"{known[0]}^{exponent} "
            factor *= known[1] ** exponent
    return " ".join(sorted(dimension.split())), factor, words


def same(first: str, second: str) -> Fraction | None:
    """Factor that turns a number of `first` units into `second` units; None if they differ."""
    if first == second:
        return Fraction(1)
    if {first, second} in ({"£", "pound"}, {"£", "pounds"}):
        return Fraction(1)
    one, two = canonical(first), canonical(second)
    if one[0] and two[0]:
        return one[1] / two[1] if one[0] == two[0] else None
    if one[0] or two[0]:
        return None
    return Fraction(1) if one[2] <= two[2] or two[2] <= one[2] else None
