"""The outcomes of a drill as lines, as a table of the docs, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmath.commands.drill.runner import Outcome

_MESSAGE = 150


def line(outcome: Outcome) -> str:
    """One outcome for the terminal."""
    verdict = "skipped" if outcome.skipped else "ok" if outcome.fired else "FAILED"
    steps = "" if outcome.steps is None else f" after {_steps(outcome.steps)}"
    kind = f" {outcome.kind}{steps}:" if outcome.kind else ""
    return (
        f"{verdict:<7} {outcome.name:<18} {outcome.seconds:5.1f} s {kind} "
        f"{_first(outcome.message)}".rstrip()
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    """What the drill found, in one line or a few."""
    failed = [one for one in outcomes if not one.fired and not one.skipped]
    fired = sum(one.fired for one in outcomes[1:])
    skipped = sum(one.skipped for one in outcomes)
    lines = [f"{fired} of {len(outcomes) - 1 - skipped} alarms fired; {skipped} do not apply"]
    lines += [f"no alarm: {one.name}: {one.what} ({one.alarm})" for one in failed if one.latest]
    return "\n".join(lines)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table of the docs: nothing in it depends on the machine."""
    rows = ["| fault | planted | where | alarm | steps until it fires |", "|---|---|---|---|---|"]
    for one in outcomes:
        steps = "does not apply" if one.skipped else "" if one.steps is None else str(one.steps)
        if not one.fired and not one.skipped:
            steps = "**fired**" if one.kind else "**never**"
        rows.append(f"| `{one.name}` | {one.what} | {one.where} | {one.alarm} | {steps} |")
    return "\n".join(rows)


def as_plain(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For JSON."""
    return [dataclasses.asdict(one) for one in outcomes]


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _first(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= _MESSAGE else f"{text[: _MESSAGE - 3]}..."
