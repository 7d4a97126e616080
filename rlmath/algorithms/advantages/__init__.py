"""Advantage estimators by name, one per file."""

from rlmath.algorithms.advantages.base import (
    ADVANTAGES,
    Advantage,
    AdvantageTraits,
    Groups,
    needs_value_model,
)
from rlmath.algorithms.advantages.batch_std import batch_std
from rlmath.algorithms.advantages.dr_grpo import dr_grpo
from rlmath.algorithms.advantages.gae import gae
from rlmath.algorithms.advantages.gdpo import gdpo
from rlmath.algorithms.advantages.grpo import grpo
from rlmath.algorithms.advantages.pass_at_k import pass_at_k
from rlmath.algorithms.advantages.per_token import (
    AdvantageSettings,
    SequenceAdvantages,
    sequence_advantages,
    token_advantages,
)
from rlmath.algorithms.advantages.reinforce_pp import reinforce_pp
from rlmath.algorithms.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from rlmath.algorithms.advantages.rloo import rloo
from rlmath.algorithms.advantages.teacher import teacher

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "AdvantageSettings",
    "AdvantageTraits",
    "Groups",
    "SequenceAdvantages",
    "batch_std",
    "dr_grpo",
    "gae",
    "gdpo",
    "get_advantage",
    "grpo",
    "needs_value_model",
    "pass_at_k",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "sequence_advantages",
    "teacher",
    "token_advantages",
]


def get_advantage(name: str) -> Advantage:
    """The estimator named ``name``; ``ValueError`` with the known names if there is none."""
    return ADVANTAGES.get(name)
