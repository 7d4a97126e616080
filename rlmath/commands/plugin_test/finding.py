"""Findings of a test, and comparisons that say where they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """One invariant of one part.

    Attributes:
        text: The case and the numbers where it is violated; empty: it holds.
    """

    invariant: str
    text: str = ""

    @property
    def holds(self) -> bool:
        return not self.text


# A test yields a message for each violation.
Test = Callable[[], Iterator[str]]


def findings(tests: dict[str, Test]) -> Iterator[Finding]:
    """Run tests by the names of their invariants; a part that raises violates the one that it was
    tested for."""
    for invariant, test in tests.items():
        try:
            yield Finding(invariant, next(test(), ""))
        except Exception as error:
            yield Finding(invariant, f"{type(error).__name__}: {error}")


def differs(
    got: Tensor, wanted: Tensor, *, relative: float = 0.0, absolute: float = 0.0
) -> str | None:
    """Where two tensors differ most, with both numbers; ``None``: nowhere by more than is allowed.

    Args:
        relative: Allowed, of the largest wanted value.
    """
    if got.shape != wanted.shape:
        return f"shape {list(got.shape)} instead of {list(wanted.shape)}"
    if not got.numel():
        return None
    got, wanted = got.double(), wanted.double()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    size = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    off = torch.where(same, 0.0, (got - wanted).abs().nan_to_num(torch.inf)).flatten()
    if float(off.max()) <= absolute + relative * size:
        return None
    place = int(off.argmax())
    return (
        f"at {place}: {float(got.flatten()[place]):.9g}, not {float(wanted.flatten()[place]):.9g}"
    )


def not_finite(values: Tensor) -> str | None:
    """The first value that is none; ``None``: all are finite."""
    places = (~values.isfinite()).flatten().nonzero()
    if not len(places):
        return None
    return f"at {int(places[0])}: {float(values.flatten()[places[0]])}"
