"""The problems that a run trains on, in the order in which it takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlmath.checks.prompt_style import expects_request
from rlmath.config.schema import Config
from rlmath.data import Stream, load_problems
from rlmath.data.mixture import stream_of
from rlmath.data.prompt_report import too_few
from rlmath.data.source_stream import SourceStream, first_rows
from rlmath.environments.chosen import prompt_tokenizer
from rlmath.rewards.registry import reads_golds
from rlmath.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Rows of a data source that are looked at before a run.
LOOKED_AT = 64


def open_problems(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[Stream, Sequence[Problem]]:
    """The problems of ``data.source`` or ``data.train_paths``; prints the report on their rows.
    Returns their order, and all of them; of a data source the first. Raises UserError: as
    :func:`rlmath.data.load_problems`."""
    data, per_step = config.data, config.algorithm.prompts_per_step
    tokenizer = prompt_tokenizer(config, tokenizer)
    graded, needs_box = reads_golds(config.reward), expects_request(config)
    if data.source is not None:
        rows = first_rows(data, LOOKED_AT)
        problems, report = load_problems(
            [data.source], data, tokenizer, rows=rows, graded=graded, needs_box=needs_box
        )
        said = f"the first {report.describe(data.max_prompt_tokens)}"
        print(f"data     training problems: {data.source}, {said}", flush=True)
        print("\n".join(report.prompt_lines()), flush=True)
        return SourceStream(data, tokenizer), problems
    problems, report = load_problems(
        data.train_paths, data, tokenizer, graded=graded, needs_box=needs_box
    )
    print("data     training problems:", report.describe(data.max_prompt_tokens), flush=True)
    few = too_few("problems", len(problems), "algorithm.prompts_per_step", per_step)
    print("\n".join([*report.prompt_lines(), *few]), flush=True)
    return stream_of(problems, data.train_weights, data.seed, data.shuffle), problems
