"""Every trained matrix changes in an update, on every rank that holds a part of it.

A layer that the optimizer does not have, and a rank that took half of an update, leave rollouts,
log-probs and curves consistent: engines get what the ranks have. What gives them away is a part of
the weights that is bit by bit what it was before the update. Digests are taken after each step in
any case; each rank compares its own parts with the last.

Not judged, because they may stay as they are in a right update: input embeddings (a token that no
sequence has gets no gradient), experts (no token may go to them), norms and biases (in bfloat16 a
step of 1e-6 does not move a weight of 1), and small matrices in bfloat16. With LoRA the base model
is frozen, and each matrix with its adapter merged is judged: of the layers and targets that have
one, and of the default targets those that every model has, attention's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlmath.config.lora import LoraConfig
from rlmath.config.schema import Config, DType
from rlmath.model.lora import ATTENTION_TARGETS, Lora
from rlmath.monitor import Monitor
from rlmath.training.checks.base import AfterUpdate, Metrics, StepCheck, report
from rlmath.weights.gather import WeightChanges
from rlmath.weights.runs import Run

# Least elements of a part, so that some of them are small enough to change in bfloat16: weights of
# 0.02 are 1e-4 apart there, those of 1e-5 are 6e-8 apart.
LEAST_ELEMENTS = {DType.float32: 256, DType.bfloat16: 4096}
# In bfloat16 also of elements times learning rate. Of 4,096 with a standard deviation of 0.1 about
# three change at 1e-6 (seen in ``open_r1``), so 150 of 200,000. Steps may be ten times as small:
# Adam divides by the gradients of the last thousand steps, and few groups have any in the end.
LEAST_ELEMENT_STEPS = 0.2
# Below it, an update may round to nothing.
LEAST_LR = 1e-7
# An adapter's step reaches a matrix of the model multiplied by its other factor, which is small.
LEAST_LR_OF_ADAPTERS = 1e-6
# A value model does not report the sizes of its matrices.
LEAST_LR_OF_VALUES = {DType.float32: LEAST_LR, DType.bfloat16: 1e-5}
_NOT_JUDGED = (".experts.", "embed_tokens")
_NAMED = 3


class ChangedWeights(StepCheck):
    """An update changes every matrix that it should."""

    def after_update(self, now: AfterUpdate) -> Metrics:
        config, values = now.run.config, now.report.values
        check_changes(config, now.changes, now.metrics, now.step, now.monitor)
        # Before its first update the head is 0, and nothing below it has a gradient.
        if values is not None and values.moments.value_sum:
            check_value_changes(config, values.unchanged, now.metrics, now.step, now.monitor)
        return {}


def check_changes(
    config: Config,
    changes: Sequence[WeightChanges],
    update: Mapping[str, float],
    step: int,
    monitor: Monitor,
) -> None:
    """Check that an update changed all that it should; ``alignment.on_fail`` decides between an
    error and a warning.

    Args:
        update: Metrics of the update, ``train/...``; without them nothing was trained.

    Raises:
        InvariantError: A part of the weights did not change, with ``alignment.on_fail=stop``.
    """
    if not has_trained(config, update):
        return
    found = [one.unchanged for one in changes]
    lora = config.actor.lora
    if lora.rank:
        found = [None if one is None else _adapted_parts(one, lora) for one in found]
    broken = unchanged_parts(config.model.dtype, found, update["train/lr"])
    report(config, broken, step, monitor)


def has_trained(config: Config, update: Mapping[str, float]) -> bool:
    """Whether at least one minibatch moved the weights."""
    count = config.algorithm.minibatches_per_step
    least = LEAST_LR_OF_ADAPTERS if config.actor.lora.rank else LEAST_LR
    return (
        update.get("train/discarded_minibatches", count) < count
        and update["train/lr"] >= least
        and update["train/grad_norm"] > 0
    )


def _adapted_parts(runs: Sequence[Run], lora: LoraConfig) -> tuple[Run, ...]:
    """The parts that have an adapter whatever the model."""
    chosen = Lora(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=tuple(ATTENTION_TARGETS if lora.targets is None else lora.targets),
        layers=None if lora.layers is None else tuple(lora.layers),
    )
    return tuple(run for run in runs if chosen.adapts(run.name))


def check_value_changes(
    config: Config,
    unchanged: Sequence[str],
    update: Mapping[str, float],
    step: int,
    monitor: Monitor,
) -> None:
    """Check that an update changed the value model's matrices, each as a whole. ``unchanged``: its
    tensors that did not change. ``update``: metrics of the update, ``value/...``. Raises
    InvariantError: one did not change, with ``alignment.on_fail=stop``."""
    count = config.algorithm.minibatches_per_step
    moved = update["value/discarded_minibatches"] < count and update["value/grad_norm"] > 0
    stuck = [name for name in unchanged if name.endswith("_proj.weight") and _may_judge(name)]
    if stuck and moved and update["value/lr"] >= LEAST_LR_OF_VALUES[config.model.dtype]:
        report(config, [_sentence(stuck, "the value model's ")], step, monitor)


def unchanged_parts(
    dtype: DType, unchanged: Sequence[Sequence[Run] | None], lr: float = 1.0
) -> list[str]:
    """A sentence if any rank has parts that should have changed.

    Args:
        unchanged: Unchanged parts of each rank; ``None``: not known.
    """
    stuck: dict[str, dict[int, Run]] = {}
    for rank, runs in enumerate(unchanged):
        for run in runs or ():
            if _is_judged(run, dtype, lr):
                stuck.setdefault(run.name, {})[rank] = run
    if not stuck:
        return []
    return [_sentence([f"{name} on {_of_ranks(runs)}" for name, runs in stuck.items()])]


def _sentence(stuck: Sequence[str], of: str = "") -> str:
    more = f" and {len(stuck) - _NAMED} more tensors" if len(stuck) > _NAMED else ""
    return (
        f"the update did not change a single bit of {of}{', '.join(stuck[:_NAMED])}{more}: a "
        "frozen parameter, or a rank that missed part of the update"
    )


def _is_judged(run: Run, dtype: DType, lr: float) -> bool:
    if len(run.shape) < 2 or not _may_judge(run.name):
        return False
    elements = math.prod(run.shape)
    if dtype is DType.bfloat16 and elements * lr < LEAST_ELEMENT_STEPS:
        return False
    return elements >= LEAST_ELEMENTS[dtype]


def _may_judge(name: str) -> bool:
    return not any(part in name for part in _NOT_JUDGED)


def _of_ranks(runs: Mapping[int, Run]) -> str:
    rank, run = next(iter(runs.items()))
    place = f"{'rows' if run.dim == 0 else 'columns'} {run.start} to {run.start + run.length - 1}"
    more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"rank {rank} ({place}){more}"
