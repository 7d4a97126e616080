import json
import math
import textwrap

import pytest

from rlmath.config.load import load
from rlmath.data import load_problems
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.grading import MathGrader
from rlmath.rewards import RewardSettingError, get_reward
from rlmath.rewards.mix import RewardMix
from tests.support.samples import make_sample

GOOD = "<think>\n7 times 8 is 56\n</think>\n<answer>\n56\n</answer>"


def chat(text):
    return [{"role": "assistant", "content": text}]


def value(reward, text, **columns):
    as_text = reward([text], **columns)
    assert reward([chat(text)], **columns) == as_text, "strings and messages score alike"
    assert len(as_text) == 1
    return as_text[0]


FORMAT = [
    (GOOD, 1.0),
    ("<think>\nmany\n\nlines\n</think>\n<answer>\n9\n</answer>", 1.0),
    (GOOD + "\n", 1.0),
    (
        "<think>\nI close with </answer> and open with <answer>.\n</think>\n<answer>\n9\n</answer>",
        1.0,
    ),
    ("<think>56, I think</think>", 0.0),
    ("<answer>56</answer>", 0.0),
    ("56", 0.0),
    ("", 0.0),
    ("<think>7 * 8</think><answer>56", 0.0),
    ("<think>7 * 8</answer><answer>56</think>", 0.0),
    # Cases that the published pattern let through.
    (GOOD + "\nand some more", 0.0),
    (GOOD + " and more", 0.0),
    (GOOD + "\n" + GOOD, 0.0),
    ("<think>\na\n<think>\nb\n</think>\n<answer>\nc\n</answer>", 0.0),
    ("<think>\na\n</think>\n<think>\nb\n</think>\n<answer>\nc\n</answer>", 0.0),
    ("<think>\na\n</think>\n<answer>\nb\n</answer>\n<answer>\nc\n</answer>", 0.0),
    ("<think>\na\n</think>\n<answer>\n<think>\nb\n</answer>", 0.0),
    ("before\n" + GOOD, 0.0),
    ("<think>\na\n</think>\nbetween\n<answer>\nb\n</answer>", 0.0),
    ("<think>a</think><answer>b</answer>", 0.0),
]


@pytest.mark.parametrize(("text", "expected"), FORMAT)
def test_format(text, expected):
    assert value(get_reward("format"), text) == expected


PREFILLED = GOOD.removeprefix("<think>\n")


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("Q\n<|assistant|>\n<think>\n", PREFILLED, 1.0),
        ("Q <think>", "\n" + PREFILLED, 1.0),
        (
            [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<think>\n"}],
            PREFILLED,
            1.0,
        ),
        ("Q", PREFILLED, 0.0),
        ("Q about <think> tags", PREFILLED, 0.0),
        ("Q\n<think>\n", GOOD, 0.0),  # the model opened it a second time
        ("Q", GOOD, 1.0),
    ],
)
def test_format_knows_a_template_that_opens_think(prompt, text, expected):
    assert value(get_reward("format"), text, prompts=[prompt]) == expected
    assert value(get_reward("tag_count"), text, prompts=[prompt]) == (1.0 if expected else 0.75)


def test_format_reward_with_an_open_think_tag():
    assert value(get_reward("format", think_prefilled=True), PREFILLED) == 1.0
    assert value(get_reward("format", think_prefilled=True), GOOD) == 0.0
    assert value(get_reward("format", think_prefilled=False), GOOD, prompts=["<think>\n"]) == 1.0


TAGS = [
    (GOOD, 1.0),
    ("7 times 8 is 56\n</think>\n<answer>\n56\n</answer>", 0.75),
    ("<think>\n7 times 8 is 56\n<answer>\n56\n</answer>", 0.75),
    ("<think>\n7 times 8 is 56\n</think>\n56\n</answer>", 0.75),
    ("<think>\n7 times 8 is 56\n</think>\n<answer>\n56", 0.75),
    ("7 times 8 is 56\n56", 0.0),
    ("<think>\na <think> b\n</think>\n<answer>\nc\n</answer>", 0.75),
    (GOOD + "\n" + GOOD, 0.0),
]


@pytest.mark.parametrize(("text", "expected"), TAGS)
def test_tag_count(text, expected):
    assert value(get_reward("tag_count"), text) == expected


