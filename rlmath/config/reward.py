"""Settings of ``reward``: rewards and grading."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from rlmath.grading.settings import (
    CORRECT,
    INCORRECT,
    LEAST_WORKERS,
    MOST_WORKERS,
    REWARD_FALLBACK,
    Fallback,
    GradingSettings,
)
from rlmath.utils.setting import setting

CompletionFormat = StrEnum("CompletionFormat", ["text", "chat"])
OnRewardError = StrEnum("OnRewardError", ["stop", "skip"])
WorkersOn = StrEnum("WorkersOn", ["driver", "engines"])


@dataclass
class RewardItem:
    name: str = setting(
        MISSING,
        "Registered name, import path (package.module:function) or file path (file.py:function).",
    )
    weight: float = setting(1.0, "Weight of this reward in the sum.")
    params: dict[str, Any] = setting(dict, "Arguments of the reward.")
    label: str | None = setting(None, "Name in metrics; null: derived from name.")
    required: bool = setting(False, "A sample that this reward cannot score gets no reward at all.")
    completion_format: CompletionFormat | None = setting(
        None,
        "What a function from elsewhere gets as prompts and completions: strings (text) or lists "
        "of messages (chat); null: chat where data.apply_chat_template=true is given or the data "
        "has messages, otherwise text.",
    )
    needs_group: bool | None = setting(
        None,
        "Call it with all completions of a problem at once; null: as the reward declares, and true "
        "for a function that does not say.",
    )


@dataclass
class RewardConfig:
    items: list[RewardItem] = setting(
        lambda: [RewardItem(name="math")],
        "Rewards; the reward of a sample is their weighted sum.",
        common=True,
    )
    correct: float = setting(CORRECT, "Reward of a correct final answer.")
    incorrect: float = setting(INCORRECT, "Reward of an incorrect or missing final answer.")
    on_error: OnRewardError = setting(
        OnRewardError.stop,
        "A reward function that raises: stop the run; or skip: count it and leave the samples of "
        "that call unscored.",
    )
    fallback: Fallback = setting(
        REWARD_FALLBACK,
        "Where to search for an answer that is not boxed: none, after a marker, or the last "
        "number; number rewards guesses and warns.",
    )
    verifier: str | None = setting(
        None,
        "Your own answer verifier, which decides whether an answer is accepted; null: rlmath's "
        "comparison of mathematical values.",
    )
    verifier_options: dict[str, Any] = setting(dict, "Options of the verifier.")
    num_workers: int | None = setting(
        None,
        "Worker processes of the grader, on each node that has some; null: a quarter of its cores, "
        f"from {LEAST_WORKERS} to {MOST_WORKERS}.",
        least=1,
    )
    workers_on: WorkersOn = setting(
        WorkersOn.driver,
        "Where the grader's worker processes run: beside the driver, or on each node that has "
        "engines. Answers of a node that is lost go to the others, and in the end to the driver.",
    )
    timeout_s: float = setting(
        GradingSettings.timeout_s, "Time limit of one comparison, in seconds.", above=0
    )
