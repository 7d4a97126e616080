"""Settings of ``eval``: evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from rlmath.utils.setting import OnlyWith, setting


@dataclass
class BenchmarkItem:
    name: str = setting(
        MISSING,
        "Name in metrics. aime24, aime25, amc23, math500, gpqa_diamond, minerva, olympiadbench and "
        "gsm8k are built in, with their file, fields and published settings; file.py:function is "
        "one of yours.",
    )
    path: str | None = setting(
        None, "Problem file; null: the built-in benchmark's file in eval.data_dir."
    )
    prompt_key: str | None = setting(
        None, "Field with the problem; null: the built-in benchmark's, or data.prompt_key."
    )
    answer_key: str | None = setting(
        None, "Field with the accepted answer; null: the built-in benchmark's, or data.answer_key."
    )
    apply_chat_template: bool | None = setting(
        None,
        "Like data.apply_chat_template; null: for published settings true for an instruct model, "
        "otherwise the value of data.",
    )
    prompt_template: str | None = setting(
        None,
        'Like data.prompt_template; null: for published settings the problem followed by "Please '
        'reason step by step, and put your final answer within \\\\boxed{}.", otherwise the value '
        "of data.",
    )
    samples: int | None = setting(
        None,
        "Samples per problem; null: the published number, or eval.samples. The same applies to the "
        "next three.",
        least=1,
    )
    temperature: float | None = setting(None, "Sampling temperature; 0: greedy.", least=0)
    top_p: float | None = setting(None, "Top-p (nucleus) sampling.", above=0, most=1)
    max_response_tokens: int | None = setting(None, "Maximum response length, in tokens.", least=1)
    max_problems: int | None = setting(
        None,
        "Maximum number of problems, taken from the start; null: data.max_eval_problems.",
        least=1,
    )
    options: dict[str, Any] = setting(dict, "Options of a benchmark of yours.")


@dataclass
class EvalConfig:
    benchmarks: list[BenchmarkItem] = setting(
        list, "Benchmarks in addition to the problems of data.eval_paths.", common=True
    )
    data_dir: str = setting(
        "datasets/benchmarks",
        "Folder with the files of built-in benchmarks; toolkits/prepare_data.py downloads them.",
    )
    published_settings: bool = setting(
        True,
        "Evaluate built-in benchmarks with their published samples, temperature, top-p, length and "
        "prompt; false: use the settings below and those of data.",
    )
    checkpoint: str | None = setting(
        None,
        "rlmath evaluate: checkpoint (checkpoints/step_000050) to evaluate; model.path gives "
        "architecture and tokenizer. null: evaluate model.path.",
    )
    every: int = setting(
        10, "Evaluate before the first step and every N steps; 0: never.", least=0, common=True
    )
    samples: int = setting(1, "Samples per held-out problem.", least=1)
    temperature: float = setting(0.6, "Sampling temperature; 0: greedy.", least=0)
    top_p: float = setting(0.95, "Top-p (nucleus) sampling; 1: off.", above=0, most=1)
    max_response_tokens: int | None = setting(
        None, "Maximum response length, in tokens; null: rollout.max_response_tokens.", least=1
    )
    tools: bool = setting(
        True,
        "Let the model use rollout.tools and rollout.environment; false: evaluate it without them.",
        only_with=OnlyWith("rollout.tools", words="a list of tools", also="rollout.environment"),
    )
