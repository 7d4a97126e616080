"""Rendering of prompt fields to text, and encoding of texts to tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlmath.config.schema import DataConfig
from rlmath.data.files import MalformedRowError
from rlmath.errors import UserError
from rlmath.model.chat import CLOCK, clock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlmath.data.light_tokenizer import LightTokenizer

    Tokenizer: TypeAlias = "PreTrainedTokenizerBase | LightTokenizer | EnvironmentTokenizer"

_TEXTS_PER_CALL = 8192
# Between a problem and the text that an environment adds.
OPENING_GLUE = "\n\n"
_NO_SYSTEM = "write it into data.prompt_template, as in 'INSTRUCTIONS {prompt}'"


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Raises UserError: the folder has none that
    transformers can load."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise UserError(f"model.path={folder}: there is no such folder")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.path={folder}: no tokenizer could be loaded from it ({error}); it needs the "
            "model's tokenizer.json and tokenizer_config.json"
        ) from error


class EnvironmentTokenizer:
    """A tokenizer for prompts that an environment takes part in.

    Args:
        tokenizer: The model's.
        template: In place of its chat template.
        tools: Schemas of tools that the template lists.
        opening: Returns the text that the environment adds to the problem of a row, if any.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        tools: Sequence[Mapping[str, Any]],
        opening: Callable[[Mapping[str, Any]], str | None] | None,
    ) -> None:
        self._tokenizer, self.chat_template, self._tools = tokenizer, template, list(tools)
        self.opening = opening  # As given.
        self.tool_names = [str(tool["function"]["name"]) for tool in tools]  # Names of the tools.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._tokenizer(*arguments, **options)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """The text of a chat whose model may call the tools."""
        return self._tokenizer.apply_chat_template(
            messages, chat_template=self.chat_template, tools=self._tools or None, **options
        )


