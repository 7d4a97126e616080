"""Which groups and samples are trained on. Pure decisions on rewards and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rlmath.utils.lazy_torch import Tensor, torch

GroupRule = Literal["all", "variance", "accuracy", "mean_range"]
TruncatedRule = Literal["keep", "mask", "penalize", "scale"]


@dataclass(frozen=True)
class GroupFilter:
    """Keep a group or not.

    Attributes:
        rule: ``all``; ``variance``: keep when not all rewards are equal; ``accuracy``: when some
            samples are right and some are not (DAPO, arXiv:2503.14476, eq. 11), which differs
            from ``variance`` when rewards hold more than the answer; ``mean_range``: keep when
            the mean reward lies within the bounds, both included.
        low: Lower bound of ``mean_range``, in units of the reward.
        high: Its upper bound.
        max_unscored_share: A group of which a larger share could not be scored is dropped, because
            its statistics would be those of another group size.
    """

    rule: GroupRule = "variance"
    low: float = -math.inf
    high: float = math.inf
    max_unscored_share: float = 0.5

    def __post_init__(self) -> None:
        known = get_args(GroupRule)
        if self.rule not in known:
            raise ValueError(
                f"group filter {self.rule!r} is not known; known are: {', '.join(sorted(known))}"
            )
        if self.low > self.high:
            raise ValueError(f"group filter: low = {self.low} is above high = {self.high}")
        if not 0.0 <= self.max_unscored_share <= 1.0:
            raise ValueError(f"max_unscored_share = {self.max_unscored_share}: 0 to 1 is needed")

    def reason_to_drop(
        self, rewards: Sequence[float | None], correct: Sequence[bool | None] = ()
    ) -> str | None:
        """Why the group is dropped: ``unscored``, ``equal_rewards``, ``equal_accuracy`` or
        ``mean_out_of_range``.

        Args:
            rewards: Of the group's samples; ``None`` where nothing could score them.
            correct: Whether each is right, for ``accuracy``; ``None`` where no grader looked.

        Returns:
            ``None`` when the group is kept.
        """
        scored = [r for r in rewards if r is not None]
        unscored = len(rewards) - len(scored)
        if not scored or unscored > self.max_unscored_share * len(rewards):
            return "unscored"
        if self.rule == "variance" and min(scored) == max(scored):
            return "equal_rewards"
        if self.rule == "accuracy":
            graded = {one for one in correct if one is not None}
            if not graded:
                return "unscored"
            return None if len(graded) == 2 else "equal_accuracy"
        if self.rule == "mean_range":
            mean = math.fsum(scored) / len(scored)
            if not self.low <= mean <= self.high:
                return "mean_out_of_range"
        return None


def duplicates(responses: Sequence[tuple[int, ...]]) -> list[bool]:
    """For each response of a group, whether an earlier one has the very same tokens.

    Mask these out of the loss: copies would count a single solution several times.
    """
    seen: set[tuple[int, ...]] = set()
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
        penalty: Above 0, in units of the reward; ``penalize`` alone reads it.
        factor: 0 to below 1; ``scale`` alone reads it.

    Returns:
        ``[N]`` rewards, and ``[N]`` bool, false for sequences that are masked out of the loss.

    Raises:
        ValueError: Unknown rule, or a penalty or factor that does nothing.
    """
    everything = torch.ones_like(truncated)
    if rule == "keep":
        return rewards, everything
    if rule == "mask":
        return rewards, ~truncated
    if rule == "penalize":
        if penalty <= 0.0:
            raise ValueError(f"truncated = 'penalize' with penalty = {penalty}: above 0 is needed")
        return rewards - penalty * truncated.to(rewards.dtype), everything
    if rule == "scale":
        if not 0.0 <= factor < 1.0:
            raise ValueError(f"truncated = 'scale' with factor = {factor}: 0 to below 1 is needed")
        return torch.where(truncated, rewards * factor, rewards), everything
    raise ValueError(f"truncated = {rule!r} is not known; known are: keep, mask, penalize, scale")
