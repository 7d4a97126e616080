import pytest

from rlmath.grading import MathGrader
from rlmath.rewards import RewardSettingError, get_reward

RIGHT = r"\boxed{\frac{35}{216}}"
WRONG = r"\boxed{\frac{37}{216}}"
GOLD = r"\frac{35}{216}"


@pytest.fixture(scope="module")
def grader():
    with MathGrader(num_workers=1, timeout_s=2.0, fallback="none") as made:
        yield made


def ids(*lengths):
    return [[7] * n for n in lengths]


def test_accuracy(grader):
    reward = get_reward("accuracy", grader=grader)
    assert reward([RIGHT, WRONG, "no answer", ""], solution=[GOLD] * 4) == [1.0, 0.0, 0.0, 0.0]
    messages = [[{"role": "assistant", "content": RIGHT}]]
    assert reward(messages, solution=[GOLD]) == [1.0]
    assert reward([RIGHT], answers=[["1", GOLD]]) == [1.0]
    assert reward([RIGHT], solution=GOLD) == [1.0]
    assert reward([RIGHT], [GOLD]) == [1.0]
    assert get_reward("math", grader=grader)([RIGHT], [GOLD]) == [5.0]


@pytest.mark.parametrize("name", ["accuracy", "math", "cosine", "length"])
@pytest.mark.parametrize("gold", ["", "   ", None, []])
def test_an_unreadable_gold_is_none_everywhere(grader, name, gold):
    reward = get_reward(name, grader=grader)
    rows = [RIGHT, WRONG]
    assert reward(rows, solution=[gold, gold], completion_ids=ids(3, 9)) == [None, None]


def test_math_values(grader):
    reward = get_reward("math", grader=grader)
    assert reward([RIGHT, WRONG, "?"], answers=[[GOLD]] * 3) == [5.0, -5.0, -5.0]
    other = get_reward("math", correct=1.0, incorrect=0.0, grader=grader)
    assert other([RIGHT, WRONG], solution=[GOLD] * 2) == [1.0, 0.0]
    with pytest.raises(RewardSettingError, match="not below"):
        get_reward("math", correct=1.0, incorrect=1.0)
    with pytest.raises(RewardSettingError, match="fallback is 'numbers'"):
        get_reward("math", fallback="numbers")


def test_an_answer_that_upsets_the_grader_is_wrong_and_not_none():
    with get_reward("math", num_workers=1, timeout_s=0.5) as reward:
        hostile = [r"\boxed{9^{9^{9^9}}}", r"\boxed{100000!}", "\\boxed{" + "{" * 10_000 + "}"]
        assert reward(hostile, solution=["42"] * 3) == [-5.0] * 3


def test_fallback_is_a_setting():
    for fallback, expected in (("none", 0.0), ("marker", 1.0)):
        with get_reward("accuracy", fallback=fallback, num_workers=1) as reward:
            assert reward(["The answer is 42"], solution=["42"]) == [expected]


def test_multiple_choice():
    with get_reward("accuracy", task="multiple_choice", num_workers=1) as reward:
        assert reward([r"\boxed{(B)}", r"\boxed{C}"], solution=["B", "B"]) == [1.0, 0.0]
    with pytest.raises(RewardSettingError, match="task='quiz'"):
        get_reward("accuracy", task="quiz")


def test_no_gold_column_is_named(grader):
    with pytest.raises(RewardSettingError, match="no column with the accepted answers"):
        get_reward("accuracy", grader=grader)([RIGHT], prompts=["q"])


