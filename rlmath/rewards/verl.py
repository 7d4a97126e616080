"""Adapters for reward functions of verl and slime, which score one sample at a time.

verl: ``compute_score(data_source, solution_str, ground_truth, extra_info)`` returns a number, or a
mapping with ``score`` whose other numbers are logged. The batched form has plural names, and takes
and returns lists.

slime: ``custom_rm(args, sample)``, sync or async, returns a number. ``sample`` has ``prompt``,
``response``, ``label``, ``metadata`` (the data row's other fields), ``index`` and ``tokens``;
``args`` has the parameters of the reward item.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rlmath.rewards.base import Reward, RewardError, Values, check_values, rows_of
from rlmath.rewards.openrlhf import ExtraLogs, openrlhf_inputs
from rlmath.rewards.uses import PerUse

VERL_PARAMETERS = {"data_source", "solution_str", "ground_truth"}
VERL_BATCH_PARAMETERS = {"data_sources", "solution_strs", "ground_truths"}
SLIME_PARAMETERS = {"args", "sample"}


class VerlReward(Reward):
    """Adapter for a function in verl's form.

    ``data_source`` and ``extra_info`` are the data row's fields of these names; without a field
    ``extra_info`` it is the row's other fields. ``ground_truth`` is the row's
    ``reward_model.ground_truth``, else the accepted answer or the list of them. ``function``:
    ``compute_score``, for one sample or batched.
    """

    needs_group = False
    thread_safe = False

    def __init__(self, function: Callable[..., Any], name: str = "compute_score") -> None:
        self.function, self.__name__ = function, name
        parameters = inspect.signature(function).parameters
        self._is_batched = set(parameters) >= VERL_BATCH_PARAMETERS
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        ending = "s" if self._is_batched else ""
        self._takes_info = takes_any or f"extra_info{ending}" in parameters
        self._logs = PerUse(ExtraLogs)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        queries, prompts, truths = openrlhf_inputs(completions, columns)
        texts = [one[len(p) :] for one, p in zip(queries, prompts, strict=True)]
        if (published := columns.get("reward_model")) is not None:
            pairs = zip(published, truths, strict=True)
            truths = [
                row["ground_truth"] if isinstance(row, Mapping) and "ground_truth" in row else truth
                for row, truth in pairs
            ]
        sources = _column(columns, "data_source", len(texts), "")
        infos = _infos(columns, len(texts))
        if self._is_batched:
            given = {"data_sources": sources, "solution_strs": texts, "ground_truths": truths}
            if self._takes_info:
                given["extra_infos"] = infos
            replies = list(_results([self.function(**given)])[0])
            if len(replies) != len(texts):
                raise RewardError(
                    f"reward {self.__name__}: returned {len(replies)} values for {len(texts)} "
                    "completions"
                )
        else:
            pending = []
            for source, text, truth, info in zip(sources, texts, truths, infos, strict=True):
                one = {"data_source": source, "solution_str": text, "ground_truth": truth}
                if self._takes_info:
                    one["extra_info"] = info
                pending.append(self.function(**one))
            replies = _results(pending)
        scores = [self._score(reply) for reply in replies]
        return check_values(self.__name__, scores, len(texts))

    def _score(self, reply: Any) -> Any:
        if not isinstance(reply, Mapping):
            # verl takes the first of a sequence.
            return reply[0] if isinstance(reply, list | tuple) else reply
        if "score" not in reply:
            raise RewardError(
                f"reward {self.__name__}: the reply has no 'score'; it has: "
                f"{', '.join(map(str, reply)) or 'nothing'}"
            )
        for name, value in reply.items():
            if name != "score":
                self._logs.current.add(str(name), value)
        return reply["score"]

    def drain_metrics(self) -> dict[str, float]:
        return self._logs.current.drain()


class SlimeReward(Reward):
    """Adapter for a function in slime's form. ``function``: ``custom_rm(args, sample)``, sync or
    async. ``params``: attributes of ``args``."""

    needs_group = False
    thread_safe = False

    def __init__(
        self,
        function: Callable[..., Any],
        name: str = "custom_rm",
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.function, self.__name__ = function, name
        self._args = SimpleNamespace(**(params or {}))

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        queries, prompts, labels = openrlhf_inputs(completions, columns)
        infos = _infos(columns, len(queries))
        tokens = _column(columns, "completion_ids", len(queries), ())
        samples = [
            SimpleNamespace(
                prompt=prompt,
                response=query[len(prompt) :],
                label=label,
                metadata=info,
                index=index,
                tokens=list(ids),
                response_length=len(ids),
            )
            for index, (query, prompt, label, info, ids) in enumerate(
                zip(queries, prompts, labels, infos, tokens, strict=True)
            )
        ]
        pending = [self.function(self._args, one) for one in samples]
        return check_values(self.__name__, _results(pending), len(samples))


def _results(replies: Sequence[Any]) -> list[Any]:
    """The replies; coroutines are awaited concurrently."""
    if not any(inspect.isawaitable(one) for one in replies):
        return list(replies)
    import asyncio

    from rlmath.rewards.event_loop import run_coroutine

    async def all_of_them() -> list[Any]:
        return list(await asyncio.gather(*replies))

    return list(run_coroutine(all_of_them()))


def _column(columns: Mapping[str, Any], name: str, count: int, missing: Any) -> list[Any]:
    values = columns.get(name)
    return [missing] * count if values is None else list(values)


def _infos(columns: Mapping[str, Any], count: int) -> list[Any]:
    if columns.get("extra_info") is not None:
        return list(columns["extra_info"])
    own = {
        name: v for name, v in columns.items() if isinstance(v, list) and name != "completion_ids"
    }
    return list(rows_of(own, count))
