"""The tokens of a sample as texts, by the tokenizer of the run's model, with values of each.

Traces by the ranks (``runner.token_samples``) are in a file beside the step's samples. Samples that
were chosen for a trace and not trained on, such as those of dropped groups, have only rollout
log-probs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.errors import UserError
from rlmath.monitor.run_folder import RunFolder
from rlmath.monitor.token_files import TracedSample, read_tokens, read_traced

# Outcome of a token in the update; the order of ``page/tokens.js``.
TRAINED, NOT_IN_LOSS, LEFT_OUT, CLIPPED = range(4)
# A character may be split into as many tokens.
_MAX_SPLIT = 4
Trace = tuple[TracedSample, Mapping[str, NDArray[Any]]]


class Traces:
    """The traces that ranks left of a run's samples."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        # A group that was carried over is trained in a later step than its samples are filed.
        self._steps = {
            (one.key, one.tokens, one.version): step
            for step, samples in read_traced(run_dir)
            for one in samples
        }
        self._read: tuple[int, dict[tuple[str, int, int], Trace]] = (0, {})

    def of(self, row: Mapping[str, Any]) -> Trace | None:
        key = f"{row['problem_id']}/{row.get('index')}"
        place = (key, row["response_tokens"], row.get("weights_version", -1))
        step = self._steps.get(place)
        if step is None:
            return None
        if self._read[0] != step:
            found = read_tokens(self._run_dir, step)
            self._read = step, {(s.key, s.tokens, s.version): (s, v) for s, v in found}
        return self._read[1].get(place)


def tokenizer_of(run: RunFolder) -> LightTokenizer | None:
    """The tokenizer of the exported model, or of the trained one; ``None``: neither is here."""
    for folder in filter(None, (run.folder / "hf", run.settings.get("model.path"))):
        with contextlib.suppress(UserError):
            return LightTokenizer(folder)
    return None


def token_table(
    tokenizer: LightTokenizer, row: Mapping[str, Any], trace: Trace | None
) -> dict[str, Any] | None:
    """Values by token of a row.

    Tokens that are parts of one character are joined, and their additive values summed. Returns
    ``columns``: names, the first one ``text``; ``rows``: their values; ``note``. ``None``: nothing
    is known by token.
    """
    columns = columns_of(row, trace)
    if columns is None:
        return None
    ids = row["token_ids"] if trace is None else trace[1]["token_ids"].tolist()
    if len(ids) != len(columns["log_prob"]):
        return None
    rows: list[list[Any]] = []
    at = 0
    while at < len(ids):
        end = at + 1
        text = tokenizer.decode(ids[at:end])
        while "\ufffd" in text and end < min(len(ids), at + _MAX_SPLIT):
            end += 1
            text = tokenizer.decode(ids[at:end])
        if "\ufffd" in text:  # Not a character with any number of tokens.
            end, text = at + 1, tokenizer.decode(ids[at : at + 1])
        values = (_JOIN.get(name, _first)(one[at:end]) for name, one in columns.items())
        rows.append([text, *values])
        at = end
    return {"columns": ["text", *columns], "rows": rows, "note": _note(trace)}


def columns_of(row: Mapping[str, Any], trace: Trace | None) -> dict[str, Sequence[Any]] | None:
    """Values of each token by name; ``None``: nothing is known by token."""
    if trace is None:
        log_probs = row.get("log_probs")
        known = isinstance(row.get("token_ids"), list) and isinstance(log_probs, list)
        return {"log_prob": log_probs} if known and log_probs is not None else None
    sample, values = trace
    engine = values["engine_log_probs"]
    old = None if sample.old_is_rollout else values.get("old_log_probs")
    actor = values["log_probs"] if old is None else old
    own = _own(row, sample.tokens)
    found: dict[str, Sequence[Any]] = {
        "log_prob": engine.tolist(),
        "difference": (own * (actor - engine)).tolist(),
        "entropy": values["entropy"].tolist(),
        "advantage": values["advantages"].tolist(),
        "pull": values["pulls"].tolist(),
        "use": _uses(values),
    }
    if "ref_log_probs" in values:
        found["reference"] = (own * (actor - values["ref_log_probs"])).tolist()
    if "teacher_log_probs" in values:
        found["teacher"] = (own * (actor - values["teacher_log_probs"])).tolist()
    if "values" in values:
        found["value"] = values["values"].tolist()
    spans = row.get("spans") or ()
    if len(spans) > 1:
        found["version"] = _versions(spans, sample.tokens)
    return found


def _own(row: Mapping[str, Any], tokens: int) -> NDArray[Any]:
    """``[tokens]``: 1 for tokens that the model sampled, 0 for observations."""
    segments = row.get("segments") or [("model", tokens, "")]
    return np.repeat([one[0] == "model" for one in segments], [one[1] for one in segments])


def _uses(values: Mapping[str, NDArray[Any]]) -> list[int]:
    factors = values.get("policy_factors")
    found = []
    for place, is_in in enumerate(values["loss_mask"].tolist()):
        if not is_in:
            found.append(NOT_IN_LOSS)
        elif factors is not None and factors[place] == 0:
            found.append(LEFT_OUT)
        else:
            found.append(CLIPPED if values["clipped"][place] else TRAINED)
    return found


def _versions(spans: Sequence[Sequence[int]], tokens: int) -> list[int]:
    """``[tokens]``: which weights version sampled each."""
    ends = [start for _, start in spans[1:]] + [tokens]
    return [
        version
        for (version, start), end in zip(spans, ends, strict=True)
        for _ in range(start, end)
    ]


def _note(trace: Trace | None) -> str:
    if trace is None:
        return "not trained on, or not traced: rollout log-probs alone are known"
    sample = trace[0]
    discarded = ", which was discarded: nothing was learned from it" if sample.discarded else ""
    return f"in minibatch {sample.minibatch + 1} of the update{discarded}"


def _round(value: float) -> float | None:
    """Four digits; ``None``: not a finite number, which JSON has no word for."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return _round(math.fsum(known)) if len(known) == len(values) else None


def _first(values: Sequence[Any]) -> Any:
    return values[0] if isinstance(values[0], int) else _round(values[0])


_JOIN: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("log_prob", "difference", "entropy", "pull", "reference", "teacher"), _sum),
    "use": max,
}
