"""Load users' reward functions by import path or file path.

my_pkg.my_mod:my_reward      a function or callable object of a module on Python's path
path/to/file.py:my_reward    a function or callable object of a file
path/to/file.py              the file's ``reward_func``, or its only public function
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from types import ModuleType
from typing import Any

from rlmath.plugins.loading import attribute_of, public_functions, refresh
from rlmath.plugins.source import PluginError, is_file, split
from rlmath.rewards.base import Reward, RewardError, RewardSettingError, Values, check_values
from rlmath.rewards.openrlhf import OpenRLHFReward
from rlmath.rewards.verl import (
    SLIME_PARAMETERS,
    VERL_BATCH_PARAMETERS,
    VERL_PARAMETERS,
    SlimeReward,
    VerlReward,
)

# A callable with one of these parameters is a reward; any other is a factory of a reward.
_REWARD_PARAMETERS = {"completions", "completion_ids", "prompts"}
_OPENRLHF_PARAMETERS = {"queries", "prompts", "labels"}


def load_reward(path: str, params: Mapping[str, Any]) -> Reward:
    """Load the reward at an import or file path. Raises RewardSettingError: nothing is found, or it
    does not take these arguments.

    Args:
        path: As in this module's docstring.
        params: Keyword arguments, bound to a reward function or passed to the factory or class
            that makes the reward.
    """
    found = _find(path)
    if isinstance(found, Reward):
        return found
    label = getattr(found, "__name__", None) or type(found).__name__
    names = _parameters(found)
    if inspect.isclass(found) or not _is_reward(found, names):
        made = _call_factory(path, found, params)
        if isinstance(made, Reward):
            return made
        if not callable(made):
            raise RewardSettingError(
                f"reward {path}: {label} takes no 'completions' and made a "
                f"{type(made).__name__}, which cannot be called; give a function "
                f"f(completions, **columns), or one that makes such a function"
            )
        return _wrap(getattr(made, "__name__", label), made)
    if names == SLIME_PARAMETERS:
        return SlimeReward(found, label, params)
    if params:
        unknown = set(params) - names
        if unknown and not _takes_any(found):
            raise RewardSettingError(
                f"reward {path}: {label} has no parameter {', '.join(sorted(unknown))}; it has: "
                f"{', '.join(sorted(names))}"
            )
        return _wrap(label, partial(found, **params))
    return _wrap(label, found)


def _wrap(label: str, function: Callable[..., Any]) -> Reward:
    names = _parameters(function)
    if names >= _OPENRLHF_PARAMETERS:
        return OpenRLHFReward(function, name=label)
    if names >= VERL_PARAMETERS or names >= VERL_BATCH_PARAMETERS:
        return VerlReward(function, name=label)
    return FunctionReward(function, name=label)


def _is_reward(found: Any, names: set[str]) -> bool:
    forms = (_OPENRLHF_PARAMETERS, VERL_PARAMETERS, VERL_BATCH_PARAMETERS)
    if names & _REWARD_PARAMETERS or names == SLIME_PARAMETERS or any(names >= f for f in forms):
        return True
    return not names and _takes_any(found)  # f(**columns)


def _call_factory(path: str, factory: Callable[..., Any], params: Mapping[str, Any]) -> Any:
    try:
        return factory(**params)
    except TypeError as error:
        raise RewardSettingError(
            f"reward {path}: {error}; params given: {', '.join(sorted(params)) or 'none'}"
        ) from error


def _signature(function: Any) -> list[inspect.Parameter]:
    """The parameters of a function; ``**columns`` for one without a signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _parameters(function: Any) -> set[str]:
    """Names of the parameters, without ``*args`` and ``**kwargs``."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in _signature(function) if p.kind not in variable}


def _takes_any(function: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in _signature(function))


def _find(path: str) -> Any:
    place, attribute = split(path)
    if not attribute and not is_file(place):
        place, _, attribute = path.rpartition(".")
    try:
        module = refresh(place)
        found = attribute_of(module, attribute) if attribute else _only_function(path, module)
    except PluginError as error:
        raise RewardSettingError(f"reward {path}: {error}") from error
    if not callable(found):
        raise RewardSettingError(
            f"reward {path}: {attribute} is a {type(found).__name__} and cannot be called"
        )
    return found


def _only_function(path: str, module: ModuleType) -> Any:
    names = public_functions(module)
    if "reward_func" in names:
        return module.reward_func
    if len(names) == 1:
        return getattr(module, names[0])
    raise RewardSettingError(
        f"reward {path}: which of its functions? It has: {', '.join(names) or 'none'}. "
        f"Write {path}:name"
    )


class FunctionReward(Reward):
    """A TRL or Open-R1 reward function, called by keyword as in those trainers.

    Keywords that the function does not take are dropped. Coroutine functions run on one shared
    event loop, so their open sessions stay usable.

    A function may have the attributes ``needs_group`` and ``thread_safe``. By default it gets whole
    groups, one call at a time, as in TRL. A coroutine function has many calls in flight without
    blocking a thread, unless it has ``thread_safe = False``. ``function``: ``f(completions,
    **columns)``, sync or async.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.__name__ = name
        target = function.func if isinstance(function, partial) else function
        # Instance attributes on purpose: the class defaults do not fit a user's function.
        self.needs_group = bool(getattr(target, "needs_group", True))  # type: ignore[misc]
        self.thread_safe = bool(getattr(target, "thread_safe", False))  # type: ignore[misc]
        self.is_asynchronous = _is_coroutine(target) and getattr(  # type: ignore[misc]
            target, "thread_safe", True
        )
        self._takes_any = _takes_any(function)
        self._names = _parameters(function)
        self.required_columns = frozenset(
            p.name
            for p in _signature(function)
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        )

    def __call__(self, *args: Any, **columns: Any) -> Values:
        result, count = self._start(args, columns)
        if inspect.isawaitable(result):
            from rlmath.rewards.event_loop import run_coroutine  # Imports asyncio.

            result = run_coroutine(result)
        # Manual calls must not return NaN or infinity either.
        return check_values(self.__name__, result, count)

    def submit(self, *args: Any, **columns: Any) -> Future[Values]:
        """The values of a coroutine function, which runs on the shared event loop."""
        awaitable, count = self._start(args, columns)

        async def check() -> Values:
            return check_values(self.__name__, await awaitable, count)

        from rlmath.rewards.event_loop import start_coroutine

        return start_coroutine(check())

    def _start(self, args: tuple[Any, ...], columns: dict[str, Any]) -> tuple[Any, int]:
        """The function's return value (may be awaitable) and the number of completions."""
        columns.update(self._by_name(args, columns))
        rows = columns.get("completions", columns.get("completion_ids"))
        if rows is None:
            raise RewardError(f"reward {self.__name__}: called without completions")
        if not self._takes_any:
            columns = {k: v for k, v in columns.items() if k in self._names}
        missing = self.required_columns - set(columns)
        if missing:
            raise RewardSettingError(
                f"reward {self.__name__}: it wants the column(s) {', '.join(sorted(missing))}, "
                f"which the data's rows do not have"
            )
        count = len(rows)  # Before the call, which may change the list.
        return self.function(**columns), count

    def _by_name(self, args: tuple[Any, ...], columns: Mapping[str, Any]) -> dict[str, Any]:
        """Map positional arguments to names: completions first, then the function's order.

        A function of ``completion_ids`` without ``completions`` gets ``completion_ids`` first.
        """
        named = [p.name for p in _signature(self.function) if p.kind is p.POSITIONAL_OR_KEYWORD]
        own = [name for name in named if name not in columns]
        if "completions" not in columns and not (
            own[:1] == ["completion_ids"] and "completions" not in own
        ):
            own = ["completions", *(n for n in own if n != "completions")]
        if len(args) > len(own):
            raise RewardSettingError(
                f"reward {self.__name__}: {len(args)} arguments by position; it takes "
                f"{len(own)}: {', '.join(own)}"
            )
        return dict(zip(own, args, strict=False))


def _is_coroutine(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
