"""What ``--check`` tries out: the first prompts with the model's tokenizer, and rewards of the
user's own on two made-up responses.

Needs neither torch nor transformers. The user's code runs, so this is not for every start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlmath.config.hub_names import is_hub
from rlmath.config.schema import Config, DataConfig, OverlongPrompt, RewardItem
from rlmath.data.answers import accepted_answers
from rlmath.data.files import MalformedRowError, read_rows
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.data.prompts import Encoder, PromptRenderer
from rlmath.errors import UserError
from rlmath.model.folder import TINY
from rlmath.rewards.loading import is_path
from rlmath.rewards.registry import available_rewards
from rlmath.types import Problem, Sample

# Rows of each file whose prompts are counted.
ROWS = 1000


def trial(config: Config, command: str) -> list[str]:
    """Lines that say how the trial went.

    Args:
        config: Checked settings, with a model whose folder is there.
        command: ``train``, ``sft`` or ``evaluate``.

    Raises:
        UserError: A prompt is too long where ``data.overlong_prompts`` says stop, or a reward
            cannot be loaded, raised, or returned something else than numbers.
    """
    folder = config.model.path
    if folder != TINY and not (Path(folder) / "tokenizer.json").is_file():
        return [f"prompts  not looked at: {folder} has no tokenizer.json, only slower formats"]
    tokenizer = LightTokenizer(folder)
    paths = config.sft.train_paths if command == "sft" else config.data.train_paths
    if command == "evaluate":
        paths = config.data.eval_paths
    paths = [path for path in paths if not is_hub(path)]
    lines = list(_prompts(config.data, paths, tokenizer))
    own = [item for item in config.reward.items if _is_own(item.name)]
    if command == "train" and own:
        problem = _first_problem(config.data, paths, tokenizer)
        if problem is not None:
            lines += _own_rewards(config, own, problem, tokenizer)
    return lines


def _prompts(data: DataConfig, paths: Sequence[str], tokenizer: LightTokenizer) -> Iterator[str]:
    renderer = PromptRenderer(data, tokenizer)
    texts, malformed = [], ""
    for path in paths:
        for row in itertools.islice(read_rows([path]), ROWS):
            if isinstance(row.fields, MalformedRowError) or data.prompt_key not in row.fields:
                continue
            try:
                texts.append(renderer.render(row.fields[data.prompt_key]))
            except MalformedRowError as error:  # Counted when the run reads all rows.
                malformed = f"{row.place}: {error}"
    if not texts:
        if malformed:
            yield f"prompts  not looked at: no row can be rendered; {malformed}"
        return
    encoded = Encoder(tokenizer).encode(texts, add_first_tokens=not data.apply_chat_template)
    lengths, most = [len(ids) for ids in encoded], data.max_prompt_tokens
    too_long, longest = sum(length > most for length in lengths), max(lengths)
    looked_at = f"{len(texts):,} prompts looked at"
    if not too_long:
        yield f"prompts  the longest of {looked_at} has {longest:,} tokens, of at most {most:,}"
        return
    too_long_of = f"{too_long:,} of {looked_at} have more than {most:,} tokens, up to {longest:,}"
    if data.overlong_prompts is OverlongPrompt.stop:
        raise UserError(
            f"data.max_prompt_tokens={most}: {too_long_of}; set it to {longest}, or leave them out "
            "with data.overlong_prompts=filter"
        )
    yield f"prompts  {too_long_of}; they are left out (data.overlong_prompts=filter)"


def _first_problem(
    data: DataConfig, paths: Sequence[str], tokenizer: LightTokenizer
) -> Problem | None:
    """The first row that can be read."""
    renderer = PromptRenderer(data, tokenizer)
    for row in itertools.islice(read_rows(paths), ROWS):
        if isinstance(row.fields, MalformedRowError):
            continue
        try:
            prompt = renderer.render(row.fields[data.prompt_key])
            answers = accepted_answers(row.fields[data.answer_key])
        except (KeyError, MalformedRowError):
            continue
        ids = Encoder(tokenizer).encode([prompt], add_first_tokens=not data.apply_chat_template)
        return Problem(row.place, prompt, ids[0], answers, row.fields)
    return None


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
