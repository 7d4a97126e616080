"""Classes of users as environments, as TRL takes them, and those that reply to turns."""

import dataclasses
import threading
import time

import pytest

from rlmath.config.schema import DataConfig
from rlmath.data.prompts import EnvironmentTokenizer, PromptRenderer
from rlmath.environments.base import End
from rlmath.environments.classes import ClassEnvironment, UserClass
from rlmath.environments.functions import CallLimits
from rlmath.errors import ConfigError, InfrastructureError
from rlmath.model.tiny_tokenizer import build_tokenizer
from rlmath.types import Problem
from tests.unit.environments.test_functions import PROBLEM, Lines, multiply, tool, turn

pytestmark = pytest.mark.process


class Counter:
    """A game: reach the target."""

    closed = 0

    def reset(self, target, **row):
        self.total, self.target, self.row = 0, target, row

    def add(self, number: int) -> str:
        """Adds.

        Args:
            number: Number to add.
        """
        self.total += number
        return f"total {self.total}"

    async def read(self) -> int:
        """Reads the total."""
        return self.total

    def get_reward(self):
        return float(self.total == self.target)

    def close(self):
        type(self).closed += 1

    def _private(self): ...

    @property
    def broken(self):
        raise RuntimeError


class Guess:
    """Replies to turns until one has the answer."""

    def reset(self, answer="5"):
        self.answer = answer

    def step(self, text):
        is_right = self.answer in text
        return "Higher." * 1000, 0.25 + is_right, is_right

    def helper(self, untyped): ...


def made_of(make, timeout_s=5.0):
    return UserClass("rollout.environment=x:Y", make, CallLimits(timeout_s, 100))


def environment(make, tools=()):
    return ClassEnvironment(made_of(make), Lines(), tools, max_calls=9)


def test_a_class_is_an_environment():
    names = [one.name for one in made_of(Counter).methods]
    made = environment(Counter, [tool(multiply)])
    assert made.has_state and made.gives_reward and names == ["add", "read"]
    first, second = made.begin(PROBLEM, 0), made.begin(PROBLEM, 1)
    assert first.respond(turn("add number=5\nread\nmultiply a=4")).results[1].text == "5"
    assert second.respond(turn("read")).results[0].text == "0"
    for own in ("reset target=0", "get_reward", "close"):
        assert second.respond(turn(own)).results[0].status == "error"
    # An episode that a limit ends has the reward of its current state.
    assert (first.reward(), second.reward()) == (1.0, 0.0)
    assert first.respond(turn("answer")) == End(1.0)
    assert second.respond(turn("answer")) == End(0.0)
    before = Counter.closed
    first.close()
    first.close()
    made.close()
    assert Counter.closed == before + 1


def test_an_environment_replies_to_turns():
    made = environment(Guess)
    episode = made.begin(PROBLEM, 0)
    said = episode.respond(turn("answer n=3"))
    assert said.is_reply and said.results[0].status == "ok"
    # Cut like the output of a tool.
    assert said.results[0].text.startswith("Higher.") and len(said.results[0].text) < 200
    assert episode.reward() == 0.25
    assert episode.respond(turn("answer n=5", 1)) == End(1.5)
    assert made_of(Guess).methods == []


def test_environments_that_cannot_be_used_say_why():
    class Broken:
        def __init__(self):
            raise OSError("no disk")

    class NoReset: ...

    class Untyped:
        def reset(self): ...

        def move(self, where): ...

    class Silent:
        def reset(self): ...

    for make, part in (
        (Broken, "OSError while making it: no disk"),
        (NoReset, "NoReset has no method reset"),
        (Untyped, r"x:Y\.move"),
        (Silent, "Silent has no public method"),
    ):
        with pytest.raises(ConfigError, match=part):
            made_of(make)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"get_reward": lambda self: 1 / 0}, "ZeroDivisionError in get_reward"),
        ({"get_reward": lambda self: float("nan")}, "the reward is nan"),
        ({"get_reward": lambda self: "much"}, "the reward is 'much'"),
        ({"reset": lambda self: 3}, "reset returned int"),
        ({"step": lambda self, text: "Higher."}, "step returned 'Higher.'"),
        ({"step": lambda self, text: 1 / 0}, "ZeroDivisionError in step"),
    ],
)
def test_a_fault_of_an_environment_never_reaches_the_model(change, part):
    wrong = type("Wrong", (Guess if "step" in change else Counter,), change)
    with pytest.raises(InfrastructureError, match=part):
        environment(wrong).begin(PROBLEM, 0).respond(turn("answer"))


