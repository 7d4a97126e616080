"""Settings of ``data``: problems and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlmath.utils.setting import setting

MalformedRow = StrEnum("MalformedRow", ["stop", "skip"])
OverlongPrompt = StrEnum("OverlongPrompt", ["stop", "filter"])


@dataclass
class DataConfig:
    train_paths: list[str] = setting(
        list,
        "Training problems: files (.jsonl, .json, .csv, .parquet, .arrow, compressed text), saved "
        "folders, or Hugging Face datasets written as hub:ORGANIZATION/NAME:CONFIGURATION:SPLIT.",
        common=True,
    )
    source: str | None = setting(
        None,
        "Your own data source, whose rows are the training problems, in its order and without end; "
        "null: train_paths.",
    )
    source_options: dict[str, Any] = setting(dict, "Options of the data source.")
    train_weights: list[float] = setting(
        list,
        "Sampling weight of each entry of train_paths, independent of its number of rows; empty: "
        "all rows count equally.",
    )
    eval_paths: list[str] = setting(
        list, "Files with held-out problems; empty: no evaluation.", common=True
    )
    prompt_key: str = setting(
        "prompt",
        "Field with the prompt: a string, or a list of chat messages (with apply_chat_template). "
        "A dotted name leads into nested fields.",
        common=True,
    )
    answer_key: str = setting(
        "solutions",
        "Field with the accepted answer or a list of accepted answers; a dotted name leads into "
        "nested fields.",
        common=True,
    )
    apply_chat_template: bool | None = setting(
        None,
        "Apply the tokenizer's chat template; a string becomes one user message. null: for an "
        "instruct model, unless the prompts have chat markers already.",
        common=True,
    )
    template_date: str | None = setting(
        None,
        "Today for chat templates with a date, as YYYY-MM-DD; null: the day of the start, if the "
        "template asks for it.",
    )
    template_options: dict[str, Any] = setting(
        dict, "Further variables of the chat template, such as {enable_thinking: false}."
    )
    system_prompt: str | None = setting(
        None, "System message of every prompt; requires apply_chat_template."
    )
    prompt_template: str | None = setting(
        None,
        "Template that contains {prompt}, applied before the chat template; {prompt}: the problem "
        "as it is. null: asks for \\boxed{} if only a boxed answer counts and the prompts do not "
        "ask themselves. On the command line, \\n is a line break and \\\\ a backslash.",
    )
    max_prompt_tokens: int = setting(
        1024, "Maximum prompt length, in tokens.", least=1, common=True
    )
    overlong_prompts: OverlongPrompt = setting(
        OverlongPrompt.filter, "Longer prompts: stop before the run, or filter (skip and count)."
    )
    malformed_rows: MalformedRow = setting(
        MalformedRow.stop, "Malformed rows: stop with file, line and field, or skip and count."
    )
    max_leaked_answers: float = setting(
        0.2,
        "Maximum fraction of prompts that contain their own answer, beyond the fraction that "
        "contain the next problem's; 1 disables.",
        least=0,
        most=1,
    )
    shuffle: bool = setting(True, "Shuffle the training problems in each epoch.")
    seed: int = setting(0, "Seed of the data order.", least=0, most=2**32 - 1)
    max_eval_problems: int | None = setting(
        None, "Maximum number of held-out problems, taken from the start; null: all.", least=1
    )
