"""An answer verifier: numbers are accepted within a relative tolerance.

rlmath train experiment=quickstart reward.verifier=examples/plugins/verifier.py:close_enough \\
    reward.verifier_options.tolerance=0.01
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.grading.verifiers import VERIFIERS
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class CloseOptions(Options):
    tolerance: float = setting(1e-3, "Relative distance that is accepted.", least=0, below=1)


@VERIFIERS.register("close_enough", CloseOptions)
def close_enough(answer: str, gold: str, options: CloseOptions) -> bool:
    """``|answer - gold| <= tolerance |gold|``; what is no number has to be equal."""
    try:
        found, wanted = float(answer), float(gold)
    except ValueError:
        return answer.strip() == gold.strip()
    return abs(found - wanted) <= options.tolerance * abs(wanted)
