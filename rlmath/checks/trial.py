"""The trial of ``--check``: the first rows as the run reads them, with the model's tokenizer, the
making of every reward, and rewards of the user's own on two made-up responses.

Needs neither torch nor transformers. The user's code runs, so this is not for every start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlmath.checks.data_rows import rows_of
from rlmath.checks.prompt_style import expects_request
from rlmath.checks.run import known_model
from rlmath.config.benchmarks import HELD_OUT, benchmarks_of
from rlmath.config.hub_names import is_hub
from rlmath.config.rollout import has_turns
from rlmath.config.schema import Config, DataConfig, OverlongPrompt
from rlmath.data.answers import accepted_answers
from rlmath.data.files import Row
from rlmath.data.golds import gold_kinds, refuse_no_gold
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.data.load import overlong_example
from rlmath.data.prompt_report import prompt_warnings, shown_prompt, too_few
from rlmath.data.prompts import Encoder, PromptRenderer
from rlmath.data.rows import Draft, Target, answers_in, problem_of, responses_in, usable_rows
from rlmath.data.source_stream import first_rows
from rlmath.environments.chosen import prompt_tokenizer
from rlmath.errors import UserError
from rlmath.model.folder import TINY
from rlmath.model.hub import is_hub_model
from rlmath.plugins.source import is_path
from rlmath.rewards.made_sample import made_sample
from rlmath.rewards.registry import available_rewards, reads_golds
from rlmath.types import Problem

if TYPE_CHECKING:
    from rlmath.rewards.mix import RewardMix

# Rows of each file that are read, and of a data source.
ROWS, PEEKED_OF_SOURCE = 1000, 64


def trial(config: Config, command: str) -> list[str]:
    """Lines that say how the trial went.

    Raises:
        UserError: A row is malformed or a prompt too long where the settings say stop, or a
            reward cannot be made, raised, or returned something else than numbers.
    """
    sources = list(_sources(config, command))
    missing = _no_tokenizer(config.model.path)
    tokenizer = LightTokenizer(TINY if missing else config.model.path)
    if missing:
        lines = [f"prompts  not checked: {missing}"]
        drafts = [_drafts_in_its_place(source, tokenizer) for source in sources]
    else:
        uses_tools = any(source.uses_tools for source in sources)
        with_tools = prompt_tokenizer(config, tokenizer) if uses_tools else tokenizer
        read = [_prompts(one, with_tools if one.uses_tools else tokenizer) for one in sources]
        lines = [line for _, found in read for line in found]
        drafts = [of_source for of_source, _ in read]
    if command == "sft":
        return lines
    found = zip(sources, drafts, strict=True)
    problems = [_problem(one.data, rows[0], tokenizer) for one, rows in found if rows]
    lines += _rewards(config, problems[:1], tokenizer, not_the_models=bool(missing))
    return lines


def _no_tokenizer(model: str) -> str:
    """Why prompts cannot be rendered as the model's; empty: they can."""
    if is_hub_model(model):
        return f"{model} and its tokenizer are still on the hub"
    if model != TINY and not (Path(model) / "tokenizer.json").is_file():
        return f"{model} has no tokenizer.json, only slower formats"
    return ""


@dataclass(frozen=True)
class _Source:
    """Files that are read alike; ``title`` ends with a space where there is one."""

    title: str
    paths: list[str]
    data: DataConfig
    target: Target
    is_graded: bool  # Responses are compared with the accepted answers.
    needs_box: bool = False  # An answer counts in a box alone.
    max_tokens: int | None = None  # Positions of the model, for worked examples; None: unknown.
    # Setting and number of prompts of a step; None for benchmarks.
    per_step: tuple[str, int] | None = None
    is_streamed: bool = False  # The rows are those of data.source.
    uses_tools: bool = False  # The model may call rollout.tools and rollout.environment.

    def rows(self) -> Iterator[list[Row]]:
        if self.is_streamed:
            yield first_rows(self.data, PEEKED_OF_SOURCE)
        for path in self.paths:
            yield list(itertools.islice(rows_of(path), ROWS))

    @property
    def has_answers(self) -> bool:
        """Whether the target is accepted answers, and not a response to imitate."""
        return self.target.read is accepted_answers


