"""Properties of grading: formulas drawn at random, wording, tables of languages."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.grading import GradingSettings
from rlmath.grading.answer import read
from rlmath.grading.compare import Comparer
from rlmath.grading.language_tables import LANGUAGES, OTHERS
from rlmath.grading.wording import _LEADS, CHANGING, leaves_value

SETTINGS = GradingSettings()
COMPARER = Comparer(SETTINGS)
INTEGERS = st.integers(-(10**30), 10**30)
NUMBERS = st.one_of(
    INTEGERS.map(str),
    st.tuples(INTEGERS, st.integers(1, 10**12)).map(lambda p: f"\\frac{{{p[0]}}}{{{p[1]}}}"),
    st.decimals(-(10**9), 10**9, places=4, allow_nan=False, allow_infinity=False).map(str),
)


def _formulas():
    atoms = st.one_of(
        st.integers(0, 99).map(str), st.sampled_from(["x", "y", "n", "\\pi", "\\alpha"])
    )

    def extend(inner):
        two = st.tuples(inner, inner)
        return st.one_of(
            two.map(lambda p: f"\\left({p[0]}+{p[1]}\\right)"),
            two.map(lambda p: f"({p[0]}-{p[1]})"),
            two.map(lambda p: f"\\frac{{{p[0]}}}{{{p[1]}+7}}"),
            two.map(lambda p: f"({p[0]})\\cdot({p[1]})"),
            inner.map(lambda e: f"\\sqrt{{{e}}}"),
            inner.map(lambda e: f"({e})^{{2}}"),
            inner.map(lambda e: f"\\sin({e})"),
        )

    return st.recursive(atoms, extend, max_leaves=8)


FORMULAS = _formulas()


def same(first, second):
    return COMPARER.same(read(first), read(second))


@given(st.one_of(NUMBERS, FORMULAS))
def test_equal_to_itself(answer):
    assert same(answer, answer) is True
    assert same(f" {answer} ", f"${answer}$") is True


@given(FORMULAS)
def test_indifferent_to_layout(formula):
    for rewritten in (
        formula.replace("\\frac", "\\dfrac"),
        formula.replace("\\left(", "(").replace("\\right)", ")"),
        formula.replace("(", "\\left(")
        .replace("\\left\\left", "\\left")
        .replace(")", "\\right)")
        .replace("\\right\\right", "\\right"),
        formula.replace("+", " + ").replace("}", "} "),
        "\\displaystyle " + formula + "\\,.",
    ):
        assert same(rewritten, formula) is True, rewritten


@given(FORMULAS, FORMULAS)
def test_commutative(first, second):
    assert same(f"({first})+({second})", f"({second})+({first})") is not False
    assert same(f"({first})({second})", f"({second})({first})") is not False


@given(FORMULAS, st.integers(1, 9))
def test_a_sum_differs_from_its_term(formula, added):
    assert same(f"{formula}+{added}", formula) is not True


@given(st.lists(INTEGERS, min_size=1, max_size=6, unique=True), st.randoms())
def test_order_in_sets_and_tuples(values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    one, two = ", ".join(map(str, values)), ", ".join(map(str, shuffled))
    assert same(f"\\{{{two}\\}}", f"\\{{{one}\\}}") is True
    assert same(two, one) is True
    if len(values) > 1:
        assert same(f"({two})", f"({one})") is (values == shuffled)
        assert same(f"\\{{{two}\\}}", f"({one})") is False


@given(st.fractions(), st.fractions())
def test_fractions_compare_exactly(a, b):
    written = f"\\frac{{{a.numerator}}}{{{a.denominator}}}"
    assert same(written, f"{b.numerator}/{b.denominator}") is (a == b)
    assert same(written, f"{2 * a.numerator}/{2 * a.denominator}") is True


@given(st.integers(1, 10**15))
def test_digits_may_be_grouped(value):
    assert same(f"{value:,}", str(value)) is True
    assert same(f"{value:,}".replace(",", "{,}"), str(value)) is True
    assert same(f"{value:,}".replace(",", ",\\!"), str(value)) is True
    assert same(f"{value:,}".replace(",", "\\,"), str(value)) is True


@given(st.integers(2, 10**6), st.integers(1, 12))
def test_decimals_of_a_fraction_need_six_digits(denominator, digits):
    value = Fraction(1, denominator)
    exponent = len(str(denominator))
    scaled = round(value * 10 ** (digits + exponent))
    written = f"0.{scaled:0{digits + exponent}d}"
    approximate = Fraction(written)
    significant = len(written[2:].lstrip("0"))
    near = abs(approximate - value) <= Fraction(1, 10**6) * value
    expected = approximate == value or (near and significant >= 6)
    assert same(written, f"\\frac{{1}}{{{denominator}}}") is expected


@given(st.text(max_size=200))
def test_any_text_can_be_read_and_equals_itself_or_is_empty(text):
    answer = read(text)
    if answer.key:
        assert COMPARER.same(answer, read(text)) is True
    COMPARER.same(answer, read("42"))


@pytest.mark.parametrize("word", sorted(CHANGING))
def test_a_word_that_changes_a_number_is_no_unit(word, grader):
    for answer in (
        f"5 {word}",
        f"5 \\text{{ {word}}}",
        f"5 {word} apples",
        f"5 apples {word}",
        f"{word} 5",
        f"\\text{{{word} }} 5",
        f"\\text{{The {word} answer is }} 5",
        f"5 \\text{{ is {word}}}",
    ):
        if "answer is" in answer and word in _LEADS:
            continue  # the least value, the remainder: what is asked for
        announced = ("about", "approx", "approximately", "roughly", "so")
        if word in announced and answer in (f"{word} 5", f"\\text{{{word} }} 5"):
            continue  # one number, announced
        grade = grader.grade_one(f"\\boxed{{{answer}}}", "5")
        assert grade.status == "wrong", (answer, grade)


def test_zero_is_nothing_that_ends_in_zero(grader):
    for word in sorted(CHANGING):
        if word in ("so", "about", "approximately", "approx", "roughly"):
            continue  # they announce it
        assert not grader.grade_one(f"\\boxed{{{word} 0}}", "0").correct, word


def test_counted_nouns_of_real_problems_are_units(data_dir):
    import json

    phrases = set()
    for line in (data_dir / "asdiv.jsonl").read_text(encoding="utf-8").splitlines():
        phrases.update(re.findall(r"\d \(([^)]*)\)", str(json.loads(line)["answer"])))
    assert len(phrases) > 300
    refused = {p for p in phrases if not leaves_value(p)}
    # a quarter changes a number, and the others are no plurals
    assert len(refused) < 0.06 * len(phrases), refused


EACH = pytest.mark.parametrize("language", OTHERS, ids=lambda language: language.name)


def _accepts(grader, gold, responses):
    grades = grader.grade_batch(responses, [gold] * len(responses))
    return [one for one, grade in zip(responses, grades, strict=True) if grade.correct]


def _join(language, first, second):
    return f"{first} {second}" if language.spaced else first + second


def test_all_languages_have_a_table():
    assert {one.name for one in LANGUAGES} == {
        *("chinese", "english", "french", "german", "japanese", "korean"),
        *("portuguese", "russian", "spanish"),
    }


@EACH
def test_word_before_box_that_changes_a_value_is_rejected(language, grader):
    responses = [_join(language, word, r"\boxed{12}") for word in sorted(language.before)]
    responses += [_join(language, word, r"$\boxed{12}$.") for word in sorted(language.before)]
    assert _accepts(grader, "12", responses) == []


@EACH
def test_word_after_box_that_changes_a_value_is_rejected(language, grader):
    responses = [_join(language, r"\boxed{12}", word) for word in sorted(language.after)]
    assert _accepts(grader, "12", responses) == []


@EACH
def test_word_inside_box_that_changes_a_value_is_rejected(language, grader):
    words = [*sorted(language.after), *(f"{start}abc" for start in language.denying)]
    responses = [rf"\boxed{{12\text{{ {word}}}}}" for word in words]
    responses += [rf"\boxed{{12}} {start}abc" for start in language.denying]
    assert _accepts(grader, "12", responses) == []


@EACH
def test_units_counters_and_fillers_leave_a_value(language, grader):
    responses = [_join(language, r"\boxed{12}", word) for word in sorted(language.units)]
    responses += [rf"\boxed{{12\text{{{word}}}}}" for word in sorted(language.units)]
    responses += [_join(language, word, r"\boxed{12}") for word in sorted(language.fillers)]
    assert sorted(set(responses) - set(_accepts(grader, "12", responses))) == []


@EACH
def test_multiplier_multiplies_inside_box(language, grader):
    for word, factor in language.multipliers.items():
        if factor >= 10:
            response = rf"\boxed{{12\text{{ {word}}}}}"
            assert grader.grade_one(response, str(12 * factor)).correct, response


@EACH
def test_conjunction_joins_boxes(language, grader):
    for word in sorted(language.both | language.either):
        response = rf"\boxed{{4}} {word} \boxed{{5}}"
        assert not grader.grade_one(response, "5").correct, response
        assert grader.grade_one(response, "5, 4").correct, response


@pytest.mark.parametrize(
    ("response", "untabled"),
    [
        (r"الجواب هو \boxed{12}", 1),
        (r"उत्तर \boxed{12} है", 1),
        (r"Odpowiedź: \boxed{12}", 1),
        (r"Ответ: \boxed{12}", 0),
        (r"答えは\boxed{12}です", 0),
        (r"so $\angle α = \boxed{12}$", 0),
        (r"The answer is \boxed{12}", 0),
    ],
)
def test_language_without_table_is_graded_by_its_box_and_counted(response, untabled, grader):
    grade = grader.grade_one(response, "12")
    assert grade.correct and grade.untabled == untabled
