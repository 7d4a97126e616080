"""The items of a mix, from the settings: each reward with its weight, label and format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlmath.plugins.source import is_path
from rlmath.rewards.answers import AnswerGrader
from rlmath.rewards.base import Reward, RewardSettingError
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.registry import get_reward, has_own_grader, is_graded

_ITEM_KEYS = {"name", "weight", "params", "label", "required", "completion_format", "needs_group"}


@dataclass(frozen=True)
class MixItem:
    """One reward of the mix.

    Attributes:
        weight: Factor in the total; 0 only logs the value.
        required: Its ``None`` makes the total ``None``.
        completion_format: Form of its completions: ``chat`` (message lists) or ``text``.
    """

    reward: Reward
    label: str
    weight: float = 1.0
    required: bool = False
    completion_format: Literal["chat", "text"] = "text"


def build_items(
    items: Sequence[Any],
    answer_grader: AnswerGrader,
    defaults: Mapping[str, float],
    completion_format: Literal["chat", "text"],
) -> list[MixItem]:
    """The rewards that ``reward.items`` names; all are closed again if one cannot be made.

    Args:
        items: Names, or mappings (or objects) with ``name``, ``weight`` (1), ``params`` ({}), and
            if wanted ``label``, ``required``, ``completion_format``, ``needs_group``.
        defaults: Parameters of the math reward, where an item does not give them.
        completion_format: Default format of completions for rewards from import or file paths.

    Raises:
        RewardSettingError: An item that does not exist, or a setting that cannot work.
    """
    built: list[MixItem] = []
    try:
        for raw in items:
            built.append(
                _build(_as_mapping(raw), built, answer_grader, defaults, completion_format)
            )
    except BaseException:
        for done in built:
            done.reward.close()
        raise
    return built


def _build(
    item: Mapping[str, Any],
    earlier: Sequence[MixItem],
    answer_grader: AnswerGrader,
    defaults: Mapping[str, float],
    completion_format: Literal["chat", "text"],
) -> MixItem:
    name, params = item["name"], dict(item.get("params") or {})
    if name == "math":
        params = {**defaults, **params}
    # A graded reward without its own settings uses the mix's grader.
    if is_graded(name) and not has_own_grader(name, params):
        params["answer_grader"] = answer_grader
    reward = get_reward(name, **params)
    try:
        if item.get("needs_group") is not None:
            _set_needs_group(name, reward, bool(item["needs_group"]))
        return MixItem(
            reward,
            _free_label(item.get("label"), _label(name, reward), {one.label for one in earlier}),
            weight=float(item.get("weight", 1.0)),
            required=bool(item.get("required", False)),
            completion_format=_format_of(item, completion_format),
        )
    except BaseException:
        reward.close()
        raise


def _free_label(given: str | None, default: str, taken: set[str]) -> str:
    """The given label, or the default with the first number that makes it a new one."""
    if given:
        if given in taken:
            raise RewardSettingError(f"two rewards have the label {given!r}")
        return given
    label, number = default, 2
    while label in taken:
        label, number = f"{default}_{number}", number + 1
    return label


def _set_needs_group(name: str, reward: Reward, wanted: bool) -> None:
    if not wanted and reward.needs_group and not isinstance(reward, FunctionReward):
        raise RewardSettingError(
            f"reward {name}: needs_group=false, but it compares a problem's completions; leave "
            f"needs_group out"
        )
    reward.needs_group = wanted  # type: ignore[misc]


def _format_of(
    item: Mapping[str, Any], default: Literal["chat", "text"]
) -> Literal["chat", "text"]:
    given = item.get("completion_format")
    wanted = default if given is None else getattr(given, "value", given)
    if wanted not in ("chat", "text"):
        raise RewardSettingError(
            f"reward {item['name']}: completion_format={wanted!r}; use chat or text"
        )
    return wanted  # type: ignore[no-any-return]


def _as_mapping(raw: Any) -> Mapping[str, Any]:
    if isinstance(raw, str):
        return {"name": raw}
    if hasattr(raw, "items"):
        item = {str(k): v for k, v in raw.items()}
    else:
        item = {k: v for k, v in vars(raw).items() if not k.startswith("_")}
    unknown = sorted(set(item) - _ITEM_KEYS)
    if "name" not in item or unknown:
        raise RewardSettingError(
            f"reward.items: {item!r} needs a name, and knows only: {', '.join(sorted(_ITEM_KEYS))}"
        )
    return item


def _label(name: str, reward: Reward) -> str:
    """A short name for the metrics: the registered one, or the function's."""
    if name.startswith(("http://", "https://")):
        return "remote"
    return reward.__name__ if is_path(name) else name
