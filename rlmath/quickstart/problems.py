"""Arithmetic problems that a tiny model can learn, and worked examples for its warm start.

A problem is ``What is 47 + 38?`` or ``What is 83 - 47?`` with two-digit numbers and a result that
is not negative. A worked example goes column by column, then boxes the result::

    7+8=15, 4+3+1=8. \\boxed{85}
    13-7=6, 8-4-1=3. \\boxed{36}

The examples are those of a careless student: in a share of them the carry (or borrow) is wrong,
forgotten where there is one or made up where there is none, and the rest follows from that. A model
tuned on them knows the method and slips as often as the student. That is the weak start that
reinforcement learning then works on: right and wrong solutions turn up in the same group, and the
reward tells them apart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from pathlib import Path

from rlmath.model.tiny_tokenizer import ASSISTANT, USER

TRAIN_FILE = "train.jsonl"
EVAL_FILE = "eval.jsonl"
SFT_FILE = "sft.jsonl"
# Share of the worked examples with a wrong carry. At one half it is a matter of chance whether a
# run first learns to carry or to leave out the carry, which it unlearns slowly.
SLIP_SHARE = 0.45
_OPERATIONS = {"+": add, "-": sub, "*": mul}


@dataclass(frozen=True)
class Exercise:
    """``left`` plus, minus or times ``right``."""

    left: int
    operator: str
    right: int

    @property
    def question(self) -> str:
        return f"What is {self.left} {self.operator} {self.right}?"

    @property
    def prompt(self) -> str:
        """The question with the chat markers of the tiny model's tokenizer."""
        return f"{USER}{self.question}{ASSISTANT}"

    @property
    def result(self) -> int:
        return _OPERATIONS[self.operator](self.left, self.right)

    @property
    def row(self) -> dict[str, object]:
        return {"prompt": self.prompt, "solutions": [f"\\boxed{{{self.result}}}"]}


def all_exercises() -> list[Exercise]:
    """The 8100 additions and 4095 subtractions of two-digit numbers, in a fixed order."""
    numbers = range(10, 100)
    additions = [Exercise(left, "+", right) for left in numbers for right in numbers]
    subtractions = [Exercise(left, "-", right) for left in numbers for right in range(10, left + 1)]
    return additions + subtractions


def work_out(exercise: Exercise, slip: bool = False) -> str:
    """The column-by-column solution, ending in the boxed result.

    Args:
        exercise: Exercise to solve.
        slip: Get the carry or borrow wrong, and with it the result (by 10). Made-up borrows that
            would end below zero are not made: ``43 - 41`` is then solved rightly.
    """
    operator = exercise.operator
    left_tens, left_ones = divmod(exercise.left, 10)
    right_tens, right_ones = divmod(exercise.right, 10)
    if operator == "+":
        ones = left_ones + right_ones
        carry = (ones >= 10) != slip
        tens = left_tens + right_tens + carry
    else:
        borrow = left_ones < right_ones
        left_ones += 10 * borrow
        ones = left_ones - right_ones
        carry = borrow != (slip and (borrow or left_tens > right_tens))
        tens = left_tens - right_tens - carry
    marked = f"{operator}1" if carry else ""
    return (
        f"{left_ones}{operator}{right_ones}={ones}, "
        f"{left_tens}{operator}{right_tens}{marked}={tens}. \\boxed{{{10 * tens + ones % 10}}}"
    )


def make_problems(
    folder: str | Path,
    seed: int = 0,
    *,
    num_train: int = 4000,
    num_eval: int = 256,
    num_sft: int = 20000,
    slip_share: float = SLIP_SHARE,
) -> Path:
    """Write ``train.jsonl``, ``sft.jsonl`` and ``eval.jsonl``, whose problems are held out.

    A row of the first two is ``{"prompt": ..., "solutions": ["\\\\boxed{85}"]}``, a row of the last
    ``{"prompt": ..., "response": ...}``. The same arguments give the same bytes. Returns the
    folder. Raises ValueError: more problems than there are, or a share outside [0, 1].

    Args:
        folder: Made if missing; files of the same names in it are replaced.
        seed: Seed of the exercises and of the slips.
        num_train: Problems to train on by reinforcement learning.
        num_eval: Held-out problems.
        num_sft: Worked examples for the warm start; their problems may be training problems, and
            a problem may come several times, worked out rightly or not each time again. (With one
            solution per problem the model learns by heart which ones go wrong, and then has
            nothing left to try.)
        slip_share: Share of the worked examples with a wrong carry or borrow, from 0 to 1.
    """
    exercises = all_exercises()
    most = len(exercises) - num_eval
    if min(num_train, num_eval, num_sft) < 0 or num_train > most:
        raise ValueError(
            f"num_train={num_train} must be from 0 to {most} and num_sft={num_sft} at least 0: "
            f"there are {len(exercises)} exercises, and num_eval={num_eval} of them are held out"
        )
    if not 0 <= slip_share <= 1:
        raise ValueError(f"slip_share={slip_share} is a share of the examples, from 0 to 1")
    rng = random.Random(seed)
    rng.shuffle(exercises)
    held_out, pool = exercises[:num_eval], exercises[num_eval:]
    train = rng.sample(pool, num_train)
    sft = rng.choices(pool, k=num_sft)

    folder = Path(folder)
    write_rows(folder / TRAIN_FILE, [exercise.row for exercise in train])
    write_rows(folder / EVAL_FILE, [exercise.row for exercise in held_out])
    examples = []
    for exercise in sft:
        response = work_out(exercise, slip=rng.random() < slip_share)
        examples.append({"prompt": exercise.prompt, "response": response})
    write_rows(folder / SFT_FILE, examples)
    return folder


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a data file, and its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
