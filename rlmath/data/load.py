"""Loading of problems and worked examples from data files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.config.schema import DataConfig, OverlongPrompt
from rlmath.data import leaks
from rlmath.data.files import Row, read_rows
from rlmath.data.golds import gold_kinds, refuse_no_gold
from rlmath.data.prompt_report import prompt_warnings, shown_prompt
from rlmath.data.prompts import Encoder, PromptRenderer
from rlmath.data.report import LoadReport
from rlmath.data.rows import Draft, Target, answers_in, problem_of, responses_in, usable_rows
from rlmath.errors import UserError
from rlmath.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_IN_REPORT = 10


@dataclass(frozen=True)
class Example:
    """A prompt with the response to imitate."""

    id: str  # The data file's name and the row in it.
    prompt_token_ids: tuple[int, ...]
    # The response to learn, the end-of-sequence token included.
    response_token_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)


def load_problems(
    paths: Sequence[str | Path],
    settings: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: Iterable[Row] | None = None,
    limit: int | None = None,
    graded: bool = True,
    needs_box: bool = False,
) -> tuple[list[Problem], LoadReport]:
    """Read problems, in the files' order. Returns the problems, and the report on the rows.
    ``Problem.columns`` has every field of the row as it is in the file.

    Args:
        paths: Files, or names of the rows' source for messages.
        rows: Rows that are read already; ``None``: read them from the files.
        settings: Fields, templates and what to do with rows that do not fit.
        limit: Keep the first N; ``None``: all.
        needs_box: Whether answers count only in a box.

    Raises:
        UserError: A file or a row that cannot be read, a prompt that is too long (where the
            settings say stop), no problem left, or none with an answer that a response can match.
    """
    names = [str(path) for path in paths]
    rows = read_rows(paths) if rows is None else rows
    drafts, skipped = _read(rows, names, settings, tokenizer, answers_in(settings.answer_key))
    drafts, tokens, report = _within_limits(drafts, settings, tokenizer, skipped, limit)
    golds = gold_kinds((draft.place, draft.target) for draft in drafts)
    if graded:
        refuse_no_gold(golds, names)
    renderer = PromptRenderer(settings, tokenizer)
    problems = [
        problem_of(draft, ids, settings, renderer)
        for draft, ids in zip(drafts, tokens, strict=True)
    ]
    shares = leaks.shares([draft.prompt for draft in drafts], [draft.target for draft in drafts])
    leaks.check(shares, len(drafts), settings.max_leaked_answers, names)
    return problems, replace(
        report, golds=golds, **_prompt_fields(drafts, settings, tokenizer, needs_box)
    )


def load_examples(
    paths: Sequence[str | Path],
    settings: DataConfig,
    response_key: str,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
) -> tuple[list[Example], LoadReport]:
    """Read worked examples for supervised fine-tuning, in the files' order.

    Prompt and response are encoded separately, like a prompt and a sampled response. The response
    ends with the tokenizer's end-of-sequence token, once.

    Args:
        max_tokens: Positions of the model; longer examples are treated as longer prompts are
            (``settings.overlong_prompts``). ``None``: no limit.

    Raises:
        UserError: As :func:`load_problems`, and for a tokenizer without an end-of-sequence token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(
            "the model's tokenizer has no end-of-sequence token, which ends a response; name it "
            "as eos_token in tokenizer_config.json"
        )
    names = [str(path) for path in paths]
    target = responses_in(response_key)
    drafts, skipped = _read(read_rows(paths), names, settings, tokenizer, target)
    drafts, prompts, report = _within_limits(drafts, settings, tokenizer, skipped, None)
    responses = Encoder(tokenizer).encode([draft.target for draft in drafts], False)
    examples = [
        Example(draft.place, prompt, response if response[-1] == end else (*response, end))
        for draft, prompt, response in zip(drafts, prompts, responses, strict=True)
    ]
    report = replace(report, **_prompt_fields(drafts, settings, tokenizer, needs_box=False))
    return _fitting_examples(examples, settings, report, max_tokens)


