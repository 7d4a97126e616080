"""vLLM's parsers of tool calls, used on the text of a finished turn; they need no server."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlmath.errors import ConfigError
from rlmath.utils.close_names import did_you_mean


def find_vllm_tool_parser(name: str) -> Any:
    """The class of a parser by its name in ``vllm serve --tool-call-parser``. Raises ConfigError:
    there is none of that name, or it cannot be imported."""
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except Exception as error:  # A parser's module may fail in any way.
        known = ToolParserManager.list_registered()
        why = error if name in known else f"vLLM has none of that name{did_you_mean(name, known)}"
        raise ConfigError(f"rollout.tool_parser={name}: {why}") from error


def vllm_tool_parser(
    name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]
) -> Callable[[str], list[tuple[str, Any]]]:
    """A parser that returns name and arguments of each call of a text. It raises ValueError: a call
    cannot be read; the message is for the model.

    Args:
        name: As ``vllm serve --tool-call-parser`` takes it.
        tokenizer: The model's.

    Raises:
        ConfigError: There is none of that name, or the tokenizer has no tokens that it needs.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tokenizers.hf import get_cached_tokenizer

    parser = find_vllm_tool_parser(name)
    # They log a traceback for each call that they cannot read, and call it text.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    request = ChatCompletionRequest(messages=[], model="", tools=list(tools))
    tokenizer = get_cached_tokenizer(tokenizer)  # Each parser asks for the whole vocabulary.
    try:
        parser(tokenizer, request.tools)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"rollout.tool_parser={name}: {error}") from error

    def parse(text: str) -> list[tuple[str, Any]]:
        try:
            # It keeps the state of one text.
            found = parser(tokenizer, request.tools).extract_tool_calls(text, request)
            calls = [one.function for one in found.tool_calls]
            return [(call.name, json.loads(call.arguments)) for call in calls]
        except Exception as error:  # Each parser has its own, for a text that it cannot read.
            raise ValueError(f"The call cannot be read: {error}.") from error

    return parse
