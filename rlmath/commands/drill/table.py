"""The outcomes of a drill as lines, as a table of the docs, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmath.commands.drill.runner import Outcome

_MESSAGE = 150


def line(outcome: Outcome) -> str:
    verdict = "skipped" if outcome.skipped else "ok" if outcome.fired else "FAILED"
    steps = "" if outcome.steps is None else f" after {_steps(outcome.steps)}"
    kind = f" {outcome.kind}{steps}:" if outcome.kind else ""
    return (
        f"{verdict:<7} {outcome.name:<18} {outcome.seconds:5.1f} s {kind} "
        f"{_first(outcome.message)}".rstrip()
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    failed = [one for one in outcomes if not one.fired and not one.skipped]
    fired = sum(one.fired for one in outcomes[1:])
    skipped = sum(one.skipped for one in outcomes)
    lines = [f"{fired} of {len(outcomes) - 1 - skipped} alarms fired; {skipped} do not apply"]
    lines += [f"no alarm: {one.name}: {one.what} ({one.alarm})" for one in failed if one.latest]
    return "\n".join(lines)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table of the docs: nothing in it depends on the machine."""
    rows = ["| fault | injected | where | alarm | steps until alarm |", "|---|---|---|---|---|"]
    for one in outcomes:
        steps = "does not apply" if one.skipped else "" if one.steps is None else str(one.steps)
        if not one.fired and not one.skipped:
            steps = "**fired**" if one.kind else "**never**"
        rows.append(f"| `{one.name}` | {one.what} | {one.where} | {one.alarm} | {steps} |")
    return "\n".join(rows)


def side_by_side(drills: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Several drills as one table of the docs, and why a fault is in none of the runs of one."""
    names = list(dict.fromkeys(one["name"] for found in drills.values() for one in found))
    rows = [f"| fault | {' | '.join(drills)} |", f"|---|{'---|' * len(drills)}"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in names:
        cells = []
        for drill, found in drills.items():
            one = next((one for one in found if one["name"] == name), None)
            cells.append("" if one is None else _cell(one))
            if one is not None and one["skipped"]:
                reasons.setdefault((drill, one["message"]), []).append(name)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    notes = [
        f"- {drill}: {', '.join(f'`{fault}`' for fault in faults)} "
        f"{'does' if len(faults) == 1 else 'do'} not apply: {message}"
        for (drill, message), faults in reasons.items()
    ]
    return "\n".join([*rows, "", *notes] if notes else rows)


def _cell(one: Mapping[str, Any]) -> str:
    if one["skipped"]:
        return "—"
    if not one["fired"]:
        return "**fired**" if one["kind"] else "**never**"
    return "none" if one["steps"] is None else str(one["steps"])


def as_plain(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in outcomes]


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _first(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= _MESSAGE else f"{text[: _MESSAGE - 3]}..."
