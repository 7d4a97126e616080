"""vLLM's parsers read a finished text without a server, and why two formats have rlmath's."""

import pytest

from rlmath.checks.tools import tool_problems
from rlmath.config.load import load
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.engines.tool_parsers import vllm_tool_parser
from rlmath.environments.base import ToolCall
from rlmath.environments.call_parsers import hermes
from rlmath.environments.chat_format import ChatFormat
from rlmath.environments.chosen import Chosen
from rlmath.errors import ConfigError
from rlmath.model.tiny_tokenizer import build_tokenizer
from tests.unit.environments.test_chat_format import QWEN25, SCHEMA

XML = QWEN25.replace(
    "(c.function | tojson)",
    "'<function=' + c.function.name + '>\n' + params(c.function.arguments) + '</function>'",
)
XML = (
    "{% macro params(a) %}{% for k, v in a.items() %}"
    "{{ '<parameter=' + k + '>\n' + v + '\n</parameter>\n' }}{% endfor %}{% endmacro %}" + XML
)


@pytest.fixture(scope="module")
def tokenizer():
    made = build_tokenizer(8192)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.add_tokens(["<tool_call>", "</tool_call>"])
    return made


def test_a_template_with_xml_is_read_by_vllms_parser(tokenizer):
    parse = vllm_tool_parser("qwen3_coder", tokenizer, [SCHEMA])

    def calls(text):
        return [ToolCall(name, given) for name, given in parse(text)] or None

    with pytest.raises(ConfigError, match=r"name vLLM's for it as rollout\.tool_parser"):
        ChatFormat(tokenizer, XML, [SCHEMA], 100)
    made = ChatFormat(tokenizer, XML, [SCHEMA], 100, parser=calls)
    call = "<tool_call>\n<function=python>\n<parameter=code>\n1\nx = 2\n</parameter>\n</function>\n"
    found = [ToolCall("python", {"code": "1\nx = 2"})]
    assert made.calls(f"So {call}</tool_call>") == found
    assert made.calls(f"So {call}</tool_call>{call}</tool_call>") == found * 2
    assert made.calls("The answer is 3.") is None
    with pytest.raises(ConfigError, match="does not read"):
        ChatFormat(tokenizer, QWEN25, [SCHEMA], 100, parser=calls)


def test_checks_which_have_less_of_a_tokenizer_find_vllms_parser(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    given = ["tools=[python]", "tool_format=chat", "tool_parser=qwen3_coder"]
    config = load(["model.path=m", "runner.run_dir=r", *(f"rollout.{one}" for one in given)])
    parse = Chosen(config.rollout)._parser(LightTokenizer(tmp_path))
    call = "<function=python>\n<parameter=code>\n1\n</parameter>\n</function>\n"
    assert parse(f"<tool_call>\n{call}</tool_call>") == [ToolCall("python", {"code": "1"})]


def test_a_parser_that_fails_is_an_error_that_the_model_reads(tokenizer, monkeypatch):
    class Fails:
        def __init__(self, *given): ...

        def extract_tool_calls(self, *given):
            raise KeyError("name")

    manager = "vllm.tool_parsers.ToolParserManager"
    monkeypatch.setattr(f"{manager}.get_tool_parser", lambda name: Fails)
    with pytest.raises(ValueError, match="cannot be read"):
        vllm_tool_parser("own", tokenizer, [SCHEMA])("<tool_call>")


def test_a_parser_that_is_not_there_is_refused(tokenizer):
    for name in ("qwen9", "llama3_json"):  # The latter needs Llama's tokens.
        with pytest.raises(ConfigError, match=rf"rollout\.tool_parser={name}: "):
            vllm_tool_parser(name, tokenizer, [SCHEMA])
    given = ["tools=[python,no]", "tool_format=chat", "tool_parser=qwen9", "python_provider=e"]
    config = load(["model.path=m", "runner.run_dir=r", *(f"rollout.{one}" for one in given)])
    problems = "".join(tool_problems(config))
    for setting in ("tools=no", "tool_parser=qwen9", "python_provider=e"):
        assert f"rollout.{setting}: " in problems, "all of them are named at once"


def test_vllms_parser_of_hermes_takes_what_it_cannot_read_for_the_answer(tokenizer):
    parse = vllm_tool_parser("hermes", tokenizer, [SCHEMA])
    good = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    assert parse(good) == [("python", {"code": "1"})]
    code = good.replace('"1"', '"a\nb"')
    assert parse(code) == parse(f"{good}<tool_call>python(1)</tool_call>") == []
    assert hermes(code) == [ToolCall("python", {"code": "a\nb"})]
    with pytest.raises(ValueError, match="not valid JSON"):
        hermes(f"{good}<tool_call>python(1)</tool_call>")
