"""Public data sets of problems, and the conversion of their rows to rlmath's.

A training row is ``{"prompt": problem, "solutions": [answer], ...}``, which the default settings
read. A benchmark keeps the fields that ``rlmath/config/benchmarks.py`` names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlmath.data.answers import is_missing

Row = Mapping[str, Any]


class UnusableRowError(ValueError):
    """A row that is left out and counted; rows with the same reason have the same message."""


@dataclass(frozen=True)
class Source:
    """A data set of the hub."""

    hub: str
    config: str | None
    split: str
    convert: Callable[[Row], dict[str, Any]]  # Converts a row of theirs.
    is_benchmark: bool = False
    data_file: str | None = None  # File to read; None: all that the data set has.


def fields(prompt: str, answer: str) -> Callable[[Row], dict[str, Any]]:
    def convert(row: Row) -> dict[str, Any]:
        return training_row(row[prompt], row[answer])

    return convert


def keep_fields(**names: str) -> Callable[[Row], dict[str, Any]]:
    """A converter that keeps these fields of a benchmark: our name to theirs."""

    def convert(row: Row) -> dict[str, Any]:
        found = {ours: row[theirs] for ours, theirs in names.items()}
        if any(value == [] or is_missing(value) for value in found.values()):
            raise UnusableRowError("no answer")
        return found

    return convert


def training_row(prompt: Any, answer: Any) -> dict[str, Any]:
    """A training row; ``UnusableRowError`` if the problem or the answer is empty or no text."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise UnusableRowError("no problem")
    if is_missing(answer):
        raise UnusableRowError("no answer")
    return {"prompt": prompt.strip(), "solutions": [str(answer).strip()]}


# Text around DAPO's problems; rlmath's prompts come from settings.
_DAPO_BEFORE = re.compile(r"\ASolve the following math problem step by step\..*?\n\n", re.DOTALL)
_DAPO_AFTER = re.compile(
    r"\n\nRemember to put your answer on its own line after \"Answer:\"\.\s*\Z"
)


def _dapo(row: Row) -> dict[str, Any]:
    text = row["prompt"][-1]["content"]
    text = _DAPO_AFTER.sub("", _DAPO_BEFORE.sub("", text))
    return training_row(text, row["reward_model"]["ground_truth"])


def _boba(row: Row) -> dict[str, Any]:
    """Convert a row; chat markers in its prompt stay."""
    if not row["solutions"]:
        raise UnusableRowError("no answer")
    return {"prompt": row["prompt"], "solutions": list(row["solutions"])}


def _numina(row: Row) -> dict[str, Any]:
    if row["answer"] in ("proof", "notfound"):
        raise UnusableRowError(f"the answer is {row['answer']}")
    if "No" in (row.get("problem_is_valid"), row.get("solution_is_valid")):
        raise UnusableRowError("marked as not valid")
    if row.get("question_type") == "MCQ":
        raise UnusableRowError("multiple choice")
    return training_row(row["problem"], row["answer"])


def _orz(row: Row) -> dict[str, Any]:
    """Convert a conversation; as JSON a row is a bare list of its turns."""
    turns = row["conversations"] if "conversations" in row else [row["0"], row["1"]]
    return training_row(turns[0]["value"], turns[1]["ground_truth"]["value"])


def _gpqa(row: Row) -> dict[str, Any]:
    """Convert a row; the question's text determines the order of the options."""
    options = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    options = [str(option).strip() for option in options]
    order = list(range(4))
    random.Random(row["Question"]).shuffle(order)
    lines = [f"{letter}. {options[at]}" for letter, at in zip("ABCD", order, strict=True)]
    problem = f"{row['Question'].strip()}\n\n" + "\n".join(lines)
    return {"problem": f"{problem}\n\nAnswer with the letter.", "answer": "ABCD"[order.index(0)]}


SOURCES = {
    "gsm8k_train": Source("openai/gsm8k", "main", "train", fields("question", "answer")),
    "math": Source(
        "DigitalLearningGmbH/MATH-lighteval", None, "train", fields("problem", "solution")
    ),
    "dapo": Source("BytedTsinghua-SIA/DAPO-Math-17k", None, "train", _dapo),
    "boba": Source(
        "inclusionAI/AReaL-boba-Data", None, "train", _boba, data_file="AReaL-boba-106k.jsonl"
    ),
    "numinamath": Source("AI-MO/NuminaMath-1.5", None, "train", _numina),
    "orz": Source("Open-Reasoner-Zero/orz_math_57k_collection", None, "train", _orz),
    "openr1": Source("open-r1/OpenR1-Math-220k", "default", "train", fields("problem", "answer")),
    "aime24": Source(
        "HuggingFaceH4/aime_2024",
        None,
        "train",
        keep_fields(problem="problem", answer="answer"),
        True,
    ),
    "aime25": Source(
        "math-ai/aime25", None, "test", keep_fields(problem="problem", answer="answer"), True
    ),
    "amc23": Source(
        "math-ai/amc23", None, "test", keep_fields(question="question", answer="answer"), True
    ),
    "math500": Source(
        "HuggingFaceH4/MATH-500",
        None,
        "test",
        keep_fields(problem="problem", answer="answer"),
        True,
    ),
    "gpqa_diamond": Source("Idavidrein/gpqa", "gpqa_diamond", "train", _gpqa, True),
    "minerva": Source(
        "math-ai/minervamath",
        None,
        "test",
        keep_fields(problem="question", solution="answer"),
        True,
    ),
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        "OE_TO_maths_en_COMP",
        "train",
        keep_fields(question="question", final_answer="final_answer"),
        True,
    ),
    "gsm8k": Source(
        "openai/gsm8k", "main", "test", keep_fields(question="question", answer="answer"), True
    ),
}
