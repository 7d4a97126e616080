import signal
import statistics
import textwrap
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from rlmath.config.schema import CompletionFormat, RewardItem
from rlmath.errors import UserError
from rlmath.grading import MathGrader
from rlmath.rewards import RewardError, RewardMix, RewardSettingError
from rlmath.rollout.group_state import group_from_state, group_to_state
from rlmath.training.grace import Grace
from rlmath.training.metrics import rollout_metrics
from rlmath.types import Group, Problem
from tests.support.samples import make_sample

FUNCTIONS = """
    import threading, time

    seen = {}

    def record(completions, **kwargs):
        seen.update(kwargs, completions=completions)
        return [1.0] * len(completions)

    def even_only(completions, **kwargs):
        return [float(len(c)) if len(c) % 2 == 0 else None for c in completions]

    def raises(completions, **kwargs):
        raise KeyError("nothing there")

    def logs(completions, log_metric, log_extra, trainer_state, **kwargs):
        log_metric("length", sum(map(len, completions)) / len(completions))
        log_extra("upper", [c.upper() for c in completions])
        return [float(trainer_state.global_step)] * len(completions)

    inside = 0
    most_inside = 0

    def one_at_a_time(completions, **kwargs):
        global inside, most_inside
        inside += 1
        most_inside = max(most_inside, inside)
        time.sleep(0.01)
        inside -= 1
        return [0.0] * len(completions)

    def at_once(completions, **kwargs):
        global inside, most_inside
        inside += 1
        most_inside = max(most_inside, inside)
        time.sleep(0.2)
        inside -= 1
        return [0.0] * len(completions)

    at_once.thread_safe = True
    at_once.needs_group = False
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return path


def globals_of(mix, index=0):
    return mix.items[index].reward.function.__globals__


def sample(index, text, finish_reason="stop", tokens=None):
    count = len(text) if tokens is None else tokens
    return make_sample("p", index, count, text=text, finish_reason=finish_reason)


PROBLEM = Problem(
    id="p", prompt="2+2?", prompt_token_ids=(1,), answers=("4", "four"), columns={"level": 3}
)


def test_a_group_of_samples():
    items = [
        {"name": "math"},
        {"name": "stop_properly", "weight": 2.0, "params": {"penalty": -1.0}},
        SimpleNamespace(name="length", weight=0.5, params={}),
    ]
    samples = [
        sample(0, r"\boxed{4}", tokens=10),
        sample(1, r"\boxed{5}", tokens=20),
        sample(2, "so", "length", tokens=30),
    ]
    with RewardMix.from_config(items, correct=5.0, incorrect=-5.0, num_workers=1) as mix:
        graded = mix.score_group(PROBLEM, samples)
        assert [g.sample for g in graded] == samples
        assert [g.reward for g in graded] == [5.25, -5.0, -7.25]
        assert [g.correct for g in graded] == [True, False, False]
        assert [g.status for g in graded] == ["correct", "wrong", "no_answer"]
        assert [g.answer for g in graded] == ["4", "5", None]
        assert graded[2].rewards == {"math": -5.0, "stop_properly": -1.0, "length": -0.5}
        figures = mix.metrics()
    assert figures["rewards/math/mean"] == pytest.approx(-5 / 3)
    assert figures["rewards/math/std"] == pytest.approx(statistics.pstdev([5, -5, -5]))
    assert figures["rewards/math/none_share"] == 0.0
    assert figures["rewards/math/seconds"] >= 0.0
    assert figures["rewards/math/status/correct"] == 1.0
    assert figures["rewards/math/status/no_answer"] == 1.0
    assert figures["rewards/total/mean"] == pytest.approx(-7 / 3)
    assert not any("length/status" in name for name in figures), "graded once, counted once"


def test_a_reward_of_weight_0_grades_and_adds_nothing():
    items = [{"name": "math", "weight": 0}, {"name": "format"}]
    texts = [r"\boxed{4}", r"\boxed{5}", "4"]
    with RewardMix.from_config(items, num_workers=1) as mix:
        graded = mix.score_group(PROBLEM, [sample(i, text) for i, text in enumerate(texts)])
    assert [g.correct for g in graded] == [True, False, False]
    assert [g.reward for g in graded] == [g.rewards["format"] for g in graded]


def test_foreign_reward_function_arguments(functions):
    with RewardMix.from_config([f"{functions}:record"]) as mix:
        mix.score_group(PROBLEM, [sample(0, "abc", "length")])
        seen = globals_of(mix)["seen"]
        assert seen["completions"] == ["abc"] and seen["prompts"] == ["2+2?"]
        assert seen["completion_ids"] == [[0, 1, 2]] and seen["finish_reason"] == ["length"]
        assert seen["solution"] == [["4", "four"]] and seen["level"] == [3]
    with RewardMix.from_config([f"{functions}:record"], completion_format="chat") as mix:
        mix.score(["abc"], answers=[["4"]])
        seen = globals_of(mix)["seen"]
        assert seen["completions"] == [[{"role": "assistant", "content": "abc"}]]
        assert seen["solution"] == ["4"]
        assert seen["prompts"] == [[{"role": "user", "content": ""}]]


def test_fields_of_the_data_that_have_reserved_names(functions):
    row = {"completions": "x", "prescored": 1, "self": 2, "answers": "no", "solution": "by parts"}
    problem = Problem("p", "2+2?", (1,), ("4",), columns=row)
    with RewardMix.from_config(["math", f"{functions}:record"]) as mix:
        (graded,) = mix.score_group(problem, [sample(0, r"\boxed{4}")])
        assert graded.rewards == {"math": 5.0, "record": 1.0}
        seen = globals_of(mix, 1)["seen"]
        assert seen["solution"] == ["by parts"], "a foreign function sees the data as it is"
        assert seen["answers"] == [["4"]]


TRL_FUNCTIONS = """
    def by_answer(prompts, completions, answer, **kwargs):
        return [float(c == a) for c, a in zip(completions, answer)]

    def by_level(completions, level, *, scale, weight=1.0, **kwargs):
        return [scale * x for x in level]

    class Judge:
        def __call__(self, completions, rubric):
            return [1.0 for _ in rubric]

    judge = Judge()
