"""Loading of the problems that a run evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.checks.prompt_style import expects_request
from rlmath.config.benchmarks import Benchmark, benchmarks_of
from rlmath.config.schema import Config
from rlmath.data import load_problems
from rlmath.rewards.registry import any_graded
from rlmath.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOut:
    benchmark: Benchmark
    problems: tuple[Problem, ...]


def load_held_out(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[HeldOut]:
    """Read ``data.eval_paths`` and ``eval.benchmarks``, and log what became of their rows.

    Raises:
        UserError: As :func:`rlmath.data.load_problems`.
    """
    found = []
    for benchmark in benchmarks_of(config):
        problems, report = load_problems(
            benchmark.paths,
            benchmark.data,
            tokenizer,
            limit=benchmark.max_problems,
            graded=any_graded(item.name for item in config.reward.items),
            needs_box=expects_request(config),
        )
        rows = report.describe(benchmark.data.max_prompt_tokens)
        print(f"{benchmark.title}: {rows}", *report.prompt_lines(), sep="\n", flush=True)
        found.append(HeldOut(benchmark, tuple(problems)))
    return found