def test_slow_close_does_not_block():
    gate = threading.Event()

    class Slow(Counter):
        ended = 0

        def close(self):
            if hasattr(self, "total"):
                gate.wait(10)
                type(self).ended += 1

    made = environment(Slow)
    began_s = time.monotonic()
    for sample in range(5):
        made.begin(PROBLEM, sample).close()
    assert time.monotonic() - began_s < 4 and Slow.ended == 0
    gate.set()
    made.close()
    assert Slow.ended == 5


def test_each_instance_that_is_made_is_closed():
    class Fails(Counter):
        made = ended = 0

        def __init__(self):
            type(self).made += 1

        def reset(self, target, **row):
            raise OSError("no port left")

        def close(self):
            type(self).ended += 1

    made = environment(Fails)
    for _ in range(3):
        with pytest.raises(InfrastructureError, match="no port left"):
            made.begin(PROBLEM, 0)
    with pytest.raises(ConfigError, match="no port left"):
        made_of(Fails).opening(PROBLEM.columns)
    assert Fails.ended == Fails.made == 6


def test_a_row_is_the_instances_own():
    class Board(Counter):
        def reset(self, board, **row):
            board.append(row["more"].pop("x"))

    row = {"board": [1], "more": {"x": 2}}
    made = environment(Board)
    for sample in range(2):
        made.begin(Problem("q", "?", (1,), ("2",), row), sample)
    assert row == {"board": [1], "more": {"x": 2}}


def test_a_signal_while_an_environment_is_called_is_no_fault_of_it(monkeypatch):
    def interrupt(*given):
        raise KeyboardInterrupt

    made = made_of(Counter)
    monkeypatch.setattr(made.limits, "call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.opening(PROBLEM.columns)


def test_reset_text_ends_the_prompt():
    class Talks(Counter):
        def reset(self, target, **row):
            super().reset(target)
            return f"Reach {target}."

    class Random(Counter):
        count = 0

        def reset(self, target, **row):
            super().reset(target)
            type(self).count += 1
            return f"Game {self.count}."

    def problem(make):
        tokenizer = EnvironmentTokenizer(build_tokenizer(1000), None, (), made_of(make).opening)
        renderer = PromptRenderer(DataConfig(prompt_template="Play: {prompt}"), tokenizer)
        prompt = renderer.render("a game", PROBLEM.columns)
        return dataclasses.replace(PROBLEM, prompt=prompt)

    found = problem(Talks)
    assert found.prompt == "Play: a game\n\nReach 5." and problem(Counter).prompt == "Play: a game"
    assert environment(Talks).begin(found, 0).respond(turn("answer")) == End(0.0)
    for make, given in ((Random, problem(Random)), (Talks, PROBLEM)):
        with pytest.raises(ConfigError, match="the same for each sample of a row"):
            environment(make).begin(given, 0)
    # One that says nothing at first is not asked again.
    silent = made_of(Counter)
    assert silent.opening({"target": 3}) is None and silent.opening({}) is None
    with pytest.raises(ConfigError, match="TypeError in reset"):
        made_of(Talks).opening({})


def test_the_environment_sees_the_row_of_the_data():
    class Row(Counter):
        def reset(self, level, target=7):
            self.total, self.target = 0, (level, target)

    made = environment(Row)
    row = Problem("q", "1 + 1?", (1,), ("2",), {"level": "hard", "more": 1})
    assert made.begin(row, 0)._instance.target == ("hard", 7)
