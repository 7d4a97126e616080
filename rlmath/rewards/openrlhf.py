"""OpenRLHF's local reward file: ``reward_func(queries, prompts, labels)``.

``queries`` are prompt and response in one string, ``prompts`` the prompts, ``labels`` the accepted
answers. The function returns ``{"rewards": ..., "scores": ..., "extra_logs": {...}}`` with tensors
or lists, or only the rewards.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlmath.rewards.base import (
    GOLD_COLUMNS,
    Reward,
    RewardError,
    Values,
    check_values,
    prompt_text_of,
    texts_of,
)
from rlmath.rewards.uses import PerUse


def openrlhf_inputs(
    completions: Sequence[Any], columns: Mapping[str, Any]
) -> tuple[list[str], list[str], list[Any]]:
    """``queries``, ``prompts`` and ``labels`` of completions.

    The label of a row is its accepted answer, the list of them if there are several, and ``None``
    if there are none.
    """
    texts = texts_of(completions)
    prompts = columns.get("prompts", columns.get("prompt"))
    if prompts is None:
        prompts = [""] * len(texts)
    elif isinstance(prompts, str):
        prompts = [prompts] * len(texts)
    prompt_texts = [prompt_text_of(p) for p in prompts]
    queries = [p + t for p, t in zip(prompt_texts, texts, strict=True)]
    return queries, prompt_texts, _labels(columns, len(texts))


def _labels(columns: Mapping[str, Any], count: int) -> list[Any]:
    for name in ("answers", "labels", "label", *GOLD_COLUMNS):
        values = columns.get(name)
        if values is None:
            continue
        if isinstance(values, str) or not isinstance(values, Sequence):
            values = [values] * count
        return [_label(v) for v in values]
    return [None] * count


def _label(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return value[0] if len(value) == 1 else list(value)
    return value


class ExtraLogs:
    """Means of the additional metrics in replies. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    def add(self, name: str, values: Any) -> None:
        """Add a number or a list of numbers; anything that is not a finite number is ignored."""
        if hasattr(values, "tolist"):
            values = values.tolist()
        if not isinstance(values, list | tuple):
            values = [values]
        numbers = [
            float(v) for v in values if isinstance(v, int | float) and math.isfinite(float(v))
        ]
        with self._lock:
            total, count = self._sums[name]
            self._sums[name] = (total + sum(numbers), count + len(numbers))

    def drain(self) -> dict[str, float]:
        """Return the means since the last call."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(lambda: (0.0, 0))
        return {name: total / count for name, (total, count) in sums.items() if count}


def read_reply(name: str, reply: Any, count: int, logs: ExtraLogs) -> Values:
    """The rewards of an OpenRLHF reply; its other metrics are added to ``logs``. Raises
    RewardError: ``rewards`` is missing, or is not one number per query."""
    if not isinstance(reply, Mapping):
        return check_values(name, reply, count)
    if "rewards" not in reply:
        raise RewardError(
            f"reward {name}: the reply has no 'rewards'; it has: "
            f"{', '.join(map(str, reply)) or 'nothing'}"
        )
    values = check_values(name, reply["rewards"], count)
    if reply.get("scores") is not None:
        logs.add("scores", reply["scores"])
    extra = reply.get("extra_logs")
    if isinstance(extra, Mapping):
        for key, figures in extra.items():
            logs.add(str(key), figures)
    return values


class OpenRLHFReward(Reward):
    """Adapter for a reward function in OpenRLHF's form."""

    needs_group = True
    thread_safe = False

    def __init__(self, function: Callable[..., Any], name: str = "reward_func") -> None:
        self.function = function
        self.__name__ = name
        self._logs = PerUse(ExtraLogs)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        queries, prompts, labels = openrlhf_inputs(completions, columns)
        reply = self.function(queries=queries, prompts=prompts, labels=labels)
        if inspect.isawaitable(reply):
            from rlmath.rewards.event_loop import run_coroutine  # Imports asyncio.

            reply = run_coroutine(reply)
        return read_reply(self.__name__, reply, len(queries), self._logs.current)

    def drain_metrics(self) -> dict[str, float]:
        return self._logs.current.drain()
