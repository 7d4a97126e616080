"""Find the final answer in a response and decide whether it equals the accepted one.

grade(response, gold)              one response, with a pool of this module
MathGrader(num_workers=4)          many, from any thread, with workers that can be killed
check_gold(gold)                   whether an accepted answer can be used
"""

from rlmath.grading.grader import MathGrader, check_gold, default_grader, grade
from rlmath.grading.result import STATUSES, GoldReport, Grade, Status
from rlmath.grading.settings import TASKS, Fallback, GradingSettings

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
