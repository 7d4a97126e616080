"""The gradient of each sequence, in every minibatch, against a second formula of the objective."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from rlmath.actor.second_gradient import TOLERANCE
from rlmath.actor.sequence_report import ENTROPY, GRADIENT, SequenceReport
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
    wanted, slack, of_entropy = found.second.unbind(1)
    figures = (
        ("log-probs", GRADIENT, wanted, slack),
        ("entropies", ENTROPY, of_entropy, TOLERANCE * of_entropy.abs()),
    )
    judged = torch.ones_like(found.minibatches, dtype=torch.bool)
    for index in discarded:
        judged &= found.minibatches != index
    return [
        sentence
        for what, column, own, within in figures
        for sentence in _others(what, found, found.sums[:, column], own, within, judged)
    ]


def _others(
    what: str,
    found: SequenceReport,
    gradients: Tensor,
    wanted: Tensor,
    slack: Tensor,
    judged: Tensor,
) -> list[str]:
    # Without a second formula both are NaN, and without a backward pass the gradient is.
    wrong = judged & ((gradients - wanted).abs() > slack)
    if not wrong.any():
        return []
    first = int(wrong.nonzero()[0])
    return [
        f"the gradients of {int(wrong.sum())} of {len(wrong)} sequences are not those of the "
        f"objective that the settings say: at place {int(found.places[first])} (minibatch "
        f"{int(found.minibatches[first])}) the loss's derivative by the {what} is "
        f"{float(gradients[first]):.6g}, and a second formula gives {float(wanted[first]):.6g} (to "
        f"within {float(slack[first]):.1g}): another clip range, minimum, ratio, KL or entropy "
        "term, or old or reference log-probs of another sequence"
    ]
