from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlmath.commands.plugin_test.finding import Finding, findings
from rlmath.config.environments import ENVIRONMENTS, maker_of
from rlmath.data.prompts import OPENING_GLUE
from rlmath.environments.base import End, Episode, ToolCall, Turn
from rlmath.environments.classes import ClassEnvironment, UserClass
from rlmath.environments.fenced import Fenced
from rlmath.environments.functions import CallLimits
from rlmath.types import Problem

ROW = {"prompt": "2+2=", "solutions": ["4"], "answer": "4"}
TEXTS = ("I begin.", "The answer is \\boxed{4}.", "", "4")
# Values of parameters, by JSON type; tools get two of each.
_VALUES: dict[str, tuple[Any, Any]] = {
    "string": ("4", "a b"),
    "integer": (4, -1),
    "number": (4.0, 0.5),
    "boolean": (True, False),
    "array": ([], []),
    "object": ({}, {}),
}


def check_environment(name: str) -> Iterator[Finding]:
    """Test the invariants of the environment called ``name``, with its default options."""
    part = _Environment(name)
    return findings(
        {
            "its reset takes a row and its methods are tools": part.begins,
            "samples of a row begin with the same text": part.same_opening,
            "answers and rewards are as documented": part.answers,
            "deterministic, whatever other samples do": part.apart,
        }
    )


def _value(schema: Mapping[str, Any], which: int) -> Any:
    """One of two values of a parameter."""
    if "enum" in schema:
        return schema["enum"][0]
    schema = schema["anyOf"][0] if "anyOf" in schema else schema
    kind = schema.get("type", "string")
    return _VALUES[kind[0] if isinstance(kind, list) else kind][which]


class _Turns(Fenced):
    """Turns differ by number; each has its calls."""

    def __init__(self, calls: Mapping[str, list[ToolCall]]) -> None:
        self._calls = calls

    def calls(self, text: str) -> list[ToolCall] | None:
        return self._calls.get(text)


class _Environment:
    def __init__(self, name: str) -> None:
        self._name = name

    def user_class(self) -> UserClass:
        make = maker_of(self._name, ENVIRONMENTS.options(self._name)().plain())
        return UserClass(f"environment {self._name}", make, CallLimits(30.0, 2**16))

    def begin(self) -> tuple[Episode, list[Turn]]:
        """An episode, and turns that call each of its tools and then none."""
        made_of, calls = self.user_class(), {}
        for tool in made_of.methods:
            known = tool.schema["function"]["parameters"]["properties"]
            for which in (0, 1):
                arguments = {name: _value(one, which) for name, one in known.items()}
                calls[f"{tool.name} {which}"] = [ToolCall(tool.name, arguments)]
        said = made_of.opening(ROW)
        prompt = "2+2=" + (OPENING_GLUE + said if said else "")
        problem = Problem("p", prompt, (1,), ("4",), ROW)
        environment = ClassEnvironment(made_of, _Turns(calls), (), 100)
        turns = [Turn(number, (), text) for number, text in enumerate((*calls, *TEXTS))]
        return environment.begin(problem, 0), turns

    def play(self, *others: Episode) -> list[Any]:
        """Answers of an instance, with turns of others between."""
        episode, turns = self.begin()
        found: list[Any] = []
        for turn in turns:
            for other in others:
                other.respond(turn)
            said = episode.respond(turn)
            if isinstance(said, End):
                found.append(said.reward)
                break
            found.append([(one.status, one.text) for one in said.results])
        found.append(episode.reward())
        episode.close()
        return found

    def begins(self) -> Iterator[str]:
        self.begin()[0].close()
        yield from ()

    def same_opening(self) -> Iterator[str]:
        first, second = self.user_class().opening(ROW), self.user_class().opening(ROW)
        if first != second:
            yield f"it was {first!r}, and {second!r} for another sample"

    def answers(self) -> Iterator[str]:
        self.play()
        yield from ()

    def apart(self) -> Iterator[str]:
        alone, between = self.play(), self.play(self.begin()[0])
        for number, (one, other) in enumerate(zip(alone, between, strict=False)):
            if one != other:
                yield f"turn {number} was answered with {one}, and {other} beside another sample"
