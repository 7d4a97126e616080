"""Whether a response has reached a text that ends the model's turn.

vLLM looks for stop strings in its front end, which the step loop does without. A text is looked for
only after a token that may complete it, so that others cost a look at a table.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

_REPLACED = "\N{REPLACEMENT CHARACTER}"


# By tokenizer and last characters of texts: whether tokens seen so far may complete one.
_SEEN: weakref.WeakKeyDictionary[Any, dict[frozenset[str], dict[int, bool]]] = (
    weakref.WeakKeyDictionary()
)


class TurnEnd:
    """Follows the tokens of one turn. ``stop``: see ``Request.stop``. ``token_ids``: the turn's
    tokens so far."""

    def __init__(
        self, tokenizer: Any, stop: Sequence[tuple[str, str]], token_ids: Iterable[int] = ()
    ) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._token_ids = list(token_ids)
        # A token that is part of a character decodes as a replacement.
        last = frozenset(closing[-1] for _, closing in stop) | {_REPLACED}
        self._last = last
        self._may_end = _SEEN.setdefault(tokenizer, {}).setdefault(last, {})
        # A character is in at most four tokens.
        self._tail = 4 * max(len(closing) for _, closing in stop)

    def add(self, token_ids: Sequence[int]) -> int | None:
        """Add tokens as they are sampled. Returns number of them up to the one that ended the turn;
        ``None``: it has not ended."""
        for count, token in enumerate(token_ids, start=1):
            self._token_ids.append(token)
            may_end = self._may_end.get(token)
            if may_end is None:
                may_end = self._may_end[token] = not self._last.isdisjoint(self._text([token]))
            if may_end and self._has_ended():
                return count
        return None

    def _has_ended(self) -> bool:
        tail = self._text(self._token_ids[-self._tail :])
        if not any(closing in tail for _, closing in self._stop):
            return False
        text = self._text(self._token_ids)
        for opening, closing in self._stop:
            at = text.find(opening)
            if at >= 0 and text.find(closing, at + len(opening)) >= 0:
                return True
        return False

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