STEPS = [
    ("Step 1: expand\nStep 2: collect terms\nStep 3: solve", 1.0),
    ("First, square both sides.\nSecond, take the root.\nFinally, check the sign.", 1.0),
    ("Step 1: complete the square", 1 / 3),
    ("First, square both sides.\nFinally, check the sign.", 2 / 3),
    ("The value is the root of a quadratic", 0.0),
    ("", 0.0),
    # A numbered list counts on every line, not only on the first.
    ("1. a\n2. b\n3. c", 1.0),
    ("The plan:\n1. a\n2. b", 2 / 3),
    ("  1) a\n  2) b", 2 / 3),
    ("- a\n- b\n- c", 1.0),
    ("So:\n* a\n* b", 2 / 3),
    # None of these is a list.
    ("1.5 apples\n2.25 pears\n3.0 plums", 0.0),
    ("x\n-5\n-6\n-7", 0.0),
    ("x\n**bold** word\n---\n", 0.0),
    ("Step 1 and Step 2", 0.0),
    ("1. a\n" * 50, 1.0),
]


@pytest.mark.parametrize(("text", "expected"), STEPS)
def test_reasoning_steps(text, expected):
    assert value(get_reward("reasoning_steps"), text) == pytest.approx(expected)


def test_reasoning_steps_is_linear_in_the_text():
    reward = get_reward("reasoning_steps")
    for text in ("Step " + "1" * 1_000_000, "\n" * 1_000_000, " " * 1_000_000, "1" * 1_000_000):
        reward([text])


REPETITION = [
    (2, -1.0, "let x be odd now", 0.0),
    (2, -1.0, "let let let let let", -0.75),
    (2, -1.0, "let x be let x be odd", -1 / 3),
    (3, -0.5, "let x be odd", 0.0),
    (3, -0.5, "odd odd odd odd", -0.25),
    (2, -1.0, "", 0.0),
    (3, -2.0, "let x be let x be odd", -0.4),
    (3, -1.0, "sum", 0.0),
    (3, -1.0, "five terms", 0.0),
    (3, -1.0, "four distinct terms", 0.0),
    (3, -1.0, "sum sum sum sum", -0.5),
    (3, -1.0, "six five six five", 0.0),
    (3, -0.5, "p q r p q", 0.0),
    (3, -1.0, "p q r p q r", -0.25),
    (3, -1.0, "p q r p q r t u v p q r p q r", -0.3846),
    (3, -1.0, "p q r s t u v w x y z k", 0.0),
    (2, -1.0, "Let X let x LET x", -0.6),
    (2, 0.0, "be be be be", 0.0),
]


@pytest.mark.parametrize(("size", "worst", "text", "expected"), REPETITION)
def test_repetition_penalty(size, worst, text, expected):
    reward = get_reward("repetition_penalty", ngram_size=size, max_penalty=worst)
    got = value(reward, text)
    assert got == pytest.approx(expected, abs=1e-4)
    assert math.copysign(1, got) == (1 if got == 0 else -1), "no -0.0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("所以所以所以", -3 / 5),  # 5 pairs, 2 of them distinct
        ("答案是四", 0.0),
        ("ですです", -1 / 3),
        ("และและ", -2 / 5),
        ("x 所以 x 所以", -2 / 5),  # x所, 所以, 以x
        ("so it is so it is", -2 / 5),
    ],
)
def test_repetition_penalty_without_spaces(text, expected):
    reward = get_reward("repetition_penalty", ngram_size=2)
    assert reward([text]) == [pytest.approx(expected)]
    by_space = get_reward("repetition_penalty", ngram_size=2, language="en")
    assert by_space([text.replace(" ", "")]) == [0.0], "one word"
    with pytest.raises(RewardSettingError, match="language='xx'"):
        get_reward("repetition_penalty", language="xx")


def test_repetition_penalty_over_tokens():
    reward = get_reward("repetition_penalty", ngram_size=2, unit="token")
    assert reward(["漢字漢字", "ab"], completion_ids=[[5] * 5, [1, 2, 3, 4]]) == [-0.75, 0.0]
    assert get_reward("repetition_penalty", ngram_size=2)([[1, 2, 3, 4], [5] * 5]) == [0.0, -0.75]
    with pytest.raises(RewardSettingError, match="completion_ids"):
        reward(["a b"])