"""


@pytest.fixture
def trl_functions(tmp_path):
    path = tmp_path / "trl_functions.py"
    path.write_text(textwrap.dedent(TRL_FUNCTIONS))
    return path


@pytest.mark.parametrize(
    ("function", "params", "parameter"),
    [("by_answer", {}, "answer"), ("by_level", {}, "scale"), ("judge", {}, "rubric")],
)
def test_a_parameter_without_a_column_is_found_before_the_start(
    trl_functions, function, params, parameter
):
    problems = [PROBLEM, Problem("rows:2", "?", (1,), ("4",), columns={"level": 1, "score": 2})]
    item = {"name": f"{trl_functions}:{function}", "params": params}
    with RewardMix.from_config([item]) as mix, pytest.raises(RewardSettingError) as found:
        mix.check_columns(problems)
    message = str(found.value)
    assert message.startswith(f"reward {function.replace('judge', 'Judge')} ({trl_functions}:")
    assert f"its parameter {parameter} in p; the columns are: " in message
    assert "level" in message and "finish_reason" in message and "\n" not in message


def test_every_row_is_checked_and_what_is_bound_or_given_is_not_missing(trl_functions, functions):
    rows = [PROBLEM, Problem("rows:2", "?", (1,), ("4",), columns={"score": 2})]
    item = {"name": f"{trl_functions}:by_level", "params": {"scale": 2.0}}
    with RewardMix.from_config([item, "math", f"{functions}:record"]) as mix:
        mix.check_columns(rows[:1])
        with pytest.raises(RewardSettingError, match="parameter level in rows:2"):
            mix.check_columns(rows)


def test_a_none_takes_no_part_in_the_total(functions):
    items = [{"name": f"{functions}:even_only"}, {"name": "tag_count", "weight": 2.0}]
    with RewardMix.from_config(items) as mix:
        one, two = mix.score(["odd", "even"])
        assert (one.total, one.rewards) == (0.0, {"even_only": None, "tag_count": 0.0})
        assert two.total == 4.0
        assert mix.metrics()["rewards/even_only/none_share"] == 0.5
    with RewardMix.from_config(items[:1]) as mix:
        assert [s.total for s in mix.score(["odd", "even"])] == [None, 4.0]
        figures = mix.metrics()
        assert figures["rewards/total/none_share"] == 0.5 and figures["rewards/total/mean"] == 4.0
    with RewardMix.from_config([{**items[0], "required": True}, items[1]]) as mix:
        assert [s.total for s in mix.score(["odd", "even"])] == [None, 4.0]
    # A weight of 0 only logs: what it scores alone is no total.
    with RewardMix.from_config([items[0], {"name": "tag_count", "weight": 0.0}]) as mix:
        assert [s.total for s in mix.score(["odd", "even"])] == [None, 4.0]


def test_a_bad_gold_has_no_total_and_no_verdict():
    with RewardMix.from_config(["math"]) as mix:
        (scored,) = mix.score([r"\boxed{4}"], answers=[[""]])
        assert (scored.total, scored.correct, scored.status) == (None, None, "bad_gold")
        assert mix.metrics()["rewards/math/status/bad_gold"] == 1.0


def test_an_item_with_a_grader_of_its_own_gives_the_verdict():
    lenient = {"name": "math", "params": {"fallback": "marker", "num_workers": 1}}
    with RewardMix.from_config([lenient, "accuracy"], num_workers=1) as mix:
        (scored,) = mix.score(["The answer is 4"], answers=[["4"]])
        assert scored.rewards == {"math": 5.0, "accuracy": 0.0}
        assert (scored.correct, scored.status) == (True, "correct")
        figures = mix.metrics()
        assert figures["rewards/math/status/correct"] == 1.0
        assert figures["rewards/accuracy/status/no_answer"] == 1.0


def test_a_grader_that_is_handed_in_stays_open():
    grader = MathGrader(num_workers=1, fallback="marker")
    with RewardMix.from_config(["accuracy"], grader=grader) as mix:
        assert mix.score(["The answer is 4"], answers=[["4"]])[0].total == 1.0
    assert grader.grade_one("The answer is 4", "4").correct
    assert grader.counts()["correct"] == 2
    grader.close()


def test_box_beside_language_without_table_reaches_metrics_and_saved_groups():
    texts = [r"Odpowiedź: \boxed{4}", r"so \boxed{4}", "łódź", r"Ответ: \boxed{4}"]
    with RewardMix.from_config(["accuracy"]) as mix:
        graded = mix.score_group(PROBLEM, [sample(i, text) for i, text in enumerate(texts)])
    group = Group(PROBLEM, tuple(graded))
    assert [one.untabled for one in graded] == [True, False, False, False]
    assert rollout_metrics([group])["grading/untabled_share"] == 0.25
    saved = group_from_state(group_to_state(group), PROBLEM)
    assert [one.untabled for one in saved.samples] == [True, False, False, False]


def test_a_reward_that_raises_is_one_message_with_place_samples_and_columns(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import json\n\n"
        "def helper(text):\n    return json.loads(text)\n\n"
        "def parse(completions, **kwargs):\n    return [helper(c)['x'] for c in completions]\n\n"
        "async def later(completions, **kwargs):\n    return [kwargs['nowhere']]\n"
    )
    columns = {"problem_id": ["a", "a", "b"], "level": [1, 1, 2]}
    with RewardMix.from_config([f"{file}:parse"]) as mix:
        with pytest.raises(RewardError) as caught:
            mix.score(["{}", "{", "[]"], **columns)
        text = str(caught.value)
    # The failing line is in a library; the author's line that called it is named.
    assert f"{file}:7 in parse" in text or f"{file}:7 in <listcomp>" in text
    assert "reward parse: KeyError: 'x'" in text
    assert "3 completions of problem a, b" in text
    assert "completions, level, problem_id" in text
    assert isinstance(caught.value, UserError)
    expected = {
        "parse": r"JSONDecodeError(.|\n)*mine\.py:4 in helper",
        "later": r"mine\.py:10 in later(.|\n)*scored 1 completion",
    }
    for name, match in expected.items():
        with (
            RewardMix.from_config([f"{file}:{name}"]) as mix,
            pytest.raises(RewardError, match=match),
        ):
            mix.score(["{"])


def test_a_reward_that_exits_is_an_error_of_the_reward_and_ends_neither_run_nor_event_loop(
    tmp_path,
):
    file = tmp_path / "mine.py"
    file.write_text(
        "import argparse, sys\n\n"
        "def leaves(completions, **kwargs):\n    sys.exit()\n\n"
        "def parses(completions, **kwargs):\n    argparse.ArgumentParser().parse_args(['--x'])\n\n"
        "async def later(completions, **kwargs):\n    sys.exit(3)\n\n"
        "async def fine(completions, **kwargs):\n    return [1.0]\n"
    )
    for name, line in {"leaves": 4, "parses": 7, "later": 10}.items():
        with (
            RewardMix.from_config([f"{file}:{name}"]) as mix,
            pytest.raises(RewardError, match=rf"SystemExit(.|\n)*mine\.py:{line} in {name}"),
        ):
            mix.score(["a"])
    with RewardMix.from_config([f"{file}:later", f"{file}:fine"], on_error="none") as mix:
        assert mix.score(["a"])[0].rewards == {"later": None, "fine": 1.0}
    file.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(RewardSettingError, match="SystemExit while loading it"):
        RewardMix.from_config([f"{file}:leaves"])


def test_a_signal_during_a_reward_ends_the_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, signal\n"
        "def told(completions, **kwargs):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return [1.0]\n"
    )
    with (
        Grace(1.0, lambda: False),
        RewardMix.from_config([f"{file}:told"]) as mix,
        pytest.raises(SystemExit) as caught,
    ):
        mix.score(["a"])
    assert caught.value.code == 128 + signal.SIGTERM


def test_reward_functions_cannot_change_shared_arguments(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def uses_up(completions, tests, info, prompts, solution, **kwargs):\n"
        "    values = []\n"
        "    for one, about in zip(tests, info):\n"
        "        values.append(len(one) - 10 * len(about['seen']))\n"
        "        one.clear()\n"
        "        about['seen'].append(1)\n"
        "    solution.clear()\n"
        "    completions.clear()\n"
        "    prompts[:] = ['']\n"
        "    return values\n"
    )
    columns = {"tests": [1, 2, 3], "info": {"seen": []}}
    problem = Problem("p", "1+1?", (1,), ("2",), columns=columns)
    samples = [sample(index, r"\boxed{2}") for index in range(2)]
    items = [{"name": f"{file}:uses_up", "label": name} for name in ("one", "two")]
    with RewardMix.from_config([*items, "accuracy"]) as mix:
        for _epoch in range(2):
            for graded in mix.score_group(problem, samples):
                assert graded.rewards == {"one": 3.0, "two": 3.0, "accuracy": 1.0}
    assert columns == {"tests": [1, 2, 3], "info": {"seen": []}}


def test_reward_logs_its_own_metrics(functions):
    with RewardMix.from_config([f"{functions}:logs"]) as mix:
        mix.set_step(7, 100)
        one, two = mix.score(["a", "bcd"])
        assert one.total == 7.0 and two.extra == {"upper": "BCD"}
        assert mix.metrics()["rewards/logs/length"] == 2.0


def test_reward_mix_scope():
    with RewardMix.from_config(["format", "math", "stop_properly"]) as mix:
        (alone,) = mix.score([r"\boxed{4}"], answers=[["4"]], finish_reason=["stop"])
        assert alone.total == 5.0
    with RewardMix.from_config(["math", "length"], num_workers=1) as mix:
        samples = [sample(0, r"\boxed{4}", tokens=5), sample(1, r"\boxed{4}", tokens=9)]
        pieces = [mix.prescore_group(PROBLEM, [s])[0] for s in reversed(samples)][::-1]
        assert [p.values for p in pieces] == [{"math": 5.0}] * 2
        graded = mix.grade(samples, mix.begin_group(PROBLEM, samples, pieces))
        assert [g.reward for g in graded] == [5.5, 4.5]
        assert graded == mix.score_group(PROBLEM, samples), "the same as all at once"
        with pytest.raises(RewardSettingError, match="1 prescored pieces for 2"):
            mix.begin_group(PROBLEM, samples, pieces[:1])


def test_items_of_the_settings_have_a_format_and_a_scope(functions):
    function = f"{functions}:record"
    items = [
        RewardItem(function, label="a", completion_format=CompletionFormat.chat, needs_group=False),
        RewardItem(function, label="b"),
    ]
    with RewardMix.from_config(items, completion_format="text") as mix:
        assert [i.completion_format for i in mix.items] == ["chat", "text"]
        assert [i.reward.needs_group for i in mix.items] == [False, True]
        mix.prescore(["abc"], prompts=["p"])
        assert globals_of(mix)["seen"]["completions"] == [[{"role": "assistant", "content": "abc"}]]
    with pytest.raises(RewardSettingError, match="length: needs_group=false"):
        RewardMix.from_config([RewardItem("length", needs_group=False)])
    with pytest.raises(RewardSettingError, match="completion_format='list'"):
        RewardMix.from_config([{"name": function, "completion_format": "list"}])


def test_reward_mix_with_many_threads(functions):
    items = ["math", f"{functions}:one_at_a_time"]
    with RewardMix.from_config(items, num_workers=1) as mix, ThreadPoolExecutor(8) as pool:

        def score(i):
            return mix.score([rf"\boxed{{{i}}}", r"\boxed{-1}"], answers=[[str(i)]] * 2)

        for right, wrong in pool.map(score, range(40)):
            assert (right.total, wrong.total) == (5.0, -5.0)
        figures = mix.metrics()
        assert figures["rewards/math/status/correct"] == 40.0
        assert figures["rewards/math/mean"] == pytest.approx(0.0, abs=1e-9)
        assert globals_of(mix, 1)["most_inside"] == 1, "TRL never calls one reward twice at once"


def test_thread_safe_rewards_run_side_by_side(functions):
    with RewardMix.from_config([f"{functions}:at_once"]) as mix, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: mix.score(["a"]), range(4)))
        assert globals_of(mix)["most_inside"] > 1


def test_settings_that_cannot_work():
    with pytest.raises(RewardSettingError, match=r"reward.items is empty"):
        RewardMix.from_config([])
    with pytest.raises(RewardSettingError, match="all weights are 0"):
        RewardMix.from_config([{"name": "format", "weight": 0}])
    with pytest.raises(RewardSettingError, match="knows only"):
        RewardMix.from_config([{"name": "format", "wieght": 1}])
    with pytest.raises(RewardSettingError, match="two rewards have the label"):
        RewardMix.from_config(["format", {"name": "tag_count", "label": "format"}])
    with (
        RewardMix.from_config(["length"]) as mix,
        pytest.raises(
            RewardSettingError, match="length: token lengths need the column completion_ids"
        ),
    ):
        mix.score(["a"], answers=[["4"]])
