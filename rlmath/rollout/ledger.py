"""The ledger of all groups of a run: ``ledger.jsonl``, one line per event, append-only.

    {"step": 3, "event": "admitted", "group": 17, "problem": "train.jsonl:5", "version": 2,
     "seed": 81}
    {"step": 3, "event": "finished", "group": 17, "tokens": 5120}
    {"step": 3, "event": "filtered", "group": 17, "reason": "equal_rewards"}

A group is admitted once and ends once: ``trained`` (given to the update of that step), ``filtered``
(dropped by ``algorithm.filter``) or ``failed`` (nothing could score it). Until then it is live, and
each step that leaves it live adds ``carried_over``. A run that continues from an earlier step adds
``resumed``, which voids the events of later steps, and after step 0 all events. A run's state is a
fold over these lines.

Lines are flushed to disk before a checkpoint relies on them. If the file nevertheless ends earlier,
the run continues: ``lost`` ends the groups whose end was only in the missing lines.
"""

from __future__ import annotations

import itertools
import json
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlmath.checkpoint.manifest import sync
from rlmath.errors import UserError
from rlmath.monitor.files import to_json

LEDGER_FILE = "ledger.jsonl"


class Event(StrEnum):
    admitted = "admitted"
    finished = "finished"
    trained = "trained"
    filtered = "filtered"
    failed = "failed"
    carried_over = "carried_over"
    lost = "lost"
    resumed = "resumed"


ENDS = (Event.trained, Event.filtered, Event.failed, Event.lost)


class LedgerError(UserError):
    """Groups were lost or counted twice."""


@dataclass
class Balance:
    events: int = 0  # Number of events.
    admitted: int = 0  # Number of admitted groups.
    ended: Counter[str] = field(default_factory=Counter)  # Number of groups by how they ended.
    live: set[int] = field(default_factory=set)  # Ordinals of admitted groups that have not ended.
    next_ordinal: int = 0  # Larger than the ordinal of any admitted group.
    step: int = 0  # Step of the last event.

    def add(self, event: dict[str, Any]) -> None:
        """Add an event. Raises LedgerError: a group is admitted twice, or ends without being
        live."""
        kind, group = Event(event["event"]), event["group"]
        self.step = event["step"]
        if kind is Event.admitted:
            if group < self.next_ordinal:
                raise LedgerError(f"step {self.step}: group {group} is admitted a second time")
            self.live.add(group)
            self.admitted += 1
            self.next_ordinal = group + 1
        elif group not in self.live:
            raise LedgerError(
                f"step {self.step}: group {group} is {kind}, but it is not live: it was never "
                "admitted, or has already ended"
            )
        elif kind in ENDS:
            self.live.remove(group)
            self.ended[kind] += 1
        self.events += 1


