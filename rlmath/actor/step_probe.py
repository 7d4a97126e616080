"""A few elements of the weights and of Adam's moments around each optimizer step.

Adam's formula, in float64 and written out here, says what the step should have made of them; and
what an earlier step left is what the next one should find. The elements are a spread of tensors,
other ones after some steps, and a spread of elements of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlmath.checkpoint.optimizer_state import optimizer_parts
from rlmath.config.optimizer import OptimizerConfig

# Steps in which the same tensors are looked at, as what one leaves is compared in the next.
MAX_TENSORS, ELEMENTS, STEPS = 8, 8, 8
# The first steps, in which all tensors are: a fault of the code is there from the start.
WHOLE_STEPS = 2
# Possible faults, in the order in which they are checked.
FINDINGS = (
    "",
    "Adam's first moment is not what the last step left",
    "Adam's second moment is not what the last step left",
    "Adam's step count is not what the last step left",
    "Adam's first moment is not beta1 m + (1 - beta1) g",
    "Adam's second moment is not beta2 v + (1 - beta2) g^2",
    "the weight did not take Adam's step at the scheduled learning rate",
    "the gradient is not the sum over micro-batches and data-parallel ranks",
    "a micro-batch whose log-probs have a gradient adds nothing to it",
    "the model's parameter is not the main parameter, rounded to its type",
    "a micro-batch has another gradient when its sequences are computed again, in two parts",
    "the weight is not what the last step left",
    "a forward pass with slightly moved weights gives other log-probs than the gradient says",
)
GRADIENT_SUM, NO_SHARE, NOT_MAIN, OTHER_GRADIENT, OTHER_WEIGHT, OTHER_SLOPE = range(7, 13)


class StepFinding(NamedTuple):
    """Worst finding of a rank's probe; all 0: none."""

    kind: float = 0.0  # Index into FINDINGS.
    found: float = 0.0  # Actual value: a moment, a count, or a weight's change.
    wanted: float = 0.0  # Expected value.
    place: str = ""  # Where, if more is known than the rank.


# For each minibatch, a rank and the finding of its probe.
StepFindings = tuple[tuple[int, StepFinding], ...]


@dataclass(frozen=True)
class AdamState:
    """Elements of weights, gradients and moments, all ``[n]`` float64."""

    weights: Tensor  # Float32 main parameters.
    first: Tensor  # First moments.
    second: Tensor  # Second moments.
    counts: Tensor  # Adam steps taken.
    decay: Tensor  # Weight decay that each should have: matrices alone.
    gradients: Tensor  # Before clipping; empty after a step.
    drift: Tensor  # Difference between the model's parameters and the rounded weights.


