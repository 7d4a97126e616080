"""Invariants that hold in every step, whatever the data. Checking them costs nothing.

The first minibatch is computed with the same weights as the old log-probs, so its
importance ratio is 1; the reference model of a run's first step is the policy, so their KL is 0;
with a learning rate of 0 the ratio stays 1 in every minibatch; and samples whose advantages are all
0 have no gradient. The tokens of a minibatch have the number and the weights that follow from the
lengths (``weight_sums.py``), and nearly all have the engine's routes where they should
(``actor.routing_replay=engine``). A step that violates one of them does not train what the
settings say: log-probs at another temperature, a split that loses tokens, a reference from another
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlmath.actor.routing_totals import MAX_MISSING_SHARE
from rlmath.config.algorithm import KlPlace, ReferenceKind
from rlmath.config.schema import Config, DType, OldLogProbs
from rlmath.training.checks.base import AfterUpdate, Metrics, StepCheck, report
from rlmath.training.checks.unchanged import LEAST_LR
from rlmath.training.checks.weight_sums import expected_sums, wrong_sums

if TYPE_CHECKING:
    from rlmath.actor.settings import UpdateResult
    from rlmath.training.gate import Gate

# How far a mean over tokens may be from 1 or 0: the same forward pass on other micro-batches
# rounds differently. Measured on CPU in float32: up to 3e-8. In bfloat16, by as much as the model's
# own rounding noise, where that is more.
TOLERANCE = {DType.float32: 1e-5, DType.bfloat16: 1e-2}


class Invariants(StepCheck):
    """Compare the figures of an update with their required values. ``gate``: knows the model's
    rounding noise; ``None``: it is unknown."""

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = gate
        # An update of this run has moved the weights.
        self._has_moved = False

    def after_update(self, now: AfterUpdate) -> Metrics:
        if now.result is None or now.report.tokens is None:
            return {}
        config, sequences = now.run.config, now.batch.sequences
        broken = violations(
            config,
            now.report.tokens.any_advantage,
            now.result,
            first_step=now.step == 1,
            has_moved=self._has_moved,
            noise_excess=0.0 if self._gate is None else self._gate.noise_excess,
        )
        sums = expected_sums(config, sequences, config.runner.seed + now.step)
        broken += wrong_sums(sums, now.result.minibatches)
        broken += missing_routes(now.result.routing, sequences.sequence_lengths.tolist())
        report(config, broken, now.step, now.monitor)
        self._has_moved = self._has_moved or any(map(_moves, now.result.minibatches))
        return {}


def _moves(figures: Mapping[str, float]) -> bool:
    """Whether a minibatch has moved the weights so far that log-probs differ."""
    return not figures.get("discarded") and figures["lr"] >= LEAST_LR and figures["grad_norm"] > 0


def missing_routes(routing: Mapping[str, float], sequence_lengths: Sequence[int]) -> list[str]:
    """A sentence where engines give too few tokens' routes (``actor.routing_replay=engine``).
    ``routing``: metrics of an update, ``routing/...``. ``sequence_lengths``: tokens of each
    sequence that it trained on; one of them has no route."""
    share = routing.get("routing/engine_missing_share")
    if share is None or not sequence_lengths:
        return []
    normal = len(sequence_lengths) / sum(sequence_lengths)
    if share <= normal + MAX_MISSING_SHARE:
        return []
    return [
        f"actor.routing_replay=engine: {share:.1%} of the tokens have no routes from the engine. "
        f"The last token of each sequence never has any ({normal:.1%}), and at most "
        f"{MAX_MISSING_SHARE:.0%} more may have none. If vLLM returned routes for a "
        "different number of tokens, the engine's log has a warning. This is expected in the "
        "first steps after a resume that turned this setting on, if there are samples from before"
    ]


def violations(
    config: Config,
    any_advantage: bool,
    result: UpdateResult,
    first_step: bool,
    *,
    has_moved: bool = False,
    noise_excess: float = 0.0,
) -> list[str]:
    """A sentence for each invariant that an update violates.

    Args:
        any_advantage: Whether any token's advantage is not 0.
        result: Its metrics, by minibatch.
        first_step: Whether the weights before it were the initial weights of the run.
        has_moved: Whether earlier updates of the run have moved them.
        noise_excess: Mean of exp|difference|, minus 1, of the model's log-probs when it rounds
            otherwise; counts in bfloat16 only.
    """
    algorithm = config.algorithm
    tolerance = TOLERANCE[config.model.dtype]
    if config.model.dtype is DType.bfloat16:
        tolerance = max(tolerance, noise_excess)
    broken = []
    for index, figures in enumerate(result.minibatches):
        if index in result.early_stopped or not figures["token_count"]:
            continue
        broken += _wrong_ratio(config, result.minibatches, index, tolerance)
        if algorithm.kl_coef > 0 and algorithm.kl_in is KlPlace.loss and index == 0:
            broken += _wrong_kl(config, figures, first_step, has_moved, tolerance)
        terms = algorithm.kl_coef or algorithm.entropy_coef or algorithm.entropy_target is not None
        if not terms and not any_advantage and figures["grad_norm"]:
            broken.append(
                f"the gradient norm of minibatch {index} is {figures['grad_norm']:.3g}, though "
                "all advantages are 0 and the loss has no other term"
            )
    return broken


def _wrong_ratio(
    config: Config, minibatches: Sequence[Mapping[str, float]], index: int, tolerance: float
) -> list[str]:
    """A sentence for an impossible importance ratio; none for rollout log-probs, which may differ
    from the actor's. A minibatch that is not finite was discarded with its own warning."""
    if config.algorithm.old_log_probs is not OldLogProbs.recompute:
        return []
    figures = minibatches[index]
    ratio, broken = figures["importance_ratio"], []
    if index == 0 and not abs(ratio - 1) <= tolerance:
        broken.append(
            f"the importance ratio of the first minibatch is {ratio:.7f}, not 1 to within "
            f"{tolerance:g}, though no weight has changed since the old log-probs"
        )
    elif not any(one["lr"] for one in minibatches) and abs(ratio - 1) > tolerance:
        broken.append(
            f"the importance ratio of minibatch {index} is {ratio:.7f}, not 1 to within "
            f"{tolerance:g}, though the learning rate is 0"
        )
    # The change by adapters may round to nothing at first.
    moved = index > 0 and not config.actor.lora.rank and _moves(minibatches[index - 1])
    if moved and figures.get("approx_kl") == 0:
        broken.append(
            f"the importance ratio of minibatch {index} is exactly 1 in every token, though "
            "the minibatch before it moved the weights: the old log-probs are not those from "
            "before the update"
        )
    return broken


def _wrong_kl(
    config: Config,
    figures: Mapping[str, float],
    first_step: bool,
    has_moved: bool,
    tolerance: float,
) -> list[str]:
    """A sentence for a KL to the reference, of a first minibatch, that is impossible."""
    broken = []
    frozen = config.algorithm.reference.kind is ReferenceKind.frozen
    if frozen and has_moved and not config.actor.lora.rank and figures.get("kl") == 0:
        broken.append(
            "the KL to the frozen reference is exactly 0 in every token, though updates have "
            "moved the weights: the reference's log-probs are the policy's"
        )
    kl = figures.get("kl", 0.0)
    if first_step and not abs(kl) <= tolerance:
        broken.append(
            f"the KL to the reference is {kl:.3g}, not 0 to within {tolerance:g}, before "
            "the first update"
        )
    return broken
