"""Events of a run beside its steps, to be marked on its curves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmath.checkpoint.manifest import MANIFEST
from rlmath.checkpoint.store import STEP_NAME
from rlmath.monitor.run_folder import RunFolder
from rlmath.monitor.writer import NOT_FINITE, STEP

# Sign and name of each kind. A sign is read without color.
KINDS = {
    "detector": ("!", "collapse detector"),
    "failure": ("F", "failure or rollback"),
    "discarded": ("x", "minibatch discarded"),
    "not_finite": ("?", "metric that is not finite"),
    "restart": ("E", "engine restarted"),
    "warning": ("w", "warning"),
    "resume": ("R", "resumed"),
    "settings": ("S", "settings changed"),
    "decision": ("d", "automatic choice"),
    "checkpoint": ("c", "checkpoint that is kept"),
}
MAX_EVENTS = 1000
# Beginnings of the warnings that training/supervise.py writes between two attempts.
_FAILURES = ("a part failed", "collapse")


@dataclass(frozen=True)
class Event:
    step: int
    kind: str
    text: str


def events_of(run: RunFolder) -> list[Event]:
    """All events that the run's files tell of, by step."""
    found = [
        *_of_metrics(run),
        *_of_decisions(run),
        *_of_checkpoints(run),
        *(Event(line[STEP], "warning", str(line["message"])) for line in run.warnings),
        *(Event(step, "resume", f"resumed after step {step}") for step in run.resumed_after),
        *(Event(step, "settings", text) for step, text in run.changes),
    ]
    return sorted(found, key=lambda event: (event.step, list(KINDS).index(event.kind)))


def _of_metrics(run: RunFolder) -> Iterator[Event]:
    for line in run.metrics:
        step = line[STEP]
        if restarts := line.get("rollout/engine_restarts"):
            yield Event(step, "restart", f"{restarts:g} engine restarts before the step's end")
        if count := line.get("train/early_stopped_minibatches"):
            yield Event(step, "discarded", f"{count:g} minibatches discarded by the early stop")
        if odd := line.get(NOT_FINITE):
            yield Event(step, "not_finite", ", ".join(f"{tag} is {odd[tag]}" for tag in odd))


def _of_decisions(run: RunFolder) -> Iterator[Event]:
    """All alarms of detectors, and other automatic choices when they change."""
    last: dict[str, str] = {}
    for line in run.decisions:
        what, choice = str(line["what"]), str(line.get("choice"))
        text = f"{what} takes {choice}: {line.get('reason')}"
        if what.startswith("collapse."):
            yield Event(line[STEP], "detector", f"{line.get('reason')} (action: {choice})")
        elif what in _FAILURES:
            yield Event(line[STEP], "failure", text)
        elif last.get(what) != choice:
            yield Event(line[STEP], "decision", text)
        last[what] = choice


def _of_checkpoints(run: RunFolder) -> Iterator[Event]:
    for path in (run.folder / run.checkpoints).glob("step_*"):
        match = STEP_NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            yield Event(int(match[1]), "checkpoint", f"checkpoint {path.name}")
