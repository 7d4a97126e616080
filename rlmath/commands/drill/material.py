"""The shrunk model with a head start, and problems that it solves a fourth of the time."""

from __future__ import annotations

import contextlib
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlmath.commands.drill.shrink import Shrunk
from rlmath.config.schema import Config, DataConfig
from rlmath.model.spec import model_spec
from rlmath.model.tiny_tokenizer import ASSISTANT, USER, build_tokenizer
from rlmath.quickstart.problems import write_rows
from rlmath.types import Problem

PROBLEMS = 256
# More than one block of an engine's prefix cache (128 tokens, a token a byte), and no digit.
PREFACE = (
    "You are given a problem about whole numbers. Think about it before you answer, check what you "
    "have found, and then write the final answer, and nothing else, into a box at the end. "
)
_LETTERS = 4
DIGITS = 4
# The most frequent answer, and its share: thirty small updates can teach a guessing model to prefer
# it. A model that is rewarded for wrong answers starts with a high reward.
COMMON, COMMON_SHARE = 1, 0.6
# Stages of the head start: optimizer steps, sequences, and tokens of each prompt (None: all).
_STAGES = ((150, 32, 32), (40, 8, None))
_LR = 2e-3


def write_material(shrunk: Shrunk) -> list[Problem]:
    """Write the problems and the model of shrunk settings. Returns the problems, as a run reads
    them."""
    config = shrunk.config
    write_rows(Path(config.data.train_paths[0]), rows(config.data))
    return make_model(Path(config.model.path), shrunk.model, config)


def rows(data: DataConfig) -> list[dict[str, Any]]:
    """Problems in the user's fields: a number's remainder by four, which is mostly 1. ``data``:
    names of the fields, and whether a chat template is applied."""
    found = []
    for number in _numbers():
        answer = str(number % DIGITS)
        text = f"{PREFACE}What is the remainder of {number} divided by four?"
        prompt = text if data.apply_chat_template else f"{USER}{text}{ASSISTANT}"
        found.append({data.prompt_key: prompt, data.answer_key: f"\\boxed{{{answer}}}"})
    return found


def _numbers() -> list[int]:
    draw = random.Random(0)
    common = [one for one in range(100, 1000) if one % DIGITS == COMMON]
    others = [one for one in range(100, 1000) if one % DIGITS != COMMON]
    many = round(COMMON_SHARE * PROBLEMS)
    numbers = [*draw.sample(common, many), *draw.sample(others, PROBLEMS - many)]
    draw.shuffle(numbers)
    return numbers


def make_model(folder: Path, fields: dict[str, Any], config: Config) -> list[Problem]:
    """Write the model of a config.json, tuned to box a digit below 4 after a few random letters.

    Without a head start no response gets a reward, and nothing has a gradient. ``config``: the
    shrunk settings; ``data.train_paths`` are there. Returns the problems, as a run reads them.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from rlmath.data import load_problems

    tokenizer = build_tokenizer(int(fields["max_position_embeddings"]))
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    made = model_config(fields | ends)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.runner.seed)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        problems, _ = load_problems(config.data.train_paths, config.data, tokenizer)
        with _one_thread():
            _tune(model, tokenizer, problems)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return problems


def model_config(fields: dict[str, Any]) -> Any:
    """A config.json as transformers' configuration, of the class that its model takes.

    By the mapping of transformers, ``Qwen3_5ForCausalLM`` is of two types; the first one has images
    too, and all sizes of its text part are of the published model.
    """
    import transformers

    return getattr(transformers, model_spec(fields).architecture).config_class(**fields)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread.

    Products of this size gain little from more, and where other programs have the cores, threads
    that wait for each other take several times as long.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _tune(model: Any, tokenizer: Any, problems: Sequence[Problem]) -> None:
    import torch

    draw = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0)
    model.train()
    for steps, count, last_tokens in _STAGES:
        for _ in range(steps):
            chosen = draw.choices(problems, k=count)
            answers = [_answer(tokenizer, draw) for _ in chosen]
            prompts = [one.prompt_token_ids[-(last_tokens or 0) :] for one in chosen]
            loss = _loss(model, prompts, answers, tokenizer.pad_token_id)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def _answer(tokenizer: Any, draw: random.Random) -> list[int]:
    letters = "".join(draw.choices(string.ascii_lowercase, k=_LETTERS))
    text = f"{letters}. \\boxed{{{draw.randrange(DIGITS)}}}"
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


def _loss(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int
) -> Any:
    import torch

    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.full((len(prompts), longest), pad)
    labels = torch.full((len(prompts), longest), -100)
    mask = torch.zeros((len(prompts), longest), dtype=torch.int64)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : end] = torch.tensor(answer)
        mask[row, :end] = 1
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
