"""Selection of the groups and samples to train on. Pure functions of rewards and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlmath.plugins.registry import Registry
from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import OnlyWith, Options, setting


@dataclass(frozen=True)
class GroupScores:
    """Scores of a group, the input of a filter."""

    rewards: tuple[float, ...]  # Rewards of the scored samples, at least one.
    correct: tuple[bool | None, ...] = ()  # Whether each sample is right; None where ungraded.


@dataclass(frozen=True)
class FilterTraits:
    """Properties of a filter."""

    reason: str = "filtered"  # Why it drops a group, for the ledger and sampling/dropped_<reason>.
    compares: bool = False  # Compares the samples of a group, and drops any group of one.
    # Uses which samples are right: a group in which nothing was graded is dropped as unscored.
    reads_correct: bool = False


# (scores, options) -> whether to train on the group
GroupFilter = Callable[[GroupScores, Any], bool]
GROUP_FILTERS: Registry[GroupFilter, FilterTraits] = Registry("algorithm.filter.keep", FilterTraits)
EVERY_GROUP = "all"


@GROUP_FILTERS.register(EVERY_GROUP)
def every_group(scores: GroupScores, options: Options) -> bool:
    """Keep all groups."""
    return True


@GROUP_FILTERS.register("variance", traits=FilterTraits("equal_rewards", compares=True))
def variance(scores: GroupScores, options: Options) -> bool:
    """Keep a group with unequal rewards."""
    return min(scores.rewards) != max(scores.rewards)


@GROUP_FILTERS.register(
    "accuracy", traits=FilterTraits("equal_accuracy", compares=True, reads_correct=True)
)
def accuracy(scores: GroupScores, options: Options) -> bool:
    """Keep a group if some samples are right and some are wrong (DAPO, arXiv:2503.14476, eq. 11).
    Differs from ``variance`` if rewards depend on more than the answer."""
    return len({one for one in scores.correct if one is not None}) == 2


@dataclass(frozen=True)
class MeanRangeOptions(Options):
    low: float | None = setting(None, "Minimum mean reward; null: none.")
    high: float | None = setting(None, "Maximum mean reward; null: none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise ValueError("mean_range has no range; give low or high, in units of the reward")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low={self.low:g}: is above high={self.high:g}")


@GROUP_FILTERS.register("mean_range", MeanRangeOptions, FilterTraits("mean_out_of_range"))
def mean_range(scores: GroupScores, options: MeanRangeOptions) -> bool:
    """Keep a group whose mean reward is from ``low`` to ``high``."""
    mean = math.fsum(scores.rewards) / len(scores.rewards)
    low = -math.inf if options.low is None else options.low
    high = math.inf if options.high is None else options.high
    return low <= mean <= high


class TruncatedRule(Enum):
    keep = "keep"
    mask = "mask"
    penalize = "penalize"
    scale = "scale"


@dataclass
class FilterConfig:
    keep: str = setting(
        EVERY_GROUP,
        "Groups to train on: all, groups with unequal rewards (variance), groups with correct and "
        "incorrect samples (accuracy), groups with a mean reward within a range (mean_range), or "
        "your own filter. A dropped group is replaced by another problem while others still "
        "generate (dynamic sampling).",
    )
    options: dict[str, Any] = setting(dict, "Options of the filter, see the tables below.")
    max_unscored_share: float = setting(
        0.5,
        "Drop a group if more than this fraction of its samples could not be scored.",
        least=0,
        most=1,
    )
    max_rounds: int = setting(
        4,
        "Sample at most this many times prompts_per_step problems for a step; if too few groups "
        "pass, the step is smaller. 1: no group is replaced.",
        least=1,
    )
    oversample: float = setting(
        1.0,
        "Problems sampled at once per missing group; values above 1 avoid waiting for refills, and "
        "the groups that are too many are carried over to the next step.",
        least=1,
        most=4,
        only_with=OnlyWith("keep", words="variance, accuracy, mean_range or another filter"),
    )
    mask_duplicates: bool = setting(
        False, "Mask repeated copies of a response within a group out of the loss."
    )


# Reason for dropping a group without any scored sample.
UNSCORED = "unscored"


def reason_to_drop(
    settings: FilterConfig,
    rewards: Sequence[float | None],
    correct: Sequence[bool | None] = (),
    *,
    options: Options | None = None,
    reads_rewards: bool = True,
) -> str | None:
    """Why a group is dropped: ``unscored``, or the reason of the filter.

    A group with too many unscored samples is dropped, because its statistics would be those of a
    different group size.

    Args:
        rewards: Rewards of the group's samples; ``None`` where unscored.
        correct: Whether each sample is right; ``None`` where ungraded.
        options: The filter's options; ``None``: its defaults.
        reads_rewards: Whether advantages come from rewards. If not, ``all`` keeps a group without
            any score, within ``max_unscored_share``.

    Returns:
        ``None`` if the group is kept.
    """
    scored = [r for r in rewards if r is not None]
    unscored = len(rewards) - len(scored)
    reads_rewards |= settings.keep != EVERY_GROUP
    if (reads_rewards and not scored) or unscored > settings.max_unscored_share * len(rewards):
        return UNSCORED
    if not scored:
        return None
    traits = GROUP_FILTERS.traits(settings.keep)
    if traits.reads_correct and all(one is None for one in correct):
        return UNSCORED
    given = options if options is not None else GROUP_FILTERS.options(settings.keep)()
    keeps = GROUP_FILTERS.get(settings.keep)(GroupScores(tuple(scored), tuple(correct)), given)
    return None if keeps else traits.reason


def drop_reasons() -> list[str]:
    traits = (GROUP_FILTERS.traits(name) for name in GROUP_FILTERS.names() if name != EVERY_GROUP)
    return [UNSCORED, *dict.fromkeys(one.reason for one in traits)]


def duplicates(responses: Sequence[bytes | str]) -> list[bool]:
    """For each response of a group, whether an earlier one has exactly the same tokens.

    Mask these out of the loss, because copies would count one solution several times.

    Args:
        responses: The tokens of each response, or a digest of them.
    """
    seen: set[bytes | str] = set()
    flags = []
    for tokens in responses:
        flags.append(tokens in seen)
        seen.add(tokens)
    return flags


def handle_truncated(
    rewards: Tensor,
    truncated: Tensor,
    rule: TruncatedRule,
    penalty: float = 0.0,
    factor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Apply a rule to responses that were truncated at the limit.

    - ``keep``: nothing changes; without a final answer they are wrong.
    - ``mask``: they are part of the group's statistics, but not of the loss (DAPO's overlong
      filtering, arXiv:2503.14476, §3.4): a good line of thought is not punished for its length.
    - ``penalize``: their reward is reduced by ``penalty``.
    - ``scale``: their reward is multiplied by ``factor``, like OpenRLHF's
      ``stop_properly_penalty_coef``, which is 0 in its ProRLv2 script. Only for rewards of at least
      0, because a negative reward would increase.

    Args:
        rewards: ``[N]`` float.
        truncated: ``[N]`` bool.
        penalty: In units of the reward; only for ``penalize``.
        factor: From 0 to below 1; only for ``scale``.

    Returns:
        ``[N]`` rewards, and ``[N]`` bool, false for sequences that are masked out of the loss.
    """
    everything = torch.ones_like(truncated)
    if rule is TruncatedRule.keep:
        return rewards, everything
    if rule is TruncatedRule.mask:
        return rewards, ~truncated
    if rule is TruncatedRule.penalize:
        return rewards - penalty * truncated.to(rewards.dtype), everything
    return torch.where(truncated, rewards * factor, rewards), everything
