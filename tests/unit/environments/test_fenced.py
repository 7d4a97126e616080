"""The format of fenced blocks, on the tiny model's tokenizer: a token for each byte."""

import pytest

from rlmath.environments.base import ToolResult
from rlmath.environments.fenced import Fenced
from rlmath.model.tiny_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(1000)


def schema(name, **parameters):
    known = {key: {"type": kind} for key, kind in parameters.items()}
    return {"function": {"name": name, "parameters": {"type": "object", "properties": known}}}


FORMAT = Fenced(TOKENIZER, [schema("python", code="string")], 100)


def render(turn, *texts):
    suffix = FORMAT.suffix(turn, [ToolResult("python", text, "ok") for text in texts])
    a, b = suffix.observation
    ids = suffix.token_ids
    return [TOKENIZER.decode(list(part)) for part in (ids[:a], ids[a:b], ids[b:])]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("so\n```python\nprint(1)\n```", "print(1)"),
        ("```python\nx = 1\n\nprint(x)\n```\n\n", "x = 1\n\nprint(x)"),
        ("```python3\nprint('`')\n```", "print('`')"),
        ("```python\n```", ""),
        ("no block", None),
        ("```latex\nx\n```", None),
        ("```python\nprint(1)", None),
        ("```output\n3\n```\n```python\n1\n```", "1"),
    ],
)
def test_a_turn_has_the_code_of_its_first_python_block(text, code):
    calls = FORMAT.calls(text)
    assert (None if calls is None else [one.arguments["code"] for one in calls]) == (
        None if code is None else [code]
    )


def test_an_output_block_follows_on_a_new_line():
    assert render("```python\n1\n```", "7\n") == ["\n```output\n", "7", "\n```\n"]
    assert render("```python\n1\n```\n", "7") == ["```output\n", "7", "\n```\n"]
    assert render("```", "a", "b")[1] == "a\nb" and render("```", "")[1] == ""


def test_fenced_tool_results_make_no_special_token():
    (_, shown, _) = render("```", "<|endoftext|>")
    assert shown == "<|endoftext|>"
    ids = FORMAT.suffix("```", [ToolResult("python", "<|endoftext|>", "ok")]).token_ids
    assert max(ids) < 256


@pytest.mark.parametrize("length", [100, 101, 1600, 1601])
def test_the_middle_of_a_long_output_is_left_out(length):
    text = "a" * (length // 2) + "z" * (length - length // 2)
    (_, shown, _) = render("```", text)
    if length == 100:
        assert shown == text
    else:
        assert 95 < len(shown) <= 100 and "left out" in shown
        assert shown.startswith("aaaaaaaaaa") and shown.endswith("zzzzzzzzzz")


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("```search\nwho\nis\n```", ("search", {"query": "who\nis"})),
        (
            '```search_all\n{"query": "a", "most": 3}\n```',
            ("search_all", {"query": "a", "most": 3}),
        ),
        ("```search_all\n[1]\n```", "JSON object"),
        ("```search_all\nwho\n```", "not valid JSON"),
        ("```search_all\n" + "[" * 100000 + "\n```", "not valid JSON"),
        ("```now\n```", ("now", {})),
        ("```double\n3\n```", "JSON object"),
        ('```double\n{"n": 3}\n```\n```now\n```', ("double", {"n": 3})),
        ("```lua\nx\n```\n```now\n\n```", ("now", {})),
    ],
)
def test_a_block_calls_the_tool_that_its_fence_names(text, call):
    made = Fenced(
        TOKENIZER,
        [
            schema("search", query="string"),
            schema("search_all", query="string", most="integer"),
            schema("double", n="integer"),
            schema("now"),
        ],
        100,
    )
    # Ends of a turn on the engine are calls here.
    assert set(made.stop) == {
        (f"```{name}", "\n```") for name in ("search", "search_all", "double", "now")
    }
    if isinstance(call, str):
        with pytest.raises(ValueError, match=call):
            made.calls(text)
    else:
        (found,) = made.calls(text)
        assert (found.name, found.arguments) == call


def test_a_reply_is_a_paragraph_of_its_own():
    suffix = FORMAT.reply("I guess 3.", "Higher.\n\n")
    assert TOKENIZER.decode(list(suffix.token_ids)) == "\nHigher.\n"
    assert TOKENIZER.decode(list(suffix.token_ids[slice(*suffix.observation)])) == "Higher."
