"""A model's chat template, without importing transformers, which takes seconds."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmath.model.folder import TINY

# The function that a template calls for today's date, such as Llama 3's.
CLOCK = "strftime_now"
_SAID = "twenty three"


def clock(date: str | None) -> Callable[[str], str]:
    """``strftime_now`` for chat templates. ``date``: today as YYYY-MM-DD; ``None``: the machine's
    date."""
    now = datetime.datetime.now() if date is None else datetime.datetime.fromisoformat(date)
    return now.strftime


def read_chat_template(folder: Path) -> str | None:
    """The Jinja template; ``None`` without one."""
    for name in ("chat_template.jinja", "chat_template.json"):
        file = folder / name
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            return text if file.suffix == ".jinja" else _json(file).get("chat_template")
    found = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # Several named templates.
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found


def has_chat_template(path: str) -> bool:
    """Whether the tokenizer in this folder, or that of ``tiny``, has a chat template."""
    try:
        return path == TINY or bool(read_chat_template(Path(path)))
    except ValueError:  # Not text; the check of the folder reports it.
        return True


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    strftime_now: Callable[[str], str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """Render a chat like transformers. Raises Exception: raised by the template, such as
    ``jinja2.TemplateError``. ``tools``: schemas of the tools that the model may call. ``options``:
    further variables of the template, such as ``enable_thinking``."""
    return str(
        _compile(template).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**special, CLOCK: strftime_now, **options},
        )
    )


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **how: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **how})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _generation_tag()],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens in a tokenizer_config.json, by name."""
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and value
    }


@functools.lru_cache(maxsize=64)
def is_instruct(path: str) -> bool:
    """Whether a model ends its turn as its chat template does.

    Base models often have the template of their instruct version: Qwen2.5-7B ends texts with
    ``<|endoftext|>``, but its template ends turns with ``<|im_end|>``. ``path``: a Hugging Face
    folder, or ``tiny``.
    """
    if path == TINY:
        return True
    folder = Path(path)
    settings = _json(folder / "tokenizer_config.json")
    try:
        template = read_chat_template(folder)
        if not template:
            return False
        special = special_tokens(settings)
        chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": _SAID}]
        text = render_chat(
            template, chat, special, add_generation_prompt=False, strftime_now=clock(None)
        )
    except Exception:  # Errors of a template are reported when prompts are rendered.
        return False
    ends = [special.get("eos_token", ""), *_end_tokens(folder, settings)]
    after = text.rpartition(_SAID)[2].lstrip()
    # A template that ends no turn cannot distinguish them; it was made for a chat model.
    return not after or any(end and after.startswith(end) for end in ends)


def _end_tokens(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Tokens at which generation_config.json ends a response."""
    ids = _json(folder / "generation_config.json").get("eos_token_id", [])
    added = settings.get("added_tokens_decoder") or {
        str(one["id"]): one for one in _json(folder / "tokenizer.json").get("added_tokens", [])
    }
    return [
        added[str(one)]["content"]
        for one in (ids if isinstance(ids, list) else [ids])
        if str(one) in added
    ]


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _generation_tag() -> Any:
    """``{% generation %}``, which marks the assistant's part in templates and changes no text."""
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - as declared by the base class.

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
