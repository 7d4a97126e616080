"""Weights that must not move, and copies of weights that must agree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rlmath.config.algorithm import ReferenceKind
from rlmath.config.schema import Config
from rlmath.training.checks.base import AfterUpdate, BeforeUpdate, Metrics, StepCheck, report
from rlmath.weights.gather import WeightChanges

if TYPE_CHECKING:
    from rlmath.actor.worker import ActorWorker

_NAMED = 3
# Training has no balancing of experts that would move it (``rlmath/actor/experts.py``).
SELECTION_BIAS = "e_score_correction_bias"


class StillWeights(StepCheck):
    """A frozen reference, the base model under LoRA and the biases by which routers select experts
    stay as they are; copies of the model on several data-parallel ranks, and what tensor ranks and
    stages hold twice, stay alike."""

    def __init__(self) -> None:
        self._begun = False
        # Fingerprints of selection biases.
        self._biases: dict[str, int] = {}

    def before_update(self, now: BeforeUpdate) -> Metrics:
        if not self._begun and now.batch is not None and has_frozen_weights(now.run.config):
            now.run.actor.call(begin)
            self._begun = True
        return {}

    def after_update(self, now: AfterUpdate) -> Metrics:
        broken = different_copies(now.changes) + find_drift(now.changes)
        prints = now.changes[0].fingerprints if now.changes else {}
        biases = {name: one for name, one in prints.items() if name.endswith(SELECTION_BIAS)}
        broken += find_moved([[n for n, one in biases.items() if self._biases.get(n, one) != one]])
        self._biases = biases
        if self._begun:
            broken += find_moved(now.run.actor.call(compare_again))
        report(now.run.config, broken, now.step, now.monitor)
        return {}


def has_frozen_weights(config: Config) -> bool:
    """Whether ranks hold weights that training does not change."""
    algorithm = config.algorithm
    frozen = algorithm.kl_coef > 0 and algorithm.reference.kind is ReferenceKind.frozen
    return frozen or config.actor.lora.rank > 0


def begin(worker: ActorWorker) -> None:
    """Runs in a rank: take the first checksums."""
    from rlmath.actor.frozen_weights import FrozenWeights

    actor = worker.actor
    parameters = list(actor.module.named_parameters())
    tensors: list[tuple[str, Callable[[], Tensor]]] = []
    if actor.settings.lora is not None:
        base = [(name, p) for name, p in parameters if not p.requires_grad]
        read = actor.device_state.read
        tensors += [(f"base model: {name}", functools.partial(read, p)) for name, p in base]
    if actor.reference is not None and actor.settings.reference == "frozen":
        trained = [name for name, p in parameters if actor.settings.lora is None or p.requires_grad]
        for index, name in enumerate(trained):
            own = functools.partial(lambda held, place: held.reference[place], actor, index)
            tensors.append((f"reference model: {name}", own))
    worker.frozen_weights = FrozenWeights(tensors)


def compare_again(worker: ActorWorker) -> list[str]:
    """Runs in a rank: names of weights that changed since :func:`begin`."""
    found: list[str] = worker.frozen_weights.find_changed()
    return found


def find_moved(found: Sequence[Sequence[str]]) -> list[str]:
    """A sentence if frozen weights have changed. ``found``: names of the changed tensors of each
    rank."""
    named = [f"{name} on rank {rank}" for rank, names in enumerate(found) for name in names]
    if not named:
        return []
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return [f"weights that are frozen have changed: {', '.join(named[:_NAMED])}{more}"]


def find_drift(changes: Sequence[WeightChanges]) -> list[str]:
    """A sentence if ranks of a model copy differ in weights that they share."""
    found = next((one.drifted for one in changes if one.drifted), "")
    return (
        [f"{found}: their gradients are not summed alike, or one missed an update"] if found else []
    )


def different_copies(changes: Sequence[WeightChanges]) -> list[str]:
    """A sentence if data-parallel ranks hold different weights. ``changes``: changes of each
    rank."""
    if not changes:
        return []
    first = changes[0].fingerprints
    for rank, one in enumerate(changes[1:], 1):
        names = [name for name, value in one.fingerprints.items() if first.get(name) != value]
        if names:
            more = f" and {len(names) - _NAMED} more tensors" if len(names) > _NAMED else ""
            return [
                f"rank {rank} holds other weights than rank 0 after the update, in "
                f"{', '.join(names[:_NAMED])}{more}: data-parallel copies have drifted apart, as "
                "when gradients are not summed over ranks"
            ]
    return []
