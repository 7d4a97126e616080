"""Answers in prompts: a prompt that holds its own answer teaches a model to copy.

Some prompts hold the right number by chance, so the share of prompts with their own answer is
compared with the share that hold the answer of the next problem. In GSM8K, AIME 24, AMC 23,
MinervaMath, OlympiadBench and the quickstart's problems the two differ by at most 0.02; if prompts
hold the letters of multiple-choice problems, both are 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.errors import UserError

# Below this number chance decides.
LEAST_PROBLEMS = 32
# Enough for an error of 0.01; each prompt costs 0.2 ms when a run starts.
MOST_PROBLEMS = 4096


@dataclass(frozen=True)
class AnswerShares:
    """Fractions of prompts that hold answers."""

    own: float
    others: float
    first: int | None = None
    answer: str = ""


def shares(prompts: Sequence[str], answers: Sequence[Sequence[str]]) -> AnswerShares:
    """Fractions of prompts with answers as whole words or numbers; of ``MOST_PROBLEMS`` at most."""
    from rlmath.grading import check_gold  # Not for --check, which loads no problems.

    # Evenly over the data.
    apart = max(1, math.ceil(len(prompts) / MOST_PROBLEMS))
    prompts, answers = prompts[::apart], answers[::apart]
    compared = [[check_gold(one).extracted or "" for one in accepted] for accepted in answers]
    count, own, others, first = len(prompts), 0, 0, None
    for at, prompt in enumerate(prompts):
        if _holds(prompt, compared[at]):
            own += 1
            first = at if first is None else first
        others += _holds(prompt, compared[(at + 1) % count])
    answer = (
        "" if first is None else next(a for a in compared[first] if _holds(prompts[first], [a]))
    )
    first = None if first is None else first * apart
    return AnswerShares(own / max(count, 1), others / max(count, 1), first, answer)


def check(found: AnswerShares, count: int, most: float, paths: Sequence[str | Path]) -> None:
    """Refuse data whose prompts hold their answers. ``most``: ``data.max_leaked_answers``. Raises
    UserError: more do than chance explains."""
    if count < LEAST_PROBLEMS or found.own - found.others <= most:
        return
    names = ", ".join(str(path) for path in paths)
    raise UserError(
        f"{names}: {found.own:.0%} of {count} prompts contain their own answer, and "
        f"{found.others:.0%} that of the next problem: a difference of "
        f"{found.own - found.others:.2f}, above data.max_leaked_answers={most:g}. The first is "
        f"problem {found.first} with {found.answer!r}. Take the answers out of the prompts "
        "(data.prompt_key, data.prompt_template); data.max_leaked_answers=1 accepts them"
    )


def _holds(prompt: str, answers: Sequence[str]) -> bool:
    """Whether a prompt holds an answer, not as a part of a longer word or number."""
    for answer in answers:
        at = prompt.find(answer) if answer else -1
        while at >= 0:
            before, after = prompt[:at][-1:], prompt[at + len(answer) :]
            inside = before.isalnum() or before in ("_", ".")
            if not inside and not re.match(r"\w|\.\d", after):
                return True
            at = prompt.find(answer, at + 1)
    return False
