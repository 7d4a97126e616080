"""The step checks of a run, in the order in which they are called."""

from __future__ import annotations

from rlmath.training.checks.base import STEP_CHECKS, StepChecks
from rlmath.training.checks.chosen import ChosenGroups
from rlmath.training.checks.engine_constants import EngineConstants
from rlmath.training.checks.independent import IndependentSamples
from rlmath.training.checks.invariants import Invariants
from rlmath.training.checks.log_probs import LogProbAgreement
from rlmath.training.checks.loss_parts import LossParts
from rlmath.training.checks.optimizer_steps import OptimizerSteps
from rlmath.training.checks.prefix_cache import PrefixCache
from rlmath.training.checks.residue import LeftoverMemory
from rlmath.training.checks.samples import SampledResponses
from rlmath.training.checks.second_gradient import SecondGradient
from rlmath.training.checks.sequences import TrainedSequences
from rlmath.training.checks.still_teacher import StillTeacher
from rlmath.training.checks.still_weights import StillWeights
from rlmath.training.checks.unchanged import ChangedWeights


def step_checks() -> StepChecks:
    """New checks, each with the memory of one run."""
    agreement = LogProbAgreement()
    return StepChecks(
        [
            IndependentSamples(),
            ChosenGroups(),
            SampledResponses(),
            # Before the gate asks the engines for samples, which leave blocks in the cache.
            PrefixCache(),
            agreement,
            Invariants(agreement.gate),
            TrainedSequences(),
            LossParts(),
            SecondGradient(),
            ChangedWeights(),
            OptimizerSteps(),
            StillWeights(),
            StillTeacher(),
            EngineConstants(),
            LeftoverMemory(),
            *(STEP_CHECKS.get(name)() for name in STEP_CHECKS.names()),
        ]
    )
