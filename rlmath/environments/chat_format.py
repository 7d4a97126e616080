"""Calls and observations in the model's chat template.

An observation's text is the template of a dummy history with the tools' messages, without the
template of the history alone. It follows the token that ended the model's turn, so nothing that the
model said is rendered.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.environments.base import Suffix, ToolCall, ToolResult, TurnFormat
from rlmath.environments.call_parsers import PARSERS, Parser, parser_of
from rlmath.environments.text import cut_tokens
from rlmath.errors import ConfigError
from rlmath.model.chat import CLOCK, clock

# Parts of published templates that show earlier messages differently after later ones, and parts
# that do not. Qwen3 shows empty thoughts in the last message only, none before the last question.
_PATCHES = (
    ("{%- if loop.index0 > ns.last_query_index %}", "{%- if true %}"),
    ("{%- if loop.last or (not loop.last and reasoning_content) %}", "{%- if true %}"),
)
_RESULT = "7341"
_THOUGHTS = ("", "<think>\nLet me see.\n</think>\n\n")


class ChatFormat(TurnFormat):
    """The format of a chat template. Raises ConfigError: it cannot be used; the message shows why.

    Args:
        tools: Their schemas.
        max_observation_tokens: Longest results of a turn, together; the middle of a longer one is
            left out.
        replies: The environment replies to turns without calls, as the user.
        parser: A name of :data:`PARSERS`; ``auto``: the one that the template shows; or a function.
        template_date: Today as YYYY-MM-DD for templates that show it; ``None``: the machine's date.
        options: Further variables of the template, such as ``enable_thinking``.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        tools: Sequence[Mapping[str, Any]],
        max_observation_tokens: int,
        *,
        replies: bool = False,
        parser: str | Parser = "auto",
        template_date: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._most = tokenizer, max_observation_tokens
        self._tools = list(tools)
        added = tokenizer.added_tokens_decoder.values()
        self._special_tokens = [str(token) for token in added if token.special]
        self._options = {CLOCK: clock(template_date), **(options or {})}
        self._parse: Parser = lambda text: None
        if tools:
            name = parser_of(template) if parser == "auto" else parser
            self._parse = PARSERS[name] if isinstance(name, str) else name
        self._name = str(tools[0]["function"]["name"]) if tools else ""
        # Who may write after a turn.
        self._roles = ["tool"] * bool(tools) + ["user"] * replies
        # In use, maybe patched; for the prompts, too.
        self.template = self._check_template(template)
        if tools and parser not in PARSERS:
            self._check_parser()
        # The template may shorten or quote a text, so its surroundings are found by comparison.
        self._around: dict[str, tuple[int, int]] = {}
        for role in self._roles:
            one, other = self._after_turn(role, ["1"]), self._after_turn(role, ["2"])
            self._around[role] = _common(one, other), _common(one[::-1], other[::-1])

    def calls(self, text: str) -> Sequence[ToolCall] | None:
        # Calls in thoughts do not count, even if the turn ended within them.
        return self._parse(text.rpartition("</think>")[2].partition("<think>")[0])

    def render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = True) -> str:
        """The text of a chat whose model may call the tools. ``prompt``: begin the model's next
        turn. Raises Exception: raised by the template."""
        return self._render(self.template, messages, prompt)

    def _render(self, template: str, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=template,
                tools=self._tools or None,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._options,
            )
        )

    def suffix(self, turn_text: str, results: Sequence[ToolResult]) -> Suffix:
        return self._suffix("tool", [result.text for result in results])

    def reply(self, turn_text: str, text: str) -> Suffix:
        return self._suffix("user", [text])

    def _suffix(self, role: str, texts: Sequence[str]) -> Suffix:
        share = self._most // len(texts)
        plain = map(self._without_special, texts)
        text = self._after_turn(role, [cut_tokens(one, share, self._encode) for one in plain])
        tokens, (before, after) = self._encode(text), self._around[role]
        first = len(self._encode(text[:before]))
        last = len(tokens) - len(self._encode(text[len(text) - after :]))
        return Suffix(tuple(tokens), (first, max(first, last)))

    def _after_turn(self, role: str, shown: Sequence[str]) -> str:
        """The text between the end of a turn and the next turn."""
        history = self._history(role, "")
        results = [self._message(role, text) for text in shown]
        rest = self.render([*history, *results])[len(self.render(history, prompt=False)) :]
        return self._rest_of_turn + rest

    def _message(self, role: str, text: str) -> dict[str, Any]:
        name = {"name": self._name} if role == "tool" else {}
        return {"role": role, **name, "content": text}

    def _history(self, role: str, content: str) -> list[dict[str, Any]]:
        """A question and a turn that is followed by a message of this role."""
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if role == "tool":
            call = {"type": "function", "function": {"name": self._name, "arguments": {}}}
            turn["tool_calls"] = [call]
        return [{"role": "user", "content": "1 + 1?"}, turn]

    def _check_template(self, template: str) -> str:
        patched = template
        for part, instead in _PATCHES:
            patched = patched.replace(part, instead)
        try:
            difference = self._difference(template)
            if difference is not None and patched != template:
                template, difference = patched, self._difference(patched)
        except Exception as error:  # A template's own, such as TypeError, beside Jinja's.
            raise ConfigError(
                f"the chat template refuses calls of tools: {error}; use the fenced format"
            ) from error
        if difference is not None:
            raise ConfigError(
                "the chat template shows earlier messages differently once a later one follows, so "
                f"what the model said would change under it: {difference}; use the fenced format, "
                "or a template that keeps them"
            )
        said = "Let me see."
        turn = self._render(template, self._history(self._roles[0], said), False)
        turn = turn.rpartition(said)[2]
        ends = [(turn.rfind(token) + len(token)) for token in self._special_tokens if token in turn]
        if not ends:
            raise ConfigError(
                "the chat template ends the model's turn with no special token; use the fenced "
                "format"
            )
        self._rest_of_turn = turn[max(ends) :]
        return template

    def _check_parser(self) -> None:
        """Refuse a template whose calls the parser does not read, such as XML."""
        question, turn = self._history("tool", "")
        turn["tool_calls"][0]["function"]["arguments"] = {"x": "a"}
        said, begun = self.render([question, turn], prompt=False), self.render([question])
        if not said.startswith(begun):  # The prompt begins thoughts.
            begun = self.render([question], prompt=False)
        said = said.removeprefix(begun)
        for token in self._special_tokens:  # The environment sees none.
            said = said.replace(token, "")
        try:
            found = self.calls(said)
        except ValueError:
            found = None
        if found != [ToolCall(self._name, {"x": "a"})]:
            raise ConfigError(
                f"the chat template shows a call as {said!r:.200} (special tokens left out), which "
                "the parser does not read; name vLLM's for it as rollout.tool_parser, or use the "
                "fenced format"
            )

    def _difference(self, template: str) -> str | None:
        """Where a message changes with a later one; ``None``: nowhere."""
        for first, second, thoughts in itertools.product(self._roles, self._roles, _THOUGHTS):
            chain = self._history(first, "")[:1]
            for role in (first, second):
                chain += [self._history(role, thoughts)[1], self._message(role, _RESULT)]
            chain.append({"role": "assistant", "content": f"{thoughts}2"})
            before = self._render(template, chain[:2], False)
            for length in range(3, len(chain) + 1):
                after = self._render(template, chain[:length], False)
                begun = self._render(template, chain[:length], True)
                for shorter, longer in ((before, after), (after, begun)):
                    if not longer.startswith(shorter):
                        at = _common(shorter, longer)
                        near = slice(max(0, at - 40), at + 40)
                        return f"{shorter[near]!r} became {longer[near]!r}"
                last = chain[length - 1]
                if last["role"] in self._roles and _RESULT not in after[len(before) :]:
                    raise ValueError(f"it does not show messages of the role {last['role']}")
                before = after
        return None

    def _without_special(self, text: str) -> str:
        for token in self._special_tokens:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text.rstrip("\n")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _common(one: str, other: str) -> int:
    """Length of the common beginning of two texts."""
    same = (a == b for a, b in zip(one, other, strict=False))
    return sum(itertools.takewhile(bool, same))
