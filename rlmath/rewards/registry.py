from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

from rlmath.plugins.source import is_path
from rlmath.rewards.base import Range, Reward, RewardSettingError
from rlmath.rewards.loading import FunctionReward, load_reward

if TYPE_CHECKING:  # It needs OmegaConf, which rewards alone do without.
    from rlmath.config.reward import RewardConfig

# Name -> place of the class, which is imported on first use.
_BUILT_IN = {
    "accuracy": "rlmath.rewards.accuracy:Accuracy",
    "binary_code": "rlmath.rewards.binary_code:BinaryCode",
    "cf_code": "rlmath.rewards.cf_code:CodeforcesCode",
    "code": "rlmath.rewards.code:Code",
    "code_format": "rlmath.rewards.code_format:CodeFormat",
    "cosine": "rlmath.rewards.cosine:Cosine",
    "environment": "rlmath.rewards.environment:EnvironmentReward",
    "format": "rlmath.rewards.format:Format",
    "ioi_code": "rlmath.rewards.ioi_code:IOICode",
    "length": "rlmath.rewards.length:Length",
    "math": "rlmath.rewards.math_answer:MathAnswer",
    "reasoning_steps": "rlmath.rewards.reasoning_steps:ReasoningSteps",
    "remote": "rlmath.rewards.remote:RemoteReward",
    "repetition_penalty": "rlmath.rewards.repetition_penalty:RepetitionPenalty",
    "soft_overlong_punishment": "rlmath.rewards.soft_overlong_punishment:SoftOverlongPunishment",
    "stop_properly": "rlmath.rewards.stop_properly:StopProperly",
    "tag_count": "rlmath.rewards.tag_count:TagCount",
}
_added: dict[str, Callable[..., Any]] = {}


def available_rewards() -> list[str]:
    """Registered names, sorted."""
    return sorted({*_BUILT_IN, *_added})


def register_reward(name: str, factory: Callable[..., Any]) -> None:
    """Make ``get_reward(name, **params)`` return ``factory(**params)``.

    Args:
        name: A new name, without a dot or a colon.
        factory: Returns a reward: a :class:`Reward` or any ``f(completions, **columns)``.

    Raises:
        RewardSettingError: The name is taken, or looks like a path.
    """
    if name in _BUILT_IN or name in _added:
        raise RewardSettingError(f"the reward name {name!r} is taken")
    if is_path(name):
        raise RewardSettingError(f"the reward name {name!r} looks like a path; use none of . and :")
    _added[name] = factory


def reward_class(name: str) -> Any:
    if name in _added:
        return _added[name]
    module, _, attribute = _BUILT_IN[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def is_graded(name: str) -> bool:
    """Whether a reward is registered and grades answers, and so says which samples are correct.

    A path's code is not run for this: of a function it is no, and so it is of a class.
    """
    if name not in _BUILT_IN and name not in _added:
        return False
    from rlmath.rewards.answers import GradedReward

    factory = reward_class(name)
    return inspect.isclass(factory) and issubclass(factory, GradedReward)


def has_own_grader(name: str, params: Mapping[str, Any]) -> bool:
    """Whether an item of ``reward.items`` has its own grading settings, and so does not use the
    grader that the others share."""
    own = {"num_workers", "timeout_s", "fallback", "task", "grader", "answer_grader"}
    return is_graded(name) and not own.isdisjoint(params)


def any_graded(names: Iterable[str]) -> bool:
    """Whether one of several rewards :func:`is_graded`."""
    return any(is_graded(name) for name in names)


def reads_golds(reward: RewardConfig) -> bool:
    """Whether rlmath's grader reads the accepted answers: a reward grades, and no verifier does it
    instead."""
    return reward.verifier is None and any_graded(item.name for item in reward.items)


def get_reward(name: str, **params: Any) -> Reward:
    """A reward, ready to be called as ``reward(completions, **columns)``.

    Args:
        name: A registered name, an import path (``my_pkg.my_mod:my_reward``), a file path
            (``my_file.py:my_reward``), or the address of a reward server (``http://...``).
        **params: Its settings.

    Raises:
        RewardSettingError: No such reward, or a setting that it does not have or that is out of
            range.
    """
    if name.startswith(("http://", "https://")):
        params.setdefault("urls", name)
        name = "remote"
    if name not in _BUILT_IN and name not in _added:
        if is_path(name):
            return load_reward(name, params)
        raise RewardSettingError(
            f"no reward named {name!r}; there are: {', '.join(available_rewards())}. "
            f"Your own is given as package.module:function or file.py:function"
        )
    factory = reward_class(name)
    settings = settings_of(factory)
    unknown = sorted(set(params) - set(settings)) if inspect.isclass(factory) else []
    try:
        if unknown:
            raise TypeError(f"no setting {', '.join(unknown)}")
        inspect.signature(factory).bind(**params)
    except TypeError as error:
        raise RewardSettingError(
            f"reward {name}: {error}; its settings: {', '.join(settings) or 'none'}"
        ) from error
    made = factory(**params)
    return made if isinstance(made, Reward) else FunctionReward(made, name=name)


def value_range(name: str, params: Mapping[str, Any]) -> Range | None:
    """Lowest and highest value of a registered reward with these settings; ``None``: unknown.

    Raises:
        RewardSettingError: A setting that is out of range.
    """
    fixed = inspect.getattr_static(reward_class(name), "value_range", None)
    if isinstance(fixed, tuple):
        return fixed
    if fixed is inspect.getattr_static(Reward, "value_range") or fixed is None:
        return None
    with get_reward(name, **params) as reward:
        return reward.value_range


def settings_of(factory: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """Types of the settings by name, those that a class hands on to its base included.

    A setting whose annotation is more than ``bool``, ``int``, ``float``, ``str``, ``None`` or
    several of these has no types: any value may be right.
    """
    names: dict[str, tuple[type, ...]] = {}
    layers = factory.__mro__ if inspect.isclass(factory) else (factory,)
    for layer in layers:
        target = vars(layer).get("__init__") if inspect.isclass(layer) else layer
        if target is None:
            continue
        parameters = list(inspect.signature(target).parameters.values())
        for p in parameters:
            if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                names.setdefault(p.name, _plain_types(target, p.name))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return names


def _plain_types(target: Callable[..., Any], name: str) -> tuple[type, ...]:
    try:
        annotation = typing.get_type_hints(target).get(name)
    except NameError:  # Of a user's function, under TYPE_CHECKING.
        return ()
    found = typing.get_args(annotation) or (annotation,)
    return found if set(found) <= {bool, int, float, str, NoneType} else ()
