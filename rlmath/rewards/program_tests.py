"""Helpers of the code rewards: extract the program, run it on tests, compare output."""

from __future__ import annotations

import contextvars
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlmath.rewards.base import Reward, RewardSettingError, Value, Values, texts_of
from rlmath.rewards.sandbox import (
    CodeProvider,
    Limits,
    PreparedProgram,
    Program,
    ProviderError,
    get_provider,
)
from rlmath.rewards.sandbox.counted import SANDBOX_RUNS, SANDBOX_TIMEOUTS, CountedProgram
from rlmath.rewards.sandbox.provider import language_names
from rlmath.rewards.stats import Counts
from rlmath.rewards.uses import PerUse

log = logging.getLogger(__name__)


def extract_code(text: str, language: str) -> str | None:
    """The last fenced block of a language, after the reasoning. Returns the block without its
    fences; ``None`` if there is no closed one. ``text``: a response. Text before the last
    ``</think>`` is ignored. ``language``: any of the language's names."""
    answer = text.rpartition("</think>")[2]
    names = "|".join(re.escape(name) for name in language_names(language))
    opening = re.compile(rf"```(?:{names})[ \t]*\r?\n", re.IGNORECASE)
    found = None
    position = 0
    while (match := opening.search(answer, position)) is not None:
        end = answer.find("```", match.end())
        if end < 0:
            break
        found = answer[match.end() : end]
        position = end + 3
    return found


def same_output(printed: str, expected: str) -> bool:
    """Whether the whole output matches.

    Every line counts, so a correct prefix does not pass. White space at line ends and empty lines
    at the end are ignored.
    """
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def as_text(value: Any) -> str:
    """A test's input or output as text: data sets hold strings, or lists of lines."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return "\n".join(str(line) for line in value)
    return str(value)


def as_record(value: Any) -> Mapping[str, Any]:
    """A value of ``verification_info`` as a mapping, parsed if it is JSON. Raises
    RewardSettingError: neither a mapping nor a JSON object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RewardSettingError(
                f"verification_info: {value[:60]!r} is no JSON object"
            ) from error
    if not isinstance(value, Mapping):
        raise RewardSettingError(f"verification_info: {value!r:.60} is no mapping")
    return value


class CodeReward(Reward):
    """Base of rewards that run the response's program.

    Args:
        provider: ``local``, ``piston``, ``e2b``, ``morph``, ``package.module:Class``, or a
            :class:`CodeProvider` that the caller closes.
        provider_settings: Settings of that provider.
        num_parallel: Responses judged concurrently; ``None``: as many as the provider runs.
        cpu_s: CPU time of one run, in whole seconds, if the data gives none.
        memory_mib: Memory of one run, if the data gives none.

    A provider failure gives ``None``, counted as ``provider_errors``: an infrastructure error must
    not look like a wrong program.
    """

    def __init__(
        self,
        provider: str | CodeProvider = "local",
        provider_settings: Mapping[str, Any] | None = None,
        num_parallel: int | None = None,
        cpu_s: int = 5,
        memory_mib: int = 512,
    ) -> None:
        self._owned = isinstance(provider, str)
        self.provider = (
            get_provider(provider, **dict(provider_settings or {}))
            if isinstance(provider, str)
            else provider
        )
        if num_parallel is not None and num_parallel < 1:
            raise RewardSettingError(f"{self.__name__}: num_parallel={num_parallel}; at least 1")
        self.limits = limits(cpu_s, memory_mib)
        self._pool = ThreadPoolExecutor(
            num_parallel or self.provider.max_parallel, thread_name_prefix="code-reward"
        )
        self._counts = PerUse(Counts)

    def prepare(self, program: Program, limits: Limits) -> PreparedProgram:
        """:meth:`CodeProvider.prepare`, with the runs counted."""
        return self.count_runs(self.provider.prepare(program, limits))

    def count_runs(self, program: PreparedProgram) -> PreparedProgram:
        """Wrap a program so that its runs are counted."""
        return CountedProgram(program, self._counts.current)

    def judge_all(self, completions: Sequence[Any], judge: Callable[[int, str], Value]) -> Values:
        """``judge(index, text)`` of each completion, concurrently; values in order."""
        texts = texts_of(completions)
        futures = [
            # Copying the context keeps this thread's use (training or evaluation).
            self._pool.submit(contextvars.copy_context().run, self._judge, judge, index, text)
            for index, text in enumerate(texts)
        ]
        return [future.result() for future in futures]

    def _judge(self, judge: Callable[[int, str], Value], index: int, text: str) -> Value:
        try:
            return judge(index, text)
        except ProviderError as error:
            self._counts.current.add("provider_errors")
            log.warning("%s: None for completion %d: %s", self.__name__, index, error)
            return None

    def drain_metrics(self) -> dict[str, float]:
        counts = self._counts.current.drain()
        names = ("provider_errors", SANDBOX_RUNS, SANDBOX_TIMEOUTS)
        return {name: float(counts[name]) for name in names}

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._owned:
            self.provider.close()


def limits(cpu_s: float, memory_mib: float) -> Limits:
    """Limits of one run: CPU time, and three times as much wall time.

    The wall time is longer so that a busy machine does not fail a fast program.
    """
    whole_s = max(1, int(-(-float(cpu_s) // 1)))
    return Limits(cpu_s=whole_s, wall_s=3.0 * whole_s + 2.0, memory_mib=max(16, int(memory_mib)))
