"""Units of measurement, currencies and counting words that may follow or precede a number."""

from __future__ import annotations

from fractions import Fraction

# name -> (dimension, factor to the base unit of that dimension)
_TABLE: dict[str, tuple[str, Fraction]] = {}


def _add(dimension: str, factor: str | int | Fraction, *names: str) -> None:
    for name in names:
        _TABLE[name] = (dimension, Fraction(factor))


_add("length", 1, "m", "meter", "metre")
_add("length", "1/100", "cm", "centimeter", "centimetre")
_add("length", "1/1000", "mm", "millimeter", "millimetre")
_add("length", "1/1000000", "μm", "um", "micrometer", "micron", "mum")
_add("length", "1/1000000000", "nm", "nanometer", "nanometre")
_add("length", 1000, "km", "kilometer", "kilometre")
_add("length", "0.0254", "in", "inch")
_add("length", "0.3048", "ft", "foot", "feet")
_add("length", "0.9144", "yd", "yard")
_add("length", "1609.344", "mi", "mile")
_add("time", 1, "s", "sec", "second")
_add("time", 60, "min", "minute")
_add("time", 3600, "h", "hr", "hour")
_add("time", 86400, "day")
_add("time", 604800, "week")
_add("time", "1/1000", "ms", "millisecond")
_add("month", 1, "month")
_add("month", 12, "yr", "year")
_add("mass", 1, "g", "gram")
_add("mass", 1000, "kg", "kilogram", "kilo")
_add("mass", "1/1000", "mg", "milligram")
_add("mass", 1000000, "ton", "tonne")
_add("mass", "453.59237", "lb", "lbs", "pound")
_add("mass", "28.349523125", "oz", "ounce")
_add("volume", 1, "l", "L", "liter", "litre")
_add("volume", "1/1000", "ml", "mL", "milliliter", "millilitre")
_add("volume", "3.785411784", "gal", "gallon")
_add("volume", "0.473176473", "pint")
_add("volume", "0.946352946", "quart")
_add("cup", 1, "cup")
_add("speed", 1, "mph", "kph", "kmh", "kmph")  # see _COMPOUND
_add("angle", 1, "°", "deg", "degree", "circ")
_add("angle", "1/60", "arcmin", "arcminute")
_add("angle", "1/3600", "arcsec", "arcsecond")
_add("radian", 1, "rad", "radian")
_add("energy", 1, "J", "joule")
_add("energy", 1000, "kJ", "kilojoule")
_add("energy", 3600000, "kWh")
_add("electronvolt", 1, "eV", "electronvolt")
_add("electronvolt", 1000, "keV")
_add("electronvolt", 10**6, "MeV")
_add("electronvolt", 10**9, "GeV")
_add("energy_cal", 1, "cal", "calorie")
_add("energy_cal", 1000, "kcal", "kilocalorie")
_add("erg", 1, "erg")
_add("force", 1, "N", "newton")
_add("power", 1, "W", "watt")
_add("power", 1000, "kW", "kilowatt")
_add("frequency", 1, "Hz", "hertz")
_add("frequency", 1000, "kHz")
_add("frequency", 10**6, "MHz")
_add("frequency", 10**9, "GHz")
_add("rotation", 1, "rpm")
_add("voltage", 1, "V", "volt")
_add("current", 1, "A", "amp", "ampere")
_add("resistance", 1, "ohm", "Ω", "Omega")
_add("temperature", 1, "K", "kelvin")
_add("celsius", 1, "°C", "celsius")
_add("fahrenheit", 1, "°F", "fahrenheit")
_add("pressure", 1, "Pa", "pascal")
_add("pressure", 1000, "kPa")
_add("pressure", 10**6, "MPa")
_add("pressure", 101325, "atm", "atmosphere")
_add("pressure", "133.322387415", "mmHg")
_add("amount", 1, "mol", "mole")
_add("angstrom", 1, "Å", "AA", "angstrom")
_add("parsec", 1, "pc", "parsec")
_add("data", 1, "byte", "B")
_add("data", 10**9, "GB")
_add("data", 10**6, "MB")
_add("usd", 1, "$", "dollar", "usd", "USD", "buck")
_add("usd", "1/100", "cent", "¢")
_add("eur", 1, "€", "euro", "eur", "EUR")
_add("gbp", 1, "£", "gbp", "GBP")
_add("jpy", 1, "¥", "yen", "JPY", "yuan", "rmb", "RMB", "CNY")
_add("krw", 1, "₩", "won")
_add("rub", 1, "₽", "ruble")
_add("brl", 1, "real", "reais")
_add("inr", 1, "₹", "rupee", "INR", "Rs", "rs")
_add("unit", 1, "unit", "square unit", "sq unit", "cubic unit", "square")

# With the usual prefixes, where they are no units yet: 5 mA, 3 μF, 2 kV.
_PREFIXES = {"p": "1/1000000000000", "n": "1/1000000000", "u": "1/1000000", "m": "1/1000"}
_PREFIXES |= {"k": "1000", "M": "1000000", "G": "1000000000"}
_add("capacitance", 1, "farad")
_add("charge", 1, "coulomb")
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
            name, _, exponent_text = piece.strip(".()").partition("^")
            exponent_text = exponent_text.strip("{}()")
            if not exponent_text.lstrip("-").isdigit():
                exponent_text = "1"
            exponent = max(-9, min(9, int(exponent_text))) * sign * power
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
