"""A model's tokenizer for checks, without transformers, which takes seconds to import."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.errors import UserError
from rlmath.model.chat import clock, read_chat_template, render_chat, special_tokens
from rlmath.model.folder import TINY


class LightTokenizer:
    """The interface that :class:`rlmath.data.prompts.PromptRenderer` and ``Encoder`` need."""

    def __init__(self, folder: str | Path) -> None:
        """
        Args:
            folder: A Hugging Face folder, or ``tiny``.

        Raises:
            UserError: There is no tokenizer.json in it that can be read.
        """
        import tokenizers

        self.name_or_path = str(folder)  # The folder, for messages.
        self._settings: dict[str, Any] = {}
        self.chat_template: str | None  # Jinja text, if any.
        if str(folder) == TINY:
            from rlmath.model.tiny_tokenizer import CHAT_TEMPLATE, END_OF_TEXT, fast_tokenizer

            self._fast, self.chat_template = fast_tokenizer(), CHAT_TEMPLATE
            self._settings["eos_token"] = END_OF_TEXT
            return
        file = Path(folder) / "tokenizer.json"
        try:
            self._fast = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises Exception itself.
            raise UserError(f"{file}: cannot be read ({error})") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        settings = Path(folder) / "tokenizer_config.json"
        if settings.is_file():
            self._settings = json.loads(settings.read_text(encoding="utf-8"))
        self.chat_template = read_chat_template(Path(folder))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Tokens that are no part of the vocabulary proper, by id."""
        found: dict[int, Any] = self._fast.get_added_tokens_decoder()
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return self._fast.decode(list(ids), skip_special_tokens=False)

    def __call__(
        self, texts: str | Sequence[str], *, add_special_tokens: bool = True, **_: Any
    ) -> _Encoded:
        if isinstance(texts, str):
            return _Encoded(self._fast.encode(texts, add_special_tokens=add_special_tokens).ids)
        encoded = self._fast.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return _Encoded([one.ids for one in encoded])

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, str]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **options: Any,
    ) -> str:
        """The text of a chat, rendered as transformers does."""
        assert not tokenize
        return render_chat(
            chat_template or self.chat_template or "",
            messages,
            special_tokens(self._settings),
            add_generation_prompt=add_generation_prompt,
            **{"strftime_now": clock(None), **options},
        )


class _Encoded:
    def __init__(self, input_ids: Any) -> None:
        self.input_ids = input_ids

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)