COSINE = {
    "min_value_wrong": -1.0,
    "max_value_wrong": -0.5,
    "min_value_correct": 0.5,
    "max_value_correct": 1.0,
    "max_len": 100,
}


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        (RIGHT, 20, 0.952),
        (RIGHT, 80, 0.548),
        (WRONG, 20, -0.952),
        (WRONG, 80, -0.548),
        (RIGHT, 0, 1.0),
        (RIGHT, 50, 0.75),
        (WRONG, 50, -0.75),
        (WRONG, 0, -1.0),
        (RIGHT, 100, 0.5),
        (WRONG, 100, -0.5),
        # Beyond the maximum the schedule stays where it is.
        (RIGHT, 150, 0.5),
        (RIGHT, 200, 0.5),
        (WRONG, 200, -0.5),
        (WRONG, 10_000, -0.5),
    ],
)
def test_cosine(grader, text, tokens, expected):
    reward = get_reward("cosine", grader=grader, **COSINE)
    padded = text + " " * 500  # characters must not count
    got = reward([padded], solution=[GOLD], completion_ids=ids(tokens))
    assert got == [pytest.approx(expected, abs=1e-3)]


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [(RIGHT, 20, 0.943), (RIGHT, 80, 0.547), (WRONG, 20, -0.942), (WRONG, 80, -0.547)],
)
def test_cosine_by_hand_without_tokens(grader, text, length, expected):
    # Open-R1's own cases: its texts are longer than 20 characters, so length stands for their own.
    reward = get_reward("cosine", grader=grader, **COSINE)
    padded = text + " " * (length - len(text))
    with pytest.warns(UserWarning, match="characters and not tokens"):
        assert reward([padded], [GOLD]) == [pytest.approx(expected, abs=0.005)]


def test_cosine_of_a_response_that_fills_the_limit(grader):
    reward = get_reward("cosine", exceeded=-10.0, grader=grader, **COSINE)
    got = reward([RIGHT] * 3, solution=[GOLD] * 3, completion_ids=ids(99, 100, 101))
    assert got[0] > 0 and got[1:] == [-10.0, -10.0]


def test_cosine_refuses_wrong_above_right(grader):
    with pytest.raises(RewardSettingError, match="above a right answer"):
        get_reward("cosine", min_value_wrong=0.6, max_value_wrong=2.0, grader=grader)


def test_length_within_one_group(grader):
    reward = get_reward("length", grader=grader)
    rows = [RIGHT, RIGHT, WRONG, WRONG]
    got = reward(rows, solution=[GOLD] * 4, completion_ids=ids(10, 20, 10, 30))
    assert got == [pytest.approx(v) for v in (0.5, 0.0, 0.0, -0.5)]
    # Equal lengths: nothing to choose between, right or wrong.
    assert reward([RIGHT, WRONG], solution=[GOLD] * 2, completion_ids=ids(5, 5)) == [0.0, 0.0]
    assert reward([RIGHT], solution=[GOLD], completion_ids=ids(5)) == [0.0]
    assert reward([], solution=[], completion_ids=[]) == []


def test_length_normalizes_in_each_problems_own_group(grader):
    reward = get_reward("length", grader=grader)
    rows = [RIGHT, RIGHT, r"\boxed{4}", r"\boxed{4}"]
    golds = [GOLD, GOLD, "4", "4"]
    lengths = ids(10, 20, 1000, 2000)
    alone = [0.5, -0.5, 0.5, -0.5]
    assert (
        reward(rows, solution=golds, completion_ids=lengths, prompts=["a", "a", "b", "b"]) == alone
    )
    assert reward(rows, solution=golds, completion_ids=lengths) == alone
    chats = [[{"role": "user", "content": q}] for q in "aabb"]
    assert reward(rows, solution=golds, completion_ids=lengths, prompts=chats) == alone
    # Two problems with one answer, told apart by their ids; interleaved.
    got = reward(
        [RIGHT] * 4,
        solution=[GOLD] * 4,
        completion_ids=ids(10, 1000, 20, 2000),
        problem_id=["a", "b", "a", "b"],
    )
    assert got == [0.5, 0.5, -0.5, -0.5]


def test_length_counts_tokens_and_not_characters(grader):
    reward = get_reward("length", grader=grader)
    got = reward([RIGHT + "x" * 900, RIGHT], solution=[GOLD] * 2, completion_ids=ids(5, 50))
    assert got == [0.5, -0.5]
    with pytest.warns(UserWarning, match="characters"):
        assert reward([RIGHT, RIGHT + "x" * 10], [GOLD] * 2) == [0.5, -0.5]


def test_length_leaves_rows_with_a_bad_gold_out(grader):
    reward = get_reward("length", grader=grader)
    got = reward(
        [RIGHT] * 3, solution=["", GOLD, GOLD], completion_ids=ids(5, 5, 15), problem_id=[1] * 3
    )
    assert got == [None, 0.5, -0.5]
