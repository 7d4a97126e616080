import asyncio
import threading
import time
from typing import Literal

import pytest

from rlmath.environments.base import End, ToolCall, Turn, TurnFormat
from rlmath.environments.functions import CallLimits, FunctionTool
from rlmath.environments.tools import ToolEnvironment
from rlmath.errors import ConfigError, InfrastructureError
from rlmath.types import Problem

pytestmark = pytest.mark.process

PROBLEM = Problem("p", "1 + 1?", (1,), ("2",), {"target": 5, "level": "easy"})


class Lines(TurnFormat):
    """Each line ``name key=value`` of a turn is a call; the values are Python literals."""

    stop = ()

    def calls(self, text):
        if "???" in text:
            raise ValueError("not a call")
        found = []
        for line in text.splitlines():
            name, *pairs = line.split()
            given = {key: eval(value) for key, value in (one.split("=", 1) for one in pairs)}
            found.append(ToolCall(name, given))
        return None if text.startswith("answer") else found

    def suffix(self, turn_text, results):
        raise NotImplementedError

    reply = suffix


def turn(text, number=0):
    return Turn(number, (), text)


def multiply(a: int, b: int = 2) -> int:
    """Multiplies two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        The product.
    """
    return a * b


async def slow_double(a: float, wait_s: float = 0.0) -> float:
    """Doubles.

    Args:
        a: A number.
        wait_s: Time to wait.
    """
    await asyncio.sleep(wait_s)
    return 2 * a


def choose(how: Literal["up", "down"], names: list[str] | None = None) -> str:
    """Chooses.

    Args:
        how: Direction.
        names: Names.
    """
    return f"{how} {names}"


def tool(function, timeout_s=5.0, output_bytes=1000):
    return FunctionTool("rollout.tools", function, CallLimits(timeout_s, output_bytes))


def test_the_schema_is_that_of_transformers():
    from transformers.utils import get_json_schema

    assert tool(multiply).schema == get_json_schema(multiply)
    assert tool(multiply).name == "multiply"
    parameters = tool(multiply).schema["function"]["parameters"]
    assert parameters["required"] == ["a"] and parameters["properties"]["a"]["type"] == "integer"


def test_function_tool_calls():
    found = tool(multiply).call({"a": 3})
    assert (found.name, found.status, found.text) == ("multiply", "ok", "6")
    assert tool(slow_double).call({"a": 1.5}).text == "3.0"
    assert tool(choose).call({"how": "up"}).text == "up None"
    assert tool(choose).call({"how": "up", "names": None}).text == "up None"
    assert tool(choose).call({"how": "up", "names": ["a"]}).text == "up ['a']"


@pytest.mark.parametrize(
    ("function", "arguments", "part"),
    [
        (multiply, {}, "'a' is a required property"),
        (multiply, {"a": "3"}, "multiply: a: '3' is not of type 'integer'"),
        (multiply, {"a": True}, "is not of type 'integer'"),
        (multiply, {"a": 1, "c": 1}, "'c' was unexpected"),
        (choose, {"how": "left"}, "how: 'left' is not one of ['up', 'down']"),
        (choose, {"how": "up", "names": [1]}, "names: "),
    ],
)
def test_arguments_that_do_not_fit_are_an_error_that_the_model_reads(function, arguments, part):
    found = tool(function).call(arguments)
    assert found.status == "error" and part in found.text


def test_arguments_that_the_check_cannot_take_are_an_error_too():
    deep = []
    for _ in range(5000):
        deep = [deep]
    for arguments in ({"a": deep}, {"a": {"\ud800": 1}}, {"a": 1, "\ud800": 1}):
        found = tool(multiply).call(arguments)
        assert found.status == "error" and found.text.encode()
    # Like any text that the model reads, cut.
    assert len(tool(multiply).call({"a": "x" * 10_000}).text) < 1100


def test_results_of_all_kinds():
    def returns(kind: str) -> str:
        """Returns something.

        Args:
            kind: Kind of result.
        """
        if kind == "exit":
            raise SystemExit(3)
        if kind == "down":
            raise InfrastructureError("the server is down")
        if kind == "own timeout":
            raise TimeoutError("of the function")
        return {
            "bytes": b"\xffok",
            "none": None,
            "long": "a" + "x" * 10_000_000 + "b",
            "dict": {"a": 1},
            "surrogate": "\ud800",
        }[kind]

    one = tool(returns)
    assert one.call({"kind": "bytes"}).text == "\ufffdok"
    assert one.call({"kind": "none"}).text == "None"
    assert one.call({"kind": "dict"}).text == "{'a': 1}"
    assert one.call({"kind": "surrogate"}).text == "?"
    long = one.call({"kind": "long"}).text
    assert long.startswith("ax") and long.endswith("xb") and len(long) < 1100
    for kind, text in (("exit", "SystemExit: 3"), ("?", "KeyError: '?'")):
        found = one.call({"kind": kind})
        assert (found.status, found.text) == ("error", text)
    assert one.call({"kind": "own timeout"}).status == "error"
    with pytest.raises(InfrastructureError, match="is down"):
        one.call({"kind": "down"})


def test_a_call_that_does_not_return_is_abandoned_and_counted():
    release = threading.Event()

    def hang() -> str:
        """Hangs."""
        release.wait(30)

    limits = CallLimits(0.1, 100)
    hanging = FunctionTool("t", hang, limits)
    begun = time.monotonic()
    assert hanging.call({}).status == "timeout" and time.monotonic() - begun < 5
    assert limits.abandoned == 1
    slow = FunctionTool("t", slow_double, limits).call({"a": 1.0, "wait_s": 30.0})
    assert slow.status == "timeout" and "within 0.1 s" in slow.text
    release.set()
    until = time.monotonic() + 10
    while limits.abandoned and time.monotonic() < until:
        time.sleep(0.01)
    assert limits.abandoned == 0
    limits.abandoned = 100
    with pytest.raises(InfrastructureError, match="100 calls have not returned"):
        hanging.call({})


def test_a_function_without_types_or_documentation_is_refused():
    def no_types(a):
        """Doc.

        Args:
            a: A.
        """

    def no_entry(a: int):
        """Doc."""

    def no_docs(a: int): ...

    for function in (no_types, no_entry, no_docs):
        with pytest.raises(ConfigError, match=r"rollout\.tools: .*Args"):
            tool(function)


def test_tool_environment():
    made = ToolEnvironment(Lines(), [tool(multiply), tool(choose)], max_calls=3)
    assert not made.has_state
    episode = made.begin(PROBLEM, 0)
    results = episode.respond(turn("multiply a=3\nmultiply a=3 b=5\nsearch q=1")).results
    assert [(one.status, one.text) for one in results[:2]] == [("ok", "6"), ("ok", "15")]
    assert results[2].status == "error" and "multiply, choose" in results[2].text
    assert episode.respond(turn("???")).results[0].text == "not a call"
    # All of a response count: several in a turn, and those that another episode was given.
    assert episode.respond(turn("multiply a=1", 1)).results[0].status == "refused"
    many = made.begin(PROBLEM, 0).respond(turn("multiply a=1\n" * 5)).results
    assert [one.status for one in many] == ["ok"] * 3 + ["refused"] * 2
    later = made.begin(PROBLEM, 0).respond(Turn(1, (), "multiply a=1\n" * 2, 2)).results
    assert [one.status for one in later] == ["ok", "refused"]
    assert episode.respond(turn("answer")) == End(None)