def _sources(config: Config, command: str) -> Iterator[_Source]:
    """Sources that the command reads, without data sets of the hub, which its start fetches."""
    if command == "sft":
        spec, sft = known_model(config), config.sft
        yield _Source(
            "",
            _local(sft.train_paths),
            config.data,
            responses_in(sft.response_key),
            is_graded=False,
            max_tokens=None if spec is None else spec.max_positions,
            per_step=("sft.sequences_per_step", sft.sequences_per_step),
        )
        return
    graded = reads_golds(config.reward)
    boxed = expects_request(config)
    if command == "train":
        answers = answers_in(config.data.answer_key)
        per_step = ("algorithm.prompts_per_step", config.algorithm.prompts_per_step)
        paths = _local(config.data.train_paths)
        source = _Source("", paths, config.data, answers, graded, boxed, per_step=per_step)
        streamed = config.data.source is not None
        yield replace(source, is_streamed=streamed, uses_tools=has_turns(config.rollout))
    for benchmark in benchmarks_of(config):
        answers = answers_in(benchmark.data.answer_key)
        title = "" if command == "evaluate" and benchmark.name == HELD_OUT else benchmark.title
        title = f"{title}: " if title else ""
        source = _Source(title, _local(benchmark.paths), benchmark.data, answers, graded, boxed)
        yield replace(source, uses_tools=benchmark.tools)


def _local(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not is_hub(path)]


def _prompts(source: _Source, tokenizer: LightTokenizer) -> tuple[list[Draft], list[str]]:
    """Rows read like the run reads them, and lines about the result. Raises UserError: as the run
    would say it of these rows."""
    data, target, title = source.data, source.target, f"prompts  {source.title}"
    renderer = PromptRenderer(data, tokenizer)
    drafts: list[Draft] = []
    skipped: list[str] = []
    all_read = True
    for rows in source.rows():
        all_read = all_read and len(rows) < ROWS and not source.is_streamed
        usable, malformed = usable_rows(rows, data, renderer, target)
        drafts, skipped = drafts + usable, skipped + malformed
    lines = []
    if skipped:
        lines.append(
            f"{title}{len(skipped):,} of {len(drafts) + len(skipped):,} checked rows are "
            f"malformed and dropped (data.malformed_rows=skip), such as {skipped[0]}"
        )
        if all_read and not drafts:
            raise UserError(f"all {len(skipped)} rows are malformed, such as {skipped[0]}")
    if drafts:
        texts = [draft.prompt for draft in drafts]
        lines.append(title + _lengths(data, texts, tokenizer, all_read=all_read))
        if not source.has_answers:
            lines += _examples(source, drafts, tokenizer, all_read=all_read)
        lines += _golds(source, drafts, all_read=all_read)
        if all_read and source.per_step:
            what = "problems" if source.has_answers else "worked examples"
            lines += too_few(what, len(drafts), *source.per_step)
        lines.append(f"prompt   {source.title}{shown_prompt(texts[0])}")
        lines += [
            f"warning  {source.title}{text}"
            for text in prompt_warnings(drafts, data, tokenizer, needs_box=source.needs_box)
        ]
    return drafts, lines


def _examples(
    source: _Source, drafts: Sequence[Draft], tokenizer: LightTokenizer, *, all_read: bool
) -> Iterator[str]:
    """The longest worked example, which has to fit the model. Raises UserError: none fits, or the
    settings say stop."""
    encoder, most = Encoder(tokenizer), source.max_tokens
    first = not source.data.apply_chat_template
    prompts = encoder.encode([draft.prompt for draft in drafts], add_first_tokens=first)
    responses = encoder.encode([draft.target for draft in drafts], add_first_tokens=False)
    sizes = [(len(p), len(r) + 1) for p, r in zip(prompts, responses, strict=True)]
    at = max(range(len(sizes)), key=lambda index: sum(sizes[index]))
    yield f"lengths  longest of {len(drafts):,} checked examples: {sum(sizes[at]):,} tokens"
    too_long = 0 if most is None else sum(sum(size) > most for size in sizes)
    if not too_long or most is None:
        return
    message = (
        f"{too_long:,} of {len(drafts):,} checked worked examples are too long: "
        f"{overlong_example(drafts[at].place, *sizes[at], most)}"
    )
    none_left = all_read and too_long == len(drafts)
    if none_left or source.data.overlong_prompts is OverlongPrompt.stop:
        raise UserError(message)
    yield f"warning  {message}; they are dropped (data.overlong_prompts=filter)"


