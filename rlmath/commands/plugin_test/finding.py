"""Findings of a test, and comparisons that say where they fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """One invariant of one part."""

    invariant: str
    text: str = ""  # The case and the numbers where it is violated; empty: it holds.

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


def repeats(run: Callable[[], Any]) -> Test:
    """A test that a second call, with other random numbers, is equal to the last bit."""

    def test() -> Iterator[str]:
        first = run()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            second = run()
        for number, (one, other) in enumerate(itertools.zip_longest(*map(_parts, (first, second)))):
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                if problem := differs(other, one):
                    yield f"a second call differs, {problem}"
            elif one != other:
                yield f"item {number} was {one!s:.80}, and {other!s:.80} again"

    return test


def _parts(found: Any) -> Sequence[Any]:
    return found if isinstance(found, list | tuple) else [found]


def differs(got: Tensor, wanted: Tensor, *, relative: float = 0.0) -> str | None:
    """Where two tensors differ most, with both numbers; ``None``: nowhere by more than is allowed.
    ``relative``: allowed, of the largest wanted value."""
    if got.shape != wanted.shape:
        return f"shape {list(got.shape)} instead of {list(wanted.shape)}"
    if not got.numel():
        return None
    got, wanted = got.double(), wanted.double()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    size = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
    off = torch.where(same, 0.0, (got - wanted).abs().nan_to_num(torch.inf)).flatten()
    if float(off.max()) <= relative * size:
        return None
    place = int(off.argmax())
    return (
        f"at {place}: {float(got.flatten()[place]):.9g}, not {float(wanted.flatten()[place]):.9g}"
    )


def not_finite(values: Tensor) -> str | None:
    """The first value that is not finite; ``None``: all are."""
    places = (~values.isfinite()).flatten().nonzero()
    if not len(places):
        return None
    return f"at {int(places[0])}: {float(values.flatten()[places[0]])}"