@pytest.mark.parametrize("worst", [1.0, 1.5])
def test_repetition_penalty_that_pays_is_refused(worst):
    with pytest.raises(ValueError, match=f"max_penalty {worst} should not be positive"):
        get_reward("repetition_penalty", ngram_size=2, max_penalty=worst)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, 0.0),
        (50, 0.0),
        (80, 0.0),
        (81, -0.05),
        (90, -0.5),
        (100, -1.0),
        (101, -1.0),
        (110, -1.0),
    ],
)
def test_soft_overlong_punishment(tokens, expected):
    reward = get_reward("soft_overlong_punishment", max_completion_len=100, soft_punish_cache=20)
    ids = [[1] * tokens]
    # 1000 characters in each: only the tokens may count.
    assert reward(["a" * 1000], completion_ids=ids) == [pytest.approx(expected)]
    if tokens:
        assert reward(ids) == [pytest.approx(expected)], "token ids first, as TRL's form takes them"
    with pytest.warns(UserWarning, match="characters and not tokens"):
        assert reward(["a" * tokens]) == [pytest.approx(expected)]


def test_soft_overlong_punishment_by_share_of_the_limit():
    reward = get_reward("soft_overlong_punishment", max_completion_len=20480, soft_punish_share=0.2)
    assert reward.soft_punish_cache == 4096
    for both in ({}, {"soft_punish_cache": 1, "soft_punish_share": 0.1}):
        with pytest.raises(RewardSettingError, match="give one of"):
            get_reward("soft_overlong_punishment", max_completion_len=10, **both)


def test_stop_properly():
    reward = get_reward("stop_properly", penalty=-0.5)
    reasons = ["stop", "length", "abort", None]
    assert reward(["a"] * 4, finish_reason=reasons) == [0.0, -0.5, None, None]
    assert get_reward("stop_properly")(["a", "b"], finish_reason=["length", "stop"]) == [-1.0, 0.0]
    with pytest.raises(RewardSettingError, match="'finish_reason' is missing"):
        reward(["a"])
    with pytest.raises(RewardSettingError, match="should not be positive"):
        get_reward("stop_properly", penalty=0.5)


CODE = [
    ("<think>\nx\n</think>\n<answer>\n```python\nprint(1)\n```\n</answer>", "python", 1.0),
    (
        "<think>\n```python\nx = 1\n```\n</think>\n<answer>\n```python\nx\n```\n</answer>",
        "python",
        1.0,
    ),
    ("<think>\nx\n</think>\n<answer>\n```javascript\nx\n```\n</answer>", "javascript", 1.0),
    ("<think>\nx\n</think>\n<answer>\n```javascript\nx\n```\n</answer>", "python", 0.0),
    ("<think>\nx\n</think>\n<answer>\nHere:\n```cpp\nx\n```\nDone.\n</answer>", "cpp", 1.0),
    ("```python\nprint(1)\n```", "python", 0.0),
    ("<think>x</think><answer>Just text</answer>", "python", 0.0),
    ("<think>\nx\n</think>\n<answer>\n```\ndef f(): pass\n```\n</answer>", "python", 0.0),
    ("<answer>\n```python\nx\n```\n</answer>\n<think>\nx\n</think>", "python", 0.0),
    # The block is in the reasoning only, does not close, or is of another language.
    ("<think>\n```python\nx\n```\n</think>\n<answer>\n5\n</answer>", "python", 0.0),
    ("<think>\nx\n</think>\n<answer>\n```python\nx\n</answer>", "python", 0.0),
    ("<think>\nx\n</think>\n<answer>\n```cpp\nx\n```\n</answer>", "c", 0.0),
    ("<think>\nx\n</think>\n<answer>\n```python\nx\n```\n</answer>\nbye", "python", 0.0),
]


@pytest.mark.parametrize(("text", "language", "expected"), CODE)
def test_code_format(text, language, expected):
    assert value(get_reward("code_format", language=language), text) == expected
    assert value(get_reward("code_format"), text, language=[language]) == expected


