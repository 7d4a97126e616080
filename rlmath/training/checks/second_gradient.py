"""The gradient of each sequence, in every minibatch, against a second formula of the objective."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from rlmath.actor.sequence_report import GRADIENT, SequenceReport
from rlmath.training.checks.base import AfterUpdate, Metrics, StepCheck, report


class SecondGradient(StepCheck):
    """Compares what the backward pass gave with what the ranks computed a second time."""

    def after_update(self, now: AfterUpdate) -> Metrics:
        if now.result is not None and now.result.sequences is not None:
            pairs = enumerate(now.result.minibatches)
            discarded = [index for index, figures in pairs if figures["discarded"]]
            broken = other_gradients(now.result.sequences, discarded)
            report(now.run.config, broken, now.step, now.monitor)
        return {}


def other_gradients(found: SequenceReport, discarded: Collection[int] = ()) -> list[str]:
    """A sentence if sequences have another gradient than log-probs, advantages and weights say.

    Args:
        discarded: Minibatches that are not judged: their numbers are not finite.
    """
    gradients: Tensor = found.sums[:, GRADIENT]
    wanted, slack = found.second.unbind(1)
    # Without a second formula both are NaN, and without a backward pass the gradient is.
    wrong = (gradients - wanted).abs() > slack
    for index in discarded:
        wrong &= found.minibatches != index
    if not wrong.any():
        return []
    first = int(wrong.nonzero()[0])
    return [
        f"the gradients of {int(wrong.sum())} of {len(wrong)} sequences are not those of the "
        f"objective that the settings say: at place {int(found.places[first])} (minibatch "
        f"{int(found.minibatches[first])}) the loss's derivative by the log-probs is "
        f"{float(gradients[first]):.6g}, and a second formula gives {float(wanted[first]):.6g} (to "
        f"within {float(slack[first]):.1g}): another clip range, minimum, ratio or KL, or old or "
        "reference log-probs of another sequence"
    ]
