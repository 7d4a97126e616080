"""Every trained matrix changes in an update, on every rank that holds a part of it.

A layer that the optimizer does not have, and a rank that took half of an update, leave rollouts,
log-probs and curves consistent: engines get what the ranks have. What gives them away is a part of
the weights that is bit by bit what it was before the update. Digests are taken after each step in
any case; each rank compares its own parts with the last.

Not judged, because they may stay as they are in a right update: input embeddings (a token that no
sequence has gets no gradient), experts (no token may go to them), norms and biases (in bfloat16 a
step of 1e-6 does not move a weight of 1), small matrices in bfloat16, and runs with LoRA, whose
base model is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlmath.config.schema import Config, DType
from rlmath.monitor import Monitor
from rlmath.training.invariants import report
from rlmath.weights.gather import Run, WeightChanges

# Of a part, so that some of its elements are small enough to change in bfloat16: weights of 0.02
# are 1e-4 apart there, those of 1e-5 are 6e-8 apart.
LEAST_ELEMENTS = {DType.float32: 256, DType.bfloat16: 4096}
# Below it, an update may round to nothing.
LEAST_LR = 1e-7
_NOT_JUDGED = (".experts.", "embed_tokens")
_NAMED = 3


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
        changes: Of each rank.
        update: Metrics of the update, ``train/...``; without them nothing was trained.

    Raises:
        InvariantError: A part of the weights did not change, with ``alignment.on_fail=stop``.
    """
    if not config.actor.lora.rank and has_trained(config, update):
        found = [one.unchanged for one in changes]
        report(config, unchanged_parts(config.model.dtype, found), step, monitor)


def has_trained(config: Config, update: Mapping[str, float]) -> bool:
    """Whether at least one minibatch moved the weights."""
    count = config.algorithm.minibatches_per_step
    return (
        update.get("train/discarded_minibatches", count) < count
        and update["train/lr"] >= LEAST_LR
        and update["train/grad_norm"] > 0
    )


def unchanged_parts(dtype: DType, unchanged: Sequence[Sequence[Run] | None]) -> list[str]:
    """A sentence if any rank has parts that should have changed.

    Args:
        dtype: Of the weights.
        unchanged: Of each rank the parts that are as they were; ``None``: not known.
    """
    stuck: dict[str, dict[int, Run]] = {}
    for rank, runs in enumerate(unchanged):
        for run in runs or ():
            if _is_judged(run, dtype):
                stuck.setdefault(run.name, {})[rank] = run
    if not stuck:
        return []
    named = [f"{name} on {_of_ranks(runs)}" for name, runs in list(stuck.items())[:_NAMED]]
    more = f" and {len(stuck) - _NAMED} more tensors" if len(stuck) > _NAMED else ""
    return [
        f"the update changed not a single bit of {', '.join(named)}{more}: a frozen parameter, or "
        "a rank that missed a part of the update"
    ]


def _is_judged(run: Run, dtype: DType) -> bool:
    if len(run.shape) < 2 or any(part in run.name for part in _NOT_JUDGED):
        return False
    return math.prod(run.shape) >= LEAST_ELEMENTS[dtype]


def _of_ranks(runs: Mapping[int, Run]) -> str:
    rank, run = next(iter(runs.items()))
    place = f"{'rows' if run.dim == 0 else 'columns'} {run.start} to {run.start + run.length - 1}"
    more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
    return f"rank {rank} ({place}){more}"
