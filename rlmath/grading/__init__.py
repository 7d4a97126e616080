"""Extract the final answer of a response and compare it with the accepted answer.

grade(response, gold)              one response, with a shared pool
MathGrader(num_workers=4)          many responses, from any thread, with workers that can be killed
check_gold(gold)                   whether an accepted answer can be used
"""

from typing import TYPE_CHECKING, Any

from rlmath.grading.result import STATUSES, GoldReport, Grade, Status
from rlmath.grading.settings import TASKS, Fallback, GradingSettings

if TYPE_CHECKING:
    from rlmath.grading.grader import MathGrader, check_gold, default_grader, grade

__all__ = [
    "STATUSES",
    "TASKS",
    "Fallback",
    "GoldReport",
    "Grade",
    "GradingSettings",
    "MathGrader",
    "Status",
    "check_gold",
    "default_grader",
    "grade",
]


def __getattr__(name: str) -> Any:
    # The settings of a run import their defaults from here, without the grader.
    if name in __all__:
        from rlmath.grading import grader

        return getattr(grader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
