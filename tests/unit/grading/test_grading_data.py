"""Every accepted answer of the real data sets against itself and against its neighbor."""

import pytest

SETS = (
    # Like the ones after them, and thousands.
    pytest.param("gsm8k_train", marks=pytest.mark.long),
    pytest.param("asdiv", marks=pytest.mark.long),
    "gsm8k_test",
    "aime24",
    "amc23",
    "minerva_math",
    "olympiadbench",
    "svamp",
    "mawps",
)


@pytest.mark.parametrize("name", SETS)
def test_correct_against_itself_and_wrong_against_the_next(name, real_answers, grader):
    golds = real_answers[name]
    own = grader.grade_batch([f"\\boxed{{{gold}}}" for gold in golds], golds)
    assert [g.gold for g in own if not g.correct] == []
    assert all(grader.check_gold(gold).usable for gold in set(golds))
    following = golds[1:] + golds[:1]
    other = grader.grade_batch([f"\\boxed{{{gold}}}" for gold in following], golds)
    taken = [(g.answer, g.gold) for g in other if g.correct and g.answer != g.gold]
    assert taken == []
    assert {g.status for g in other} <= {"correct", "wrong"}


SWAPS = (
    ("+", "-"),
    ("-", "+"),
    ("\\sin", "\\cos"),
    ("\\cos", "\\sin"),
    ("x", "y"),
    ("n", "m"),
    ("t", "s"),
    ("(", "["),
    ("[", "("),
    ("sqrt", "sqrt[3]"),
    ("<", ">"),
    ("pi", "e"),
)


@pytest.mark.parametrize(
    "name", ["minerva_math", "olympiadbench", pytest.param("asdiv", marks=pytest.mark.long)]
)
def test_wrong_after_a_changed_digit_sign_or_name(name, real_answers, grader):
    pairs = []
    for gold in sorted(set(real_answers[name])):
        places = [index for index, character in enumerate(gold) if character.isdigit()]
        for index in places[:: max(1, len(places) // 3)]:
            digit = str((int(gold[index]) + 1 + index % 9) % 10)
            if digit != gold[index]:
                pairs.append((gold[:index] + digit + gold[index + 1 :], gold))
        pairs += [(gold.replace(old, new, 1), gold) for old, new in SWAPS if old in gold]
    grades = grader.grade_batch([f"\\boxed{{{a}}}" for a, _ in pairs], [g for _, g in pairs])
    assert [(g.answer, g.gold, g.method) for g in grades if g.correct] == []
