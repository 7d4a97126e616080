"""Find the final answer in a response and decide whether it equals the accepted one.

grade(response, gold)              one response, with a pool of this module
MathGrader(num_workers=4)          many, from any thread, with workers that can be killed
check_gold(gold)                   whether an accepted answer can be used
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmath.grading.grader import MathGrader as MathGrader
    from rlmath.grading.grader import check_gold as check_gold
    from rlmath.grading.grader import default_grader as default_grader
    from rlmath.grading.grader import grade as grade
    from rlmath.grading.result import STATUSES as STATUSES
    from rlmath.grading.result import GoldReport as GoldReport
    from rlmath.grading.result import Grade as Grade
    from rlmath.grading.result import Status as Status
    from rlmath.grading.settings import TASKS as TASKS
    from rlmath.grading.settings import Fallback as Fallback
    from rlmath.grading.settings import GradingSettings as GradingSettings

_MODULES = {
    "grader": ("MathGrader", "check_gold", "default_grader", "grade"),
    "result": ("STATUSES", "GoldReport", "Grade", "Status"),
    "settings": ("TASKS", "Fallback", "GradingSettings"),
}

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
    # The settings of a run take their defaults from here, and need no grader for it.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
