"""Loading of the problems that a run evaluates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.checks.prompt_style import expects_request
from rlmath.config.benchmarks import BENCHMARKS, Benchmark, benchmarks_of
from rlmath.config.schema import Config
from rlmath.data import load_problems
from rlmath.data.files import Row, read_rows
from rlmath.data.source_stream import row_of
from rlmath.environments.chosen import prompt_tokenizer
from rlmath.rewards.registry import reads_golds
from rlmath.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOut:
    benchmark: Benchmark
    problems: tuple[Problem, ...]


def rows_of(benchmark: Benchmark) -> Iterable[Row]:
    """The rows of its files, or those that its plug-in returns. Raises UserError: a file cannot be
    read, or the plug-in returns no rows."""
    if benchmark.plugin is None:
        return read_rows(benchmark.paths)
    options = BENCHMARKS.options(benchmark.plugin).of(benchmark.options)
    given = BENCHMARKS.get(benchmark.plugin)(options)
    return [row_of(benchmark.name, number, fields) for number, fields in enumerate(given, 1)]


def load_held_out(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[HeldOut]:
    """Read ``data.eval_paths`` and ``eval.benchmarks``, and log the report on their rows. Raises
    UserError: as :func:`rlmath.data.load_problems`."""
    found, benchmarks = [], benchmarks_of(config)
    uses_tools = any(one.tools for one in benchmarks)
    with_tools = prompt_tokenizer(config, tokenizer) if uses_tools else tokenizer
    for benchmark in benchmarks:
        problems, report = load_problems(
            benchmark.paths or (benchmark.name,),
            benchmark.data,
            with_tools if benchmark.tools else tokenizer,
            rows=rows_of(benchmark),
            limit=benchmark.max_problems,
            graded=reads_golds(config.reward),
            needs_box=expects_request(config),
        )
        rows = report.describe(benchmark.data.max_prompt_tokens)
        print(f"data     {benchmark.title}: {rows}", *report.prompt_lines(), sep="\n", flush=True)
        found.append(HeldOut(benchmark, tuple(problems)))
    return found
