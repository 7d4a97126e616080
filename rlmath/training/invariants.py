"""What must hold in every step whatever the data, checked while training, for nothing.

The first minibatch is computed from the very weights that the old log-probs are from, so its
importance ratio is 1; the reference model of a run's first step is the policy, so their KL is 0;
with a learning rate of 0 the ratio stays 1 in every minibatch; and samples whose advantages are all
0 have no gradient. A step that breaks one of them trains something else than it says: log-probs of
another temperature, a cut that loses tokens, a reference from another model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlmath.config.algorithm import KlPlace
from rlmath.config.schema import Config, DType, OldLogProbs, OnMisalignment
from rlmath.errors import UserError
from rlmath.monitor import Monitor

if TYPE_CHECKING:
    from rlmath.actor.settings import UpdateResult
    from rlmath.types import TrainingBatch

# How far a mean over tokens may be from 1 or 0: the same forward pass on other packs of sequences
# rounds otherwise. Measured on CPU in float32: up to 3e-8.
TOLERANCE = {DType.float32: 1e-5, DType.bfloat16: 1e-2}


class IdentityError(UserError):
    """A step's numbers contradict each other."""


def check_identities(
    config: Config, batch: TrainingBatch, result: UpdateResult, step: int, monitor: Monitor
) -> None:
    """Look at an update's figures; ``alignment.on_fail`` says what a broken identity does.

    Raises:
        IdentityError: One is broken and the run is to stop.
    """
    broken = broken_identities(config, batch, result, first_step=step == 1)
    if not broken:
        return
    message = f"step {step}: " + "; ".join(broken)
    if config.alignment.on_fail is OnMisalignment.stop:
        raise IdentityError(
            f"{message}. These hold whatever the data, so what was trained is not what the "
            "settings say; alignment.on_fail=warn goes on all the same"
        )
    monitor.warn(message)


def broken_identities(
    config: Config, batch: TrainingBatch, result: UpdateResult, first_step: bool
) -> list[str]:
    """A sentence for each identity that an update's figures break.

    Args:
        batch: That the update was made from.
        result: Its figures, minibatch by minibatch.
        first_step: Whether the weights before it were those that the run began with.
    """
    algorithm = config.algorithm
    tolerance = TOLERANCE[config.model.dtype]
    broken = []
    # The engine's log-probs differ from the actor's by right, and what is not finite was
    # discarded with a word of its own.
    own = algorithm.old_log_probs is OldLogProbs.recompute
    for index, figures in enumerate(result.minibatches):
        if index in result.early_stopped or not figures["token_count"]:
            continue
        ratio = figures["importance_ratio"]
        if own and index == 0 and not abs(ratio - 1) <= tolerance:
            broken.append(
                f"the importance ratio of the first minibatch is {ratio:.7f}, not 1 to within "
                f"{tolerance:g}, though no weight has changed since the old log-probs"
            )
        elif own and not any(f["lr"] for f in result.minibatches) and abs(ratio - 1) > tolerance:
            broken.append(
                f"the importance ratio of minibatch {index} is {ratio:.7f}, not 1 to within "
                f"{tolerance:g}, though the learning rate is 0"
            )
        kl = figures.get("kl", 0.0)
        in_loss = algorithm.kl_coef > 0 and algorithm.kl_in is KlPlace.loss
        if in_loss and first_step and index == 0 and not abs(kl) <= tolerance:
            broken.append(
                f"the KL to the reference is {kl:.3g}, not 0 to within {tolerance:g}, before "
                "anything was learnt"
            )
        terms = algorithm.kl_coef or algorithm.entropy_coef or algorithm.entropy_target is not None
        if not terms and not batch.advantages.any() and figures["grad_norm"]:
            broken.append(
                f"the gradient norm of minibatch {index} is {figures['grad_norm']:.3g}, though "
                "all advantages are 0 and the loss has no other term"
            )
    return broken
