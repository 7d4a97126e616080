"""The tokens of a sample as texts, by the tokenizer of the run's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmath.commands.report.run_files import RunFiles
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.errors import UserError

# A character may be split into as many tokens.
_MAX_SPLIT = 4


def tokenizer_of(run: RunFiles) -> LightTokenizer | None:
    """Of the exported model, or of the one that was trained; ``None``: neither is here."""
    for folder in (run.folder / "hf", run.settings.get("model.path")):
        try:
            if folder is not None:
                return LightTokenizer(Path(folder) if isinstance(folder, Path) else str(folder))
        except UserError:
            continue
    return None


def token_texts(tokenizer: LightTokenizer, row: Mapping[str, Any]) -> list[list[Any]] | None:
    """``[text, rollout log-prob]`` of each token of a row; ``None``: it has none.

    Tokens that are parts of one character are one, with the sum of their log-probs.
    """
    ids, log_probs = row.get("token_ids"), row.get("log_probs")
    if not isinstance(ids, list) or not isinstance(log_probs, list) or len(ids) != len(log_probs):
        return None
    found: list[list[Any]] = []
    at = 0
    while at < len(ids):
        end = at + 1
        text = tokenizer.decode(ids[at:end])
        while "\ufffd" in text and end < min(len(ids), at + _MAX_SPLIT):
            end += 1
            text = tokenizer.decode(ids[at:end])
        if "\ufffd" in text:  # Not a character, however many are taken.
            end, text = at + 1, tokenizer.decode(ids[at : at + 1])
        found.append([text, _sum(log_probs[at:end])])
        at = end
    return found


def _sum(log_probs: Sequence[float | None]) -> float | None:
    """``None``: minus infinity, which JSON has no word for."""
    known = [one for one in log_probs if one is not None]
    return round(sum(known), 4) if len(known) == len(log_probs) else None
