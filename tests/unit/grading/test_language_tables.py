"""Each entry of each language's table: what changes a value, what leaves it, what joins two."""

import pytest

from rlmath.grading import MathGrader
from rlmath.grading.language_tables import LANGUAGES, OTHERS

EACH = pytest.mark.parametrize("language", OTHERS, ids=lambda language: language.name)


def _accepted(grader, gold, responses):
    grades = grader.grade_batch(responses, [gold] * len(responses))
    return [one for one, grade in zip(responses, grades, strict=True) if grade.correct]


def _spaced(language, first, second):
    return f"{first} {second}" if language.spaced else first + second


def test_all_languages_have_a_table():
    assert {one.name for one in LANGUAGES} == {
        *("chinese", "english", "french", "german", "japanese", "korean"),
        *("portuguese", "russian", "spanish"),
    }


@EACH
def test_word_before_box_that_changes_a_value_is_rejected(language, grader):
    responses = [_spaced(language, word, r"\boxed{12}") for word in sorted(language.before)]
    responses += [_spaced(language, word, r"$\boxed{12}$.") for word in sorted(language.before)]
    assert _accepted(grader, "12", responses) == []


@EACH
def test_word_after_box_that_changes_a_value_is_rejected(language, grader):
    responses = [_spaced(language, r"\boxed{12}", word) for word in sorted(language.after)]
    assert _accepted(grader, "12", responses) == []


@EACH
def test_word_inside_box_that_changes_a_value_is_rejected(language, grader):
    words = [*sorted(language.after), *(f"{start}abc" for start in language.denying)]
    responses = [rf"\boxed{{12\text{{ {word}}}}}" for word in words]
    responses += [rf"\boxed{{12}} {start}abc" for start in language.denying]
    assert _accepted(grader, "12", responses) == []


@EACH
def test_units_counters_and_fillers_leave_a_value(language, grader):
    responses = [_spaced(language, r"\boxed{12}", word) for word in sorted(language.units)]
    responses += [rf"\boxed{{12\text{{{word}}}}}" for word in sorted(language.units)]
    responses += [_spaced(language, word, r"\boxed{12}") for word in sorted(language.fillers)]
    assert sorted(set(responses) - set(_accepted(grader, "12", responses))) == []


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
def test_language_without_table_is_graded_by_its_box_and_counted(response, untabled):
    with MathGrader(num_workers=1) as own:
        grade = own.grade_one(response, "12")
        assert grade.correct and grade.untabled == untabled
