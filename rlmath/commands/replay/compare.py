"""Compare replayed steps with the run's records of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.commands.replay.redo import Redone
from rlmath.commands.replay.source import Source
from rlmath.config.schema import DType
from rlmath.monitor.digests import PHASES, same_item
from rlmath.monitor.run_folder import RunFolder
from rlmath.monitor.writer import STEP
from rlmath.training.checks.invariants import TOLERANCE

# Metrics to compare where bits cannot be equal.
LOSS, NORM = "loss", "grad_norm"
_FIRST = "groups"


@dataclass(frozen=True)
class Minibatch:
    recorded_loss: float
    loss: float
    recorded_grad_norm: float
    grad_norm: float

    def is_close(self, tolerance: float) -> bool:
        """Whether both are within the relative tolerance; the loss counts as at least 1."""
        norm = max(abs(self.recorded_grad_norm), abs(self.grad_norm))
        loss = max(abs(self.recorded_loss), abs(self.loss), 1.0)
        return (
            abs(self.recorded_grad_norm - self.grad_norm) <= tolerance * norm
            and abs(self.recorded_loss - self.loss) <= tolerance * loss
        )


@dataclass(frozen=True)
class StepVerdict:
    step: int
    equal: tuple[str, ...]
    differing: tuple[str, ...]
    # Each minibatch; one of their means if the step's file in samples/ is gone; None: the run has
    # no record of them.
    minibatches: tuple[Minibatch, ...] | None
    tensors: int | None  # Number of weights; None: not known.
    equal_tensors: int | None  # Weights with equal bits.
    tolerance: float  # Tolerance of loss and norm, where bits may differ.
    must_be_exact: bool  # The layout is the run's, on CPU, so bits must be equal.

    @property
    def is_exact(self) -> bool:
        return not self.differing

    @property
    def is_close(self) -> bool:
        """Whether loss and gradient norm of each minibatch are close, even if bits differ."""
        if self.is_exact:
            return True
        known = self.minibatches is not None
        return known and all(one.is_close(self.tolerance) for one in self.minibatches or ())

    @property
    def is_right(self) -> bool:
        """Whether the step equals the run, as far as this layout can tell."""
        return self.is_exact or (self.is_close and not self.must_be_exact)


def verdict(source: Source, redone: Redone, dtype: DType) -> StepVerdict:
    """Compare a step with the run's digests of it."""
    line, found = source.run.digests[redone.step], redone.digests
    own = found.line()
    names = [phase.name for phase in PHASES]
    phases = [name for name in names[names.index(_FIRST) :] if name in line or name in own]
    equal = tuple(name for name in phases if line.get(name) == own.get(name))
    details = source.run.details(redone.step)
    tensors = equal_tensors = minibatches = None
    if details is None:
        minibatches = _means(source.run, redone)
    else:
        keys, items = details["keys"].get("tensors", []), details["items"].get("weights", [])
        before = dict(zip(keys, items, strict=True))
        now = dict(zip(found.keys["tensors"], found.items["weights"], strict=True))
        tensors = len(before.keys() | now.keys())
        equal_tensors = sum(
            name in now and same_item(now[name], item) for name, item in before.items()
        )
        minibatches = _minibatches(
            details["numbers"].get("gradient") or [], found.numbers.get("gradient") or []
        )
    same = dict(redone.layout) == dict(redone.made_on)
    return StepVerdict(
        redone.step,
        equal,
        tuple(name for name in phases if name not in equal),
        minibatches,
        tensors,
        equal_tensors,
        TOLERANCE[dtype],
        same and redone.made_on["device"] == "cpu",
    )


def _minibatches(
    recorded: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> tuple[Minibatch, ...] | None:
    if len(recorded) != len(found):
        return None
    return tuple(
        Minibatch(
            _number(before.get(LOSS)),
            _number(now.get(LOSS)),
            _number(before.get(NORM)),
            _number(now.get(NORM)),
        )
        for before, now in zip(recorded, found, strict=True)
    )


def _means(run: RunFolder, redone: Redone) -> tuple[Minibatch, ...] | None:
    """Means over the step's minibatches, from ``metrics.jsonl``."""
    lines = [line for line in run.metrics if line[STEP] == redone.step]
    names = {name: f"train/{name}" for name in (LOSS, NORM)}
    if not lines or any(name not in lines[-1] for name in names.values()):
        return None
    recorded, found = (
        {name: one.get(key) for name, key in names.items()} for one in (lines[-1], redone.metrics)
    )
    return _minibatches([recorded], [found])


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def lines(verdicts: Sequence[StepVerdict]) -> Iterator[str]:
    words = {phase.name: phase.words for phase in PHASES}
    for one in verdicts:
        said = "equal to the last bit" if one.is_exact else "not equal to the last bit"
        yield f"step {one.step}: {said}"
        if one.differing:
            yield f"  equal: {', '.join(one.equal) or 'nothing'}"
            yield f"  first difference: {words[one.differing[0]]} ({one.differing[0]})"
        if one.tensors is not None:
            yield f"  weights after it: {one.equal_tensors} of {one.tensors} tensors are equal"
        if one.minibatches is None:
            yield "  loss and gradient norm as recorded are not known"
        for number, each in enumerate(one.minibatches or (), start=1):
            name = f"minibatch {number}" if one.tensors is not None else "mean of the minibatches"
            yield (
                f"  {name}: loss {each.loss:.9g} (recorded {each.recorded_loss:.9g}), "
                f"gradient norm {each.grad_norm:.9g} (recorded {each.recorded_grad_norm:.9g})"
            )
        if not one.is_exact and one.minibatches is not None and not one.must_be_exact:
            close = "agree" if one.is_close else "do NOT agree"
            yield f"  loss and gradient norm {close} to {one.tolerance:g}, as another layout can"


def as_json(verdicts: Sequence[StepVerdict]) -> list[dict[str, Any]]:
    return [
        {**dataclasses.asdict(one), "bit_equal": one.is_exact, "close": one.is_close}
        for one in verdicts
    ]
