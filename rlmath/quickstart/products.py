"""Products that a tiny model cannot compute in its head, and worked examples of a hasty student.

A problem is ``What is 473 * 862?`` with three-digit numbers. In most of the examples the student
guesses all digits but the first and the last; in the others it uses the Python tool::

    473*862=418956. \\boxed{418956}

    ```python
    473*862
    ```
    ```output
    407726
    ```
    \\boxed{407726}

A model tuned on them copies numbers and knows both ways. Reinforcement learning finds out which of
them is worth it.
"""

from __future__ import annotations

import random
from pathlib import Path

from rlmath.quickstart.problems import EVAL_FILE, SFT_FILE, TRAIN_FILE, Exercise, write_rows

# Share of the worked examples that use the tool. Of eight samples one then does, in most groups.
TOOL_SHARE = 0.1


def guess(exercise: Exercise, rng: random.Random) -> str:
    """A wrong way to solve a product: its first and last digit are right."""
    digits = str(exercise.result)
    inner = "".join(rng.choices("0123456789", k=len(digits) - 2))
    guessed = f"{digits[0]}{inner}{digits[-1]}"
    return f"{exercise.left}*{exercise.right}={guessed}. \\boxed{{{guessed}}}"


def use_tool(exercise: Exercise) -> str:
    """The right way, as :class:`~rlmath.environments.fenced.Fenced` makes it of two turns."""
    code = f"{exercise.left}*{exercise.right}"
    result = exercise.result
    return f"```python\n{code}\n```\n```output\n{result}\n```\n\\boxed{{{result}}}"


def make_products(
    folder: str | Path,
    seed: int = 0,
    *,
    num_train: int = 4000,
    num_eval: int = 128,
    num_sft: int = 20000,
) -> Path:
    """Write the files that :func:`~rlmath.quickstart.problems.make_problems` writes, of products;
    no problem comes twice. Returns the folder."""
    rng = random.Random(seed)
    drawn = rng.sample(range(900 * 900), num_train + num_eval + num_sft)
    exercises = [Exercise(100 + one // 900, "*", 100 + one % 900) for one in drawn]
    train, held_out = exercises[:num_train], exercises[num_train : num_train + num_eval]
    folder = Path(folder)
    write_rows(folder / TRAIN_FILE, [exercise.row for exercise in train])
    write_rows(folder / EVAL_FILE, [exercise.row for exercise in held_out])
    examples = []
    for exercise in exercises[num_train + num_eval :]:
        response = use_tool(exercise) if rng.random() < TOOL_SHARE else guess(exercise, rng)
        examples.append({"prompt": exercise.prompt, "response": response})
    write_rows(folder / SFT_FILE, examples)
    return folder
