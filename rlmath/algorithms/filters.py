"""Which groups and samples are trained on. Pure decisions on rewards and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from rlmath.utils.lazy_torch import Tensor, torch
from rlmath.utils.setting import OnlyWith, setting

if TYPE_CHECKING:
    pass


class GroupRule(Enum):
    all = "all"
    variance = "variance"
    accuracy = "accuracy"
    mean_range = "mean_range"


class TruncatedRule(Enum):
    keep = "keep"
    mask = "mask"
    penalize = "penalize"
    scale = "scale"


@dataclass
class FilterConfig:
    keep: GroupRule = setting(
        GroupRule.all,
        "Groups to train on: all, groups with unequal rewards (variance), groups with correct and "
        "incorrect samples (accuracy), or groups with a mean reward between low and high "
        "(mean_range). A dropped group is replaced by another problem while others still generate "
        "(dynamic sampling).",
    )
    low: float | None = setting(
        None,
        "keep=mean_range: minimum mean reward; null: none.",
        only_with=OnlyWith("keep", (GroupRule.mean_range,)),
    )
    high: float | None = setting(
        None,
        "keep=mean_range: maximum mean reward; null: none.",
        only_with=OnlyWith("keep", (GroupRule.mean_range,)),
    )
    max_unscored_share: float = setting(
        0.5,
        "Drop a group if more than this fraction of its samples could not be scored.",
        least=0,
        most=1,
    )
    max_rounds: int = setting(
        4,
        "Sample at most this many times prompts_per_step problems for a step; if too few groups "
        "pass, the step is smaller.",
        least=1,
    )
    oversample: float = setting(
        1.0,
        "Problems sampled at once per missing group; values above 1 avoid waiting for refills, and "
        "the groups that are too many are carried over to the next step.",
        least=1,
        most=4,
        only_with=OnlyWith("keep", (GroupRule.variance, GroupRule.accuracy, GroupRule.mean_range)),
    )
    mask_duplicates: bool = setting(
        False, "Mask repeated copies of a response within a group out of the loss."
    )


# Why a group is dropped that nothing could score.
UNSCORED = "unscored"


def reason_to_drop(
    settings: FilterConfig,
    rewards: Sequence[float | None],
    correct: Sequence[bool | None] = (),
    *,
    reads_rewards: bool = True,
) -> str | None:
    """Why a group is dropped: ``unscored``, ``equal_rewards``, ``equal_accuracy`` or
    ``mean_out_of_range``.

    ``accuracy`` keeps a group when some samples are right and some are not (DAPO, arXiv:2503.14476,
    eq. 11), which differs from ``variance`` when rewards hold more than the answer. A group of
    which too many samples could not be scored is dropped, because its statistics would be those of
    another group size.

    Args:
        settings: What to keep.
        rewards: Of the group's samples; ``None`` where nothing could score them.
        correct: Whether each is right, for ``accuracy``; ``None`` where no grader looked.
        reads_rewards: Whether advantages come from rewards. Else ``all`` keeps a group that nothing
            could score, unless ``max_unscored_share`` says otherwise.

    Returns:
        ``None`` when the group is kept.
    """
    scored = [r for r in rewards if r is not None]
    unscored = len(rewards) - len(scored)
    reads_rewards |= settings.keep is not GroupRule.all
    if (reads_rewards and not scored) or unscored > settings.max_unscored_share * len(rewards):
        return UNSCORED
    if settings.keep is GroupRule.variance and min(scored) == max(scored):
        return "equal_rewards"
    if settings.keep is GroupRule.accuracy:
        graded = {one for one in correct if one is not None}
        if not graded:
            return UNSCORED
        return None if len(graded) == 2 else "equal_accuracy"
    if settings.keep is GroupRule.mean_range:
        mean = math.fsum(scored) / len(scored)
        low = -math.inf if settings.low is None else settings.low
        high = math.inf if settings.high is None else settings.high
        if not low <= mean <= high:
            return "mean_out_of_range"
    return None


def duplicates(responses: Sequence[bytes | str]) -> list[bool]:
    """For each response of a group, whether an earlier one has the very same tokens.

    Mask these out of the loss: copies would count a single solution several times.

    Args:
        responses: What tells the tokens of each: themselves, or a digest.
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
    """What becomes of responses that were cut off at the limit.

    - ``keep``: nothing changes; with no final answer they are wrong.
    - ``mask``: they take part in the group's statistics, but not in the loss (DAPO's overlong
      filtering, arXiv:2503.14476, §3.4): a good line of thought is not punished for its length.
    - ``penalize``: their reward falls by ``penalty``.
    - ``scale``: their reward is multiplied by ``factor``, as OpenRLHF's
      ``stop_properly_penalty_coef`` does, which is 0 in its ProRLv2 script. A negative reward would
      rise, so it is for those of at least 0.

    Args:
        rewards: ``[N]`` float.
        truncated: ``[N]`` bool.
        rule: One of the above.
        penalty: In units of the reward; ``penalize`` alone reads it.
        factor: 0 to below 1; ``scale`` alone reads it.

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