class PromptRenderer:
    """Renders a prompt field as the text that the model continues.

    ``prompt_template`` is filled first (for a list of chat messages: with the last one's content),
    then the chat template is applied.
    """

    def __init__(self, settings: DataConfig, tokenizer: Tokenizer) -> None:
        """
        Raises:
            UserError: The settings contradict each other or ask for what the tokenizer lacks.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        self._template_checked = False
        self._opening = None
        if isinstance(tokenizer, EnvironmentTokenizer):
            self._opening = tokenizer.opening
        if settings.apply_chat_template and not tokenizer.chat_template:
            raise UserError(
                "data.apply_chat_template=true: the model's tokenizer has no chat template; use "
                "data.prompt_template, or prompts with the chat markers in them"
            )
        if settings.system_prompt is not None and not settings.apply_chat_template:
            raise UserError(
                "data.system_prompt is the first message of a chat: it needs "
                "data.apply_chat_template=true"
            )
        if settings.prompt_template is not None and "{prompt}" not in settings.prompt_template:
            raise UserError(
                f"data.prompt_template={settings.prompt_template!r}: there is no {{prompt}} in it"
            )

    def render(self, value: Any, row: Mapping[str, Any]) -> str:
        """The text of a prompt field. ``value``: the field's. ``row``: all fields, for an
        environment. Raises MalformedRowError: as :func:`chat_messages`, or the chat template
        refuses it."""
        messages = self.messages(value, row)
        if not self._settings.apply_chat_template:
            return messages[-1]["content"]
        return self._apply_chat_template(messages)

    def messages(self, value: Any, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """The chat messages of a prompt field: template filled, system prompt first. ``value``: the
        field's. ``row``: all fields, for an environment. Raises MalformedRowError: as
        :func:`chat_messages`."""
        messages = chat_messages(value, bool(self._settings.apply_chat_template))
        text = self._fill_template(messages[-1]["content"])
        if self._opening is not None and (said := self._opening(row)):
            text += OPENING_GLUE + said
        messages[-1] = {"role": "user", "content": text}
        system = self._settings.system_prompt
        if system is not None:
            rest = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": system}, *rest]
        return messages

    def _fill_template(self, text: str) -> str:
        template = self._settings.prompt_template
        # Not str.format: a template may well hold braces, as in \boxed{}.
        return text if template is None else template.replace("{prompt}", text)

    def _apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        try:
            text = self._render(messages)
        except Exception as error:  # A template's own, such as TypeError, beside Jinja's.
            self._check_renders(messages, error)
            roles = ", ".join(message["role"] for message in messages)
            raise MalformedRowError(
                f"the chat template refuses the messages ({roles}): {error}"
            ) from error
        if not self._template_checked:
            self._check_keeps(messages, text)
            self._template_checked = True
        return text

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                **{CLOCK: clock(self._settings.template_date), **self._settings.template_options},
            )
        )

    @property
    def _template(self) -> str:
        return f"the chat template in {self._tokenizer.name_or_path}"

    def _check_renders(self, messages: list[dict[str, str]], error: Exception) -> None:
        """Raise ``UserError`` if the failed template would fail for other rows as well."""
        try:
            self._render([{"role": "user", "content": "1 + 1?"}])
        except Exception as plain:
            raise UserError(
                f"{self._template} (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json) fails for a plain message of the user: {plain}; use the "
                "one that was published with the model, or data.prompt_template without "
                "data.apply_chat_template"
            ) from plain
        if self._settings.system_prompt is None or self._without_system(messages) is None:
            return
        raise UserError(
            f"data.system_prompt: {self._template} refuses a system message ({error}); {_NO_SYSTEM}"
        ) from error

    def _check_keeps(self, messages: list[dict[str, str]], text: str) -> None:
        """Raise ``UserError`` for a template that drops the user's message or the system prompt,
        which transformers does silently."""
        last = messages[-1]
        other = [*messages[:-1], last | {"content": last["content"] + " x"}]
        if self._render(other) == text:
            raise UserError(
                f"{self._template} leaves out the user's message: every prompt would be {text!r}"
            )
        system = self._settings.system_prompt
        # A template may have the same one by default.
        if system is None or system.strip() in text or self._without_system(messages) != text:
            return
        raise UserError(
            f"data.system_prompt: {self._template} leaves out system messages; {_NO_SYSTEM}"
        )

    def _without_system(self, messages: list[dict[str, str]]) -> str | None:
        """The text of all but the first message; ``None`` if the template refuses them."""
        try:
            return self._render(messages[1:])
        except Exception:
            return None


class Encoder:
    """Encodes texts to token ids, in batches, without doubling special tokens.

    A tokenizer may put its own tokens first (Llama's and DeepSeek's begin-of-sequence). They are
    added before a plain text unless it begins with them already, and not after a chat template,
    which writes its own. Tokens that a tokenizer would put last are never added, because a model
    does not continue after its end-of-sequence token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        bare = self._plain(["1"])[0]
        full = list(tokenizer("1").input_ids)
        place = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        self.first_tokens: tuple[int, ...] = tuple(full[:place])

    def encode(self, texts: Sequence[str], add_first_tokens: bool) -> list[tuple[int, ...]]:
        """Token ids of each text; markers of special tokens in it become those tokens."""
        first = self.first_tokens if add_first_tokens else ()
        result: list[tuple[int, ...]] = []
        for start in range(0, len(texts), _TEXTS_PER_CALL):
            for ids in self._plain(texts[start : start + _TEXTS_PER_CALL]):
                tokens = tuple(ids)
                result.append(tokens if tokens[: len(first)] == first else first + tokens)
        return result

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return encoded["input_ids"]


def chat_messages(value: Any, apply_chat_template: bool) -> list[dict[str, str]]:
    """A prompt field as chat messages; a text is one user message.

    Raises:
        MalformedRowError: The field is empty, is neither a text nor a list of chat messages whose
            last is the user's, or is a list of several without ``apply_chat_template``.
    """
    if isinstance(value, str):
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list):
        if not apply_chat_template and len(value) > 1:
            raise MalformedRowError(
                "a list of chat messages: it needs data.apply_chat_template=true"
            )
        messages = [_message(item) for item in value]
    else:
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise MalformedRowError(f"a prompt is a text or a list of chat messages, this is {kind}")
    if not messages or not messages[-1]["content"].strip():
        raise MalformedRowError("the prompt is empty")
    if messages[-1]["role"] != "user":
        raise MalformedRowError(
            f"the last chat message is by {messages[-1]['role']!r}; it must be the user's, "
            "which the model then answers"
        )
    return messages


def _message(item: Any) -> dict[str, str]:
    if (
        not isinstance(item, dict)
        or not isinstance(item.get("role"), str)
        or not isinstance(item.get("content"), str)
    ):
        raise MalformedRowError(
            f'a chat message is {{"role": text, "content": text}}, this is {str(item)[:80]!r}'
        )
    return {"role": item["role"], "content": item["content"]}
