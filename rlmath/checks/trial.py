"""What ``--check`` tries out: the first rows as the run reads them, with the model's tokenizer, and
rewards of the user's own on two made-up responses.

Needs neither torch nor transformers. The user's code runs, so this is not for every start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.checks.data_rows import rows_of
from rlmath.config.benchmarks import HELD_OUT, benchmarks_of
from rlmath.config.hub_names import is_hub
from rlmath.config.schema import Config, DataConfig, OverlongPrompt, RewardItem
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.data.prompts import Encoder, PromptRenderer
from rlmath.data.rows import Draft, Target, answers_in, responses_in, usable_rows
from rlmath.errors import UserError
from rlmath.model.folder import TINY
from rlmath.rewards.loading import is_path
from rlmath.rewards.registry import available_rewards
from rlmath.types import Problem, Sample

# Rows of each file that are read.
ROWS = 1000


def trial(config: Config, command: str) -> list[str]:
    """Lines that say how the trial went.

    Args:
        config: Checked settings, with a model whose folder is there.
        command: ``train``, ``sft`` or ``evaluate``.

    Raises:
        UserError: A row is malformed or a prompt too long where the settings say stop, or a
            reward cannot be loaded, raised, or returned something else than numbers.
    """
    folder = config.model.path
    if folder != TINY and not (Path(folder) / "tokenizer.json").is_file():
        return [f"prompts  not looked at: {folder} has no tokenizer.json, only slower formats"]
    tokenizer = LightTokenizer(folder)
    read = [_prompts(source, tokenizer) for source in _sources(config, command)]
    lines = [line for _, found in read for line in found]
    own = [item for item in config.reward.items if _is_own(item.name)]
    if command == "train" and own and read[0][0]:
        problem = _problem(config.data, read[0][0][0], tokenizer)
        lines += _own_rewards(config, own, problem, tokenizer)
    return lines


@dataclass(frozen=True)
class _Source:
    """Files that are read alike; ``title`` ends with a space where there is one."""

    title: str
    paths: list[str]
    data: DataConfig
    target: Target


def _sources(config: Config, command: str) -> Iterator[_Source]:
    """What the command reads, without data sets of the hub, which are fetched at its start."""
    if command == "sft":
        yield _source(
            "", config.sft.train_paths, config.data, responses_in(config.sft.response_key)
        )
        return
    if command == "train":
        answers = answers_in(config.data.answer_key)
        yield _source("", config.data.train_paths, config.data, answers)
    for benchmark in benchmarks_of(config):
        answers = answers_in(benchmark.data.answer_key)
        title = "" if command == "evaluate" and benchmark.name == HELD_OUT else benchmark.title
        yield _source(f"{title}: " if title else "", benchmark.paths, benchmark.data, answers)


def _source(title: str, paths: Sequence[str], data: DataConfig, target: Target) -> _Source:
    return _Source(title, [path for path in paths if not is_hub(path)], data, target)


def _prompts(source: _Source, tokenizer: LightTokenizer) -> tuple[list[Draft], list[str]]:
    """Rows read as the run reads them, and lines that say what became of them.

    Raises:
        UserError: As the run would say it of these rows.
    """
    data, target, title = source.data, source.target, f"prompts  {source.title}"
    renderer = PromptRenderer(data, tokenizer)
    drafts: list[Draft] = []
    skipped: list[str] = []
    all_read = True
    for path in source.paths:
        rows = list(itertools.islice(rows_of(path), ROWS))
        all_read = all_read and len(rows) < ROWS
        usable, malformed = usable_rows(rows, data, renderer, target)
        drafts, skipped = drafts + usable, skipped + malformed
    lines = []
    if skipped:
        lines.append(
            f"{title}{len(skipped):,} of {len(drafts) + len(skipped):,} rows looked at are "
            f"malformed and left out (data.malformed_rows=skip), such as {skipped[0]}"
        )
        if all_read and not drafts:
            raise UserError(f"all {len(skipped)} rows are malformed, such as {skipped[0]}")
    if drafts:
        texts = [draft.prompt for draft in drafts]
        lines.append(title + _lengths(data, texts, tokenizer, all_read=all_read))
    return drafts, lines


def _lengths(
    data: DataConfig, texts: list[str], tokenizer: LightTokenizer, *, all_read: bool
) -> str:
    encoded = Encoder(tokenizer).encode(texts, add_first_tokens=not data.apply_chat_template)
    lengths, most = [len(ids) for ids in encoded], data.max_prompt_tokens
    too_long, longest = sum(length > most for length in lengths), max(lengths)
    looked_at = f"{len(texts):,} prompts looked at"
    if not too_long:
        return f"the longest of {looked_at} has {longest:,} tokens, of at most {most:,}"
    too_long_of = f"{too_long:,} of {looked_at} have more than {most:,} tokens, up to {longest:,}"
    none_left = all_read and too_long == len(texts)
    if data.overlong_prompts is OverlongPrompt.stop or none_left:
        remedy = "" if none_left else ", or leave them out with data.overlong_prompts=filter"
        raise UserError(
            f"data.max_prompt_tokens={most}: {too_long_of}; set it to {longest}{remedy}"
        )
    return f"{too_long_of}; they are left out (data.overlong_prompts=filter)"


def _problem(data: DataConfig, draft: Draft, tokenizer: LightTokenizer) -> Problem:
    encoder = Encoder(tokenizer)
    ids = encoder.encode([draft.prompt], add_first_tokens=not data.apply_chat_template)
    return Problem(draft.place, draft.prompt, ids[0], draft.target, draft.fields)


def _is_own(name: str) -> bool:
    """Whether a reward is a function of the user's; a server of theirs may not be in reach."""
    server = name.startswith(("http://", "https://"))
    return is_path(name) and not server and name not in available_rewards()


def _own_rewards(
    config: Config, items: Sequence[RewardItem], problem: Problem, tokenizer: LightTokenizer
) -> Iterator[str]:
    """Call the rewards that the user wrote, as training would."""
    import numpy as np

    from rlmath.rewards.mix import RewardMix  # With the grader: for those alone who need it.

    texts = (f"The answer is \\boxed{{{problem.answers[0]}}}.", "I do not know.")
    samples = [
        Sample(
            problem_id=problem.id,
            index=index,
            token_ids=np.array(tokenizer(text, add_special_tokens=False).input_ids, np.int32),
            log_probs=np.zeros(0, np.float32),
            text=text,
            finish_reason="stop",
            spans=((0, 0),),
            seed=index,
            engine=0,
        )
        for index, text in enumerate(texts)
    ]
    completion_format = "chat" if config.data.apply_chat_template else "text"
    with RewardMix.from_config(
        items,
        correct=config.reward.correct,
        incorrect=config.reward.incorrect,
        completion_format=completion_format,  # type: ignore[arg-type]
    ) as mix:
        mix.check_columns([problem])
        right, wrong = mix.score_group(problem, samples)
    for label in right.rewards:
        values = (right.rewards[label], wrong.rewards[label])
        shown = ["cannot be scored" if value is None else f"{value:g}" for value in values]
        yield (
            f"reward   {label}: {shown[0]} for a made-up response with the accepted answer, "
            f"{shown[1]} for one without ({problem.id})"
        )