def _golds(source: _Source, drafts: Sequence[Draft], *, all_read: bool) -> Iterator[str]:
    """Kinds of accepted answers. Raises UserError: all rows were read, and none has an answer that
    a response can match."""
    if not source.has_answers:
        return
    golds = gold_kinds((draft.place, draft.target) for draft in drafts)
    if all_read and source.is_graded:
        refuse_no_gold(golds, source.paths)
    yield f"answers  {source.title}{golds.describe()} of {len(drafts):,} checked"
    if golds.num_bad:
        yield (
            f"warning  {source.title}{golds.num_bad:,} of {len(drafts):,} checked answers cannot "
            f"be matched by any response, such as {golds.bad[0]}"
        )


def _drafts_in_its_place(source: _Source, tokenizer: LightTokenizer) -> list[Draft]:
    """Rows as a tokenizer in the place of the model's renders them; none where it cannot."""
    renderer = PromptRenderer(source.data, tokenizer)
    rows = next(source.rows(), [])
    try:
        return usable_rows(rows, source.data, renderer, source.target)[0]
    except UserError:  # The run's own tokenizer may say otherwise.
        return []


def _lengths(
    data: DataConfig, texts: list[str], tokenizer: LightTokenizer, *, all_read: bool
) -> str:
    encoded = Encoder(tokenizer).encode(texts, add_first_tokens=not data.apply_chat_template)
    lengths, most = [len(ids) for ids in encoded], data.max_prompt_tokens
    too_long, longest = sum(length > most for length in lengths), max(lengths)
    looked_at = f"{len(texts):,} checked prompts"
    if not too_long:
        return f"longest of {looked_at}: {longest:,} tokens, limit {most:,}"
    too_long_of = f"{too_long:,} of {looked_at} have more than {most:,} tokens, up to {longest:,}"
    none_left = all_read and too_long == len(texts)
    if data.overlong_prompts is OverlongPrompt.stop or none_left:
        remedy = "" if none_left else ", or drop them with data.overlong_prompts=filter"
        raise UserError(
            f"data.max_prompt_tokens={most}: {too_long_of}; set it to {longest}{remedy}"
        )
    return f"{too_long_of}; they are dropped (data.overlong_prompts=filter)"


def _problem(data: DataConfig, draft: Draft, tokenizer: LightTokenizer) -> Problem:
    encoder = Encoder(tokenizer)
    ids = encoder.encode([draft.prompt], add_first_tokens=not data.apply_chat_template)
    return problem_of(draft, ids[0], data, PromptRenderer(data, tokenizer))


def _rewards(
    config: Config, problems: Sequence[Problem], tokenizer: LightTokenizer, *, not_the_models: bool
) -> Iterator[str]:
    """Make all rewards, and call those that the user wrote, as training would."""
    from rlmath.rewards.mix import RewardMix  # With the grader: not for every start.

    reward = config.reward
    with RewardMix.from_config(
        reward.items,
        correct=reward.correct,
        incorrect=reward.incorrect,
        completion_format="chat" if config.data.apply_chat_template else "text",
    ) as mix:
        own = [
            # A weight of 0 counts as well here.
            replace(made, weight=1.0)
            for made, item in zip(mix.items, reward.items, strict=True)
            if _is_own(item.name)
        ]
        if not own:
            return
        if not problems:
            labels = ", ".join(item.label for item in own)
            yield f"reward   {labels}: not tried, as there is no problem to call it with here"
            return
        if not_the_models:
            yield "reward   tried with the tokens of another tokenizer:"
        yield from _call(RewardMix(own), problems[0], tokenizer)


def _is_own(name: str) -> bool:
    server = name.startswith(("http://", "https://"))
    return is_path(name) and not server and name not in available_rewards()


def _call(mix: RewardMix, problem: Problem, tokenizer: LightTokenizer) -> Iterator[str]:
    """Call rewards on a response with the accepted answer, and on one without."""
    texts = (f"The answer is \\boxed{{{problem.answers[0]}}}.", "I do not know.")
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    samples = [made_sample(problem.id, index, ids[index], text) for index, text in enumerate(texts)]
    mix.check_columns([problem])
    right, wrong = mix.score_group(problem, samples)
    for label in right.rewards:
        values = (right.rewards[label], wrong.rewards[label])
        shown = ["cannot be scored" if value is None else f"{value:g}" for value in values]
        yield (
            f"reward   {label}: {shown[0]} for a made-up response with the accepted answer, "
            f"{shown[1]} for one without ({problem.id})"
        )
