"""The shrunk model with a head start, and problems that it solves half of the time."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.config.schema import Config, DataConfig
from rlmath.model.spec import model_spec
from rlmath.model.tiny_tokenizer import ASSISTANT, USER, build_tokenizer
from rlmath.types import Problem

PROBLEMS = 256
# More than one block of an engine's prefix cache (128 tokens, a token a byte), and no digit.
PREFACE = (
    "You are given a problem about whole numbers. Think about it before you answer, check what you "
    "have found, and then write the final answer, and nothing else, into a box at the end. "
)
_LETTERS = 4
# Optimizer steps of the head start, with how many sequences and how much of each prompt.
_STAGES = ((150, 32, 32), (40, 8, None))
_LR = 2e-3


def rows(data: DataConfig, hint: str = "") -> list[dict[str, Any]]:
    """Problems in the user's fields: whether a number is odd, as 0 or 1.

    Args:
        data: Names of the fields, and whether a chat template is applied.
        hint: Appended to the prompt, with ``{answer}`` in it.
    """
    numbers = random.Random(0).sample(range(100, 1000), PROBLEMS)
    found = []
    for number in numbers:
        answer = str(number % 2)
        text = f"{PREFACE}What is the remainder of {number} divided by two?"
        text += hint.format(answer=answer)
        prompt = text if data.apply_chat_template else f"{USER}{text}{ASSISTANT}"
        found.append({data.prompt_key: prompt, data.answer_key: f"\\boxed{{{answer}}}"})
    return found


def write_rows(path: Path, made: Sequence[dict[str, Any]]) -> None:
    """Write a JSON Lines file; its folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


def make_model(folder: Path, fields: dict[str, Any], config: Config) -> list[Problem]:
    """Write the model of a config.json, tuned to box 0 or 1 after a few random letters.

    Without a head start no response gets a reward, and nothing has a gradient.

    Args:
        folder: Where to.
        fields: Contents of config.json.
        config: The shrunk settings; ``data.train_paths`` are there.

    Returns:
        The problems, as a run reads them.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

    from rlmath.data import load_problems

    tokenizer = build_tokenizer(int(fields["max_position_embeddings"]))
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    made = CONFIG_MAPPING[_model_type(model_spec(fields).architecture)](**fields | ends)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.runner.seed)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        problems, _ = load_problems(config.data.train_paths, config.data, tokenizer)
        _tune(model, tokenizer, problems)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return problems


def _model_type(architecture: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return next(
        kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture
    )


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
    text = f"{letters}. \\boxed{{{draw.randint(0, 1)}}}"
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


def _loss(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], pad: int
) -> Any:
    """Cross entropy of the answers' tokens."""
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