class Ledger:
    """The ledger of a run, with its balance. ``path``: the file; ``None``: only in memory.
    ``after_step``: existing events of later steps are void; 0 for a new run voids all."""

    def __init__(self, path: Path | None = None, after_step: int = 0) -> None:
        self._path, self._after_step = path, after_step
        self.balance = Balance()
        if path is None or not path.is_file():
            return
        found, end = _in_short(path)
        with path.open("r+b") as file:
            file.truncate(end)  # Remove the incomplete line of a killed process.
        void = 0
        for kind, step, group in found:
            if after_step and step <= after_step:
                self.balance.add({"event": kind, "step": step, "group": group})
            else:
                void += 1
        if void:
            self._append([{"step": after_step, "event": Event.resumed}])

    def write(self, step: int, lines: Iterable[dict[str, Any]]) -> None:
        """Append events of a step. Raises LedgerError: as in :meth:`Balance.add`. ``lines``: lines
        with ``event``, ``group`` and further fields."""
        events = [{"step": step, **line} for line in lines]
        for event in events:
            self.balance.add(event)
        self._append(events)

    def adopt(self, groups: Mapping[int, str], events: int) -> None:
        """Take over the live groups of a checkpoint that relies on more lines than exist, because
        another run made it or the end of the file was lost. ``groups``: problem ids by ordinal.
        ``events``: number of events that the checkpoint relies on."""
        known = self.balance.events
        if known >= events:
            return
        if any(one < self.balance.next_ordinal for one in groups.keys() - self.balance.live):
            # The existing lines belong to other groups.
            self._append([{"step": 0, "event": Event.resumed}])
            self.balance = Balance()
        lost = sorted(self.balance.live - groups.keys())
        if self._path is not None and self._after_step:
            print(
                f"warning: {self._path} ends before the checkpoint of step {self._after_step}: it "
                f"has {known} events of the {events} that the checkpoint counts. Lines may be lost "
                "when a machine crashes. The run "
                "resumes with the groups of the checkpoint; the ledger does not say what became of "
                "the others since its last line" + _name_groups("recorded as lost", lost),
                file=sys.stderr,
                flush=True,
            )
        lines: list[dict[str, Any]] = [{"event": Event.lost, "group": one} for one in lost]
        lines += [
            {"event": Event.admitted, "group": one, "problem": groups[one]}
            for one in sorted(groups.keys() - self.balance.live)
        ]
        self.write(self._after_step, lines)

    def sync(self) -> None:
        """Flush to disk, before a checkpoint that relies on it."""
        if self._path is not None and self._path.is_file():
            sync(self._path)
            sync(self._path.parent)

    def check(self, step: int, live: Collection[int]) -> None:
        """Check conservation: every admitted group has ended or is live. Raises LedgerError: a
        group was lost or counted twice. ``live``: ordinals of the groups kept for later steps."""
        balance = self.balance
        lost, unknown = balance.live - set(live), set(live) - balance.live
        if not lost and not unknown and len(live) == len(balance.live):
            return
        ended = ", ".join(f"{balance.ended[kind]} {kind}" for kind in ENDS)
        raise LedgerError(
            f"step {step}: {balance.admitted} groups were admitted, but {ended} and {len(live)} "
            f"live make {sum(balance.ended.values()) + len(live)}"
            + _name_groups("lost", lost)
            + _name_groups("live and not in the ledger", unknown)
            + ". This is a bug in rlmath; the run stops so that it does not train on a group twice."
        )

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if self._path is not None and lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{to_json(line)}\n" for line in lines)


def events(path: Path) -> list[dict[str, Any]]:
    """The valid events of a ledger, in order."""
    found: list[dict[str, Any]] = []
    for event, _ in _lines(path):
        if event["event"] == Event.resumed:
            found = _in_force(found, event["step"])
        else:
            found.append(event)
    return found


def _in_force(events: Iterable[dict[str, Any]], after_step: int) -> list[dict[str, Any]]:
    """Events that stay valid for a run that continues after a step; none for a new run."""
    return [event for event in events if after_step and event["step"] <= after_step]


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The lines up to the first damaged one, each with the offset of its end.

    A killed process leaves an incomplete line, a crashed machine zeros.
    """
    end = 0
    with path.open("rb") as lines:
        for line in lines:
            try:
                event = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                event = None
            if not isinstance(event, dict):
                return
            end += len(line)
            yield event, end


def _in_short(path: Path) -> tuple[Iterator[tuple[Event, int, int]], int]:
    """Kind, step and group of the valid events, and the offset of the last complete line's end.

    A run of 10,000 steps has millions of them: 17 bytes each, instead of 700 as a dict.
    """
    names, end = list(Event), 0
    number = {str(name): place for place, name in enumerate(names)}
    kinds, steps, groups = array("b"), array("q"), array("q")
    for event, place in _lines(path):
        end = place
        step = event["step"]
        if event["event"] == Event.resumed:
            kept = [step and one <= step for one in steps]
            kinds, steps, groups = (
                array(part.typecode, itertools.compress(part, kept))
                for part in (kinds, steps, groups)
            )
        else:
            kinds.append(number[event["event"]])
            steps.append(step)
            groups.append(event["group"])
    return zip((names[one] for one in kinds), steps, groups, strict=True), end


def _name_groups(what: str, groups: Collection[int]) -> str:
    return f"; {what}: {sorted(groups)[:10]}" if groups else ""