def test_unknown_names_and_settings_are_explained():
    with pytest.raises(RewardSettingError, match=r"no reward named 'lenght'; there are: accuracy"):
        get_reward("lenght")
    with pytest.raises(RewardSettingError, match=r"no setting ngrams; its settings: ngram_size"):
        get_reward("repetition_penalty", ngrams=2)
    with pytest.raises(RewardSettingError, match="max_completion_len"):
        get_reward("soft_overlong_punishment")
    with pytest.raises(RewardSettingError, match="its settings: correct, incorrect, num_workers"):
        get_reward("math", right=1)


def test_a_completion_that_is_none_of_these_is_named():
    with pytest.raises(RewardSettingError, match="not int"):
        get_reward("format")([3])


# In the form of the GRPO notebooks: the question is the last message's content.
FUNCTIONS = """
    import re

    asked = []

    def correctness(prompts, completions, answer, **kwargs):
        question = prompts[0][-1]["content"]
        assert prompts[0][-1]["role"] == "user" and all(m[-1] for m in prompts)
        asked.append((question, [m["role"] for m in prompts[0]]))
        responses = [completion[0]["content"] for completion in completions]
        found = [re.findall(r"<answer>(.*?)</answer>", response) for response in responses]
        prompts[0].append(completions[0][0])
        return [2.0 if f and f[-1] == a else 0.0 for f, a in zip(found, answer)]

    def continued(prompts, completions, **kwargs):
        return [float(len(prompt + completion)) for prompt, completion in zip(prompts, completions)]

    def plain(prompts, completions, **kwargs):
        return [float(prompt.endswith("<|assistant|>")) for prompt in prompts]
"""
CHAT = [{"role": "system", "content": "Old."}, {"role": "user", "content": "1+1?"}]


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "notebook.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


def problem(tmp_path, prompt, *overrides):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": "2"}))
    data = load(["runner.run_dir=r", "model=tiny", "data.answer_key=answer", *overrides]).data
    tokenizer = LightTokenizer("tiny")
    return load_problems([path], data, tokenizer)[0][0]


def samples(*texts):
    return [make_sample("p", index, text=text) for index, text in enumerate(texts)]


def values(mix, one, label):
    found = mix.score_group(one, samples("<answer>2</answer>", "<answer>3</answer>"))
    return [sample.rewards[label] for sample in found]


CHATS = ["data.apply_chat_template=true"]
SYSTEM = [*CHATS, "data.system_prompt=New.", "data.prompt_template='Solve: {prompt}'"]


@pytest.mark.parametrize(
    ("prompt", "overrides", "question", "roles"),
    [
        ("1+1?", CHATS, "1+1?", ["user"]),
        (CHAT, CHATS, "1+1?", ["system", "user"]),
        (CHAT, SYSTEM, "Solve: 1+1?", ["system", "user"]),
        ("1+1?", SYSTEM, "Solve: 1+1?", ["system", "user"]),
        ("1+1?", [], "1+1?", ["user"]),  # Chat by the item's completion_format alone.
    ],
)
def test_a_notebooks_reward_reads_the_question(
    prompt, overrides, question, roles, functions, tmp_path
):
    one = problem(tmp_path, prompt, *overrides)
    names = [f"{functions}:correctness", f"{functions}:continued"]
    with RewardMix.from_config(names, completion_format="chat") as mix:
        for _ in range(2):  # What a function does to its messages is its own.
            assert values(mix, one, "correctness") == [2.0, 0.0]
            assert values(mix, one, "continued") == [len(roles) + 1] * 2
        asked = mix.items[0].reward.function.__globals__["asked"]
    assert asked == [(question, roles)] * 4


def test_functions_for_text_and_other_rewards_get_the_rendered_prompt(functions, tmp_path):
    one = problem(tmp_path, CHAT, *CHATS)
    with RewardMix.from_config([f"{functions}:plain"], completion_format="text") as mix:
        assert values(mix, one, "plain") == [1.0, 1.0]
    assert one.messages == tuple(CHAT)
    assert problem(tmp_path, "1+1?").messages is None


def test_messages_of_a_call_by_hand_stay_as_they_are(functions):
    with RewardMix.from_config([f"{functions}:correctness"], completion_format="chat") as mix:
        (scored,) = mix.score(["<answer>2</answer>"], prompts=[CHAT], answer=["2"])
    assert scored.total == 2.0 and len(CHAT) == 2


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