def adam_step(
    before: AdamState, settings: OptimizerConfig, lr: float, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments after a step, and the change of the weights.

    AdamW (arXiv:1711.05101), algorithm 2, with the schedule's rate as ``lr``. ``before``: with
    gradients. ``clip``: factor of the gradients.
    """
    g, count = clip * before.gradients, before.counts + 1
    b1, b2 = settings.adam_beta1, settings.adam_beta2
    first = b1 * before.first + (1 - b1) * g
    second = b2 * before.second + (1 - b2) * g.square()
    scaled = (second / (1 - b2**count)).sqrt() + settings.adam_eps
    change = -lr * (first / (1 - b1**count) / scaled + before.decay * before.weights)
    return first, second, change


def judge_step(
    before: AdamState, after: AdamState, settings: OptimizerConfig, lr: float, clip: float
) -> StepFinding:
    """Whether Adam turns ``before`` into ``after``.

    Weights and moments are float32: a weight is off by its own rounding, and a moment by a few
    roundings of itself and of what was added up.
    """
    first, second, change = adam_step(before, settings, lr, clip)
    g = clip * before.gradients
    found = after.weights - before.weights
    size = torch.maximum(before.weights.abs(), after.weights.abs())
    checks = (
        (4, after.first, first, 1e-5 * (before.first.abs() + g.abs()) + 1e-30),
        (5, after.second, second, 1e-5 * (before.second + g.square()) + 1e-30),
        (6, found, change, 5e-7 * size + 1e-3 * change.abs() + 1e-12),
        (NOT_MAIN, after.drift, torch.zeros_like(found), torch.zeros_like(found)),
    )
    return _worst(checks)


def judge_rest(left: AdamState, now: AdamState) -> StepFinding:
    """Whether a step starts from the state that the last one left."""
    none = torch.zeros_like(left.first)
    return _worst(
        (
            (1, now.first, left.first, none),
            (2, now.second, left.second, none),
            (3, now.counts, left.counts, none),
            (OTHER_WEIGHT, now.weights, left.weights, none),
        )
    )


def _worst(checks: Any) -> StepFinding:
    for kind, found, wanted, tolerance in checks:
        off = (found - wanted).abs() - tolerance
        # NaN is wrong as well.
        off = off.nan_to_num(nan=math.inf)
        if off.numel() and float(off.max()) > 0:
            place = int(off.argmax())
            return StepFinding(float(kind), float(found[place]), float(wanted[place]))
    return StepFinding()


class StepProbe:
    """Looks at an optimizer's steps on this rank. ``optimizer``: Megatron's Adam. ``settings``:
    settings of the optimizer."""

    def __init__(self, optimizer: Any, settings: OptimizerConfig) -> None:
        self._optimizer, self._settings = optimizer, settings
        self._left: AdamState | None = None
        self._steps = 0
        self._before: AdamState | None = None
        self._rest = StepFinding()
        # The model's rounded copy of a main parameter, where there is one.
        self._copies = dict(_model_copies(optimizer))
        # Dimensions of parameters that are stored as flat shards.
        self._dimensions = dict(_dimensions(optimizer))

    def forget(self) -> None:
        """The optimizer's state was set on purpose."""
        self._left, self._steps = None, 0

    @torch.no_grad()
    def before(self) -> None:
        """The gradients are reduced, and neither clipped nor applied."""
        self._before = now = self._read()
        self._rest = StepFinding() if self._left is None else judge_rest(self._left, now)

    @torch.no_grad()
    def after(self, lr: float, norm: float) -> StepFinding:
        """Compare the state after the step. ``lr``: learning rate of the step's plan. ``norm``:
        norm of the whole gradient, before clipping."""
        assert self._before is not None
        clip = min(1.0, self._settings.clip_grad_norm / (norm + 1e-6))
        now = self._read()
        self._steps += 1
        others = self._steps == WHOLE_STEPS or self._steps % STEPS == 0
        self._left = self._read() if others else now
        if self._rest.kind:
            return self._rest
        return judge_step(self._before, now, self._settings, lr, clip)

    def _read(self) -> AdamState:
        columns: list[list[Tensor]] = [[] for _ in range(5)]
        counts, decay = [], []
        for parameter, state, group in self._tensors():
            weight = _spread(parameter)
            none, copy = torch.zeros_like(weight), self._copies.get(id(parameter))
            values = (state.get("exp_avg"), state.get("exp_avg_sq"), parameter.grad)
            drift = none if copy is None else _spread(copy) - weight.to(copy.dtype).float()
            own = [weight, *(none if one is None else _spread(one) for one in values), drift]
            for column, one in zip(columns, own, strict=True):
                column.append(one)
            count = state.get("step", group.get("step", 0))
            counts += [float(count)] * own[0].numel()
            is_matrix = self._dimensions.get(id(parameter), parameter.dim()) > 1
            decay += [is_matrix * self._settings.weight_decay] * own[0].numel()
        weights, first, second, gradients, drift = (_flat(one) for one in columns)
        rows = (torch.tensor(counts, dtype=torch.float64), torch.tensor(decay, dtype=torch.float64))
        return AdamState(weights, first, second, *rows, gradients, drift)

    def _tensors(self) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
        every = [
            (parameter, part.optimizer.state.get(parameter, {}), group)
            for part in optimizer_parts(self._optimizer)
            for group in part.optimizer.param_groups
            for parameter in group["params"]
            if parameter.numel()
        ]
        most = len(every) if self._steps < WHOLE_STEPS else MAX_TENSORS
        stride = max(1, -(-len(every) // max(1, most)))
        yield from every[self._steps // STEPS % stride :: stride]


def _model_copies(optimizer: Any) -> Iterator[tuple[int, Tensor]]:
    """By the id of a main parameter, the model's own, of the distributed optimizer and the plain
    one."""
    for part in optimizer_parts(optimizer):
        for model, main in (
            ("shard_float16_groups", "shard_fp32_from_float16_groups"),
            ("float16_groups", "fp32_from_float16_groups"),
        ):
            pairs = zip(getattr(part, model, ()), getattr(part, main, ()), strict=True)
            for own, copies in pairs:
                for copy, parameter in zip(own, copies, strict=True):
                    if copy is not None and parameter is not None:
                        yield id(parameter), copy


def _dimensions(optimizer: Any) -> Iterator[tuple[int, int]]:
    """By the id of a shard of the distributed optimizer, the dimensions of its parameter."""
    for part in optimizer_parts(optimizer):
        for model, shards in (
            ("model_float16_groups", "shard_fp32_from_float16_groups"),
            ("model_fp32_groups", "shard_fp32_groups"),
        ):
            for own, of in zip(getattr(part, model, ()), getattr(part, shards, ()), strict=True):
                for parameter, shard in zip(own, of, strict=True):
                    yield id(shard), parameter.dim()


def _spread(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    count = min(ELEMENTS, flat.numel())
    # One operation for two slices: eight tensors are read twice in each optimizer step.
    return torch.as_strided(flat, (count,), (max(1, flat.numel() // ELEMENTS),)).float()


def _flat(columns: list[Tensor]) -> Tensor:
    return torch.cat(columns).cpu().double() if columns else torch.zeros(0, dtype=torch.float64)
