"""The gradient of each sequence, in every minibatch, against a second formula of the objective."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rlmath.actor.second_gradient import TOLERANCE
from rlmath.actor.sequence_report import ENTROPY, GRADIENT, MOMENT, OLD, REFERENCE, SequenceReport
from rlmath.training.checks.base import AfterUpdate, Metrics, StepCheck, report

# Relative tolerance of float64 sums in another order.
SUM_TOLERANCE = 1e-9
_LOG_PROBS = (("old", "old_log_probs", OLD), ("reference", "ref_log_probs", REFERENCE))


class SecondGradient(StepCheck):
    """Compares what the backward pass gave with what the ranks computed a second time, and the
    log-probs in the loss with those that the passes gave."""

    def after_update(self, now: AfterUpdate) -> Metrics:
        if now.result is not None and now.result.sequences is not None:
            pairs = enumerate(now.result.minibatches)
            discarded = [index for index, figures in pairs if figures["discarded"]]
            broken = other_gradients(now.result.sequences, discarded)
            if now.report.tokens is not None:
                sums = now.report.tokens.fingerprints.sums
                broken += other_log_probs(now.result.sequences, sums)
            report(now.run.config, broken, now.step, now.monitor)
        return {}


def other_gradients(found: SequenceReport, discarded: Collection[int] = ()) -> list[str]:
    """A sentence if sequences have another gradient than log-probs, advantages and weights say.

    Args:
        discarded: Minibatches that are not judged: their numbers are not finite.
    """
    wanted, slack, of_entropy, by_place = found.second.unbind(1)
    figures = (
        ("log-probs", GRADIENT, wanted, slack),
        # Within a sequence the gradient may have moved, and its sum be right.
        ("log-probs, weighted by their place,", MOMENT, by_place, slack),
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


def other_log_probs(found: SequenceReport, sums: Mapping[str, Tensor]) -> list[str]:
    """A sentence if sequences had other old or reference log-probs in the loss than before it.

    Args:
        sums: See ``SequenceFingerprints``, before the update.
    """
    for name, field, column in _LOG_PROBS:
        before = sums.get(field)
        if before is None:
            continue
        given, wanted = found.sums[:, column], before[found.places]
        wrong = (given - wanted).abs() > SUM_TOLERANCE * (1.0 + wanted.abs())
        if wrong.any():
            first = int(wrong.nonzero()[0])
            return [
                f"{int(wrong.sum())} of {len(wrong)} sequences had other {name} log-probs in the "
                f"loss than before the update: at place {int(found.places[first])} (minibatch "
                f"{int(found.minibatches[first])}) they add up to {float(given[first]):.7g}, and "
                f"to {float(wanted[first]):.7g} before: rows of another sequence"
            ]
    return []


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