def _fitting_examples(
    examples: list[Example], settings: DataConfig, report: LoadReport, max_tokens: int | None
) -> tuple[list[Example], LoadReport]:
    """Leave out examples longer than the model's positions, and report the longest."""
    longest = max(examples, key=len)
    report = replace(report, longest_tokens=len(longest))
    if max_tokens is None or len(longest) <= max_tokens:
        return examples, report
    fitting = [example for example in examples if len(example) <= max_tokens]
    over = len(examples) - len(fitting)
    message = overlong_example(
        longest.id, len(longest.prompt_token_ids), len(longest.response_token_ids), max_tokens
    )
    if not fitting or settings.overlong_prompts is OverlongPrompt.stop:
        raise UserError(f"{over:,} of {len(examples):,} worked examples are too long: {message}")
    kept = replace(report, kept=len(fitting), overlong=over)
    warning = f"{over:,} worked examples are dropped as too long: {message}"
    return fitting, replace(kept, warnings=(*kept.warnings, warning))


def overlong_example(place: str, prompt: int, response: int, most: int) -> str:
    """A message with the lengths of a worked example that does not fit, and the fix."""
    return (
        f"{place} has {prompt:,} prompt + {response:,} response = {prompt + response:,} tokens, "
        f"but the model has {most:,} positions; shorten the examples, or use another model"
    )


def _read(
    rows: Iterable[Row],
    names: Sequence[str],
    settings: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    target: Target,
) -> tuple[list[Draft], list[str]]:
    """Readable rows, at least one, and why the others were skipped."""
    renderer = PromptRenderer(settings, tokenizer)
    drafts, skipped = usable_rows(rows, settings, renderer, target)
    if not drafts:
        where = ", ".join(names) or "no file"
        why = f"all {len(skipped)} rows are malformed, such as {skipped[0]}" if skipped else ""
        raise UserError(f"{where}: {why or 'it has no rows'}")
    return drafts, skipped


def _within_limits(
    drafts: list[Draft],
    settings: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    skipped: list[str],
    limit: int | None,
) -> tuple[list[Draft], list[tuple[int, ...]], LoadReport]:
    """Tokenize, and drop rows that are too long or beyond the limit."""
    tokens = Encoder(tokenizer).encode(
        [draft.prompt for draft in drafts], add_first_tokens=not settings.apply_chat_template
    )
    most = settings.max_prompt_tokens
    fitting = [index for index, ids in enumerate(tokens) if len(ids) <= most]
    overlong = len(drafts) - len(fitting)
    at = max(range(len(tokens)), key=lambda index: len(tokens[index]))
    longest = len(tokens[at])
    if overlong and (settings.overlong_prompts is OverlongPrompt.stop or not fitting):
        remedy = "" if not fitting else ", or leave them out with data.overlong_prompts=filter"
        raise UserError(
            f"data.max_prompt_tokens={most}: {overlong} of {len(drafts)} prompts are longer, the "
            f"longest ({drafts[at].place}) has {longest} tokens; set it to {longest}{remedy}"
        )
    wanted = fitting if limit is None else fitting[:limit]
    kept = [drafts[index] for index in wanted]
    duplicates, contradictions = _count_repeated(kept)
    report = LoadReport(
        rows=len(drafts) + len(skipped),
        kept=len(kept),
        filtered=overlong,
        skipped=len(skipped),
        beyond_limit=len(fitting) - len(wanted),
        duplicates=duplicates,
        contradictions=contradictions,
        longest_prompt_tokens=longest,
        skipped_rows=tuple(skipped[:_ROWS_IN_REPORT]),
        restored=sum(draft.is_restored for draft in kept),
    )
    return kept, [tokens[index] for index in wanted], report


def _prompt_fields(
    drafts: list[Draft], settings: DataConfig, tokenizer: PreTrainedTokenizerBase, needs_box: bool
) -> dict[str, Any]:
    """Fields of the report about the prompts of kept rows."""
    found = prompt_warnings(drafts, settings, tokenizer, needs_box=needs_box)
    return {"prompt": shown_prompt(drafts[0].prompt), "warnings": tuple(found)}


def _count_repeated(drafts: list[Draft]) -> tuple[int, int]:
    """Rows with the prompt of an earlier row, and those of them with another target."""
    first: dict[str, Any] = {}
    duplicates = contradictions = 0
    for draft in drafts:
        if draft.prompt in first:
            duplicates += 1
            contradictions += first[draft.prompt] != draft.target
        else:
            first[draft.prompt] = draft.target
    return duplicates, contradictions
