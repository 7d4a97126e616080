"""What became of every group of a run: ``ledger.jsonl``, one line per event, only ever appended to.

    {"step": 3, "event": "admitted", "group": 17, "problem": "train.jsonl:5", "version": 2,
     "seed": 81}
    {"step": 3, "event": "finished", "group": 17, "tokens": 5120}
    {"step": 3, "event": "filtered", "group": 17, "reason": "equal_rewards"}

A group is admitted once and ends once: ``trained`` (given to the update of that step), ``filtered``
(dropped by ``algorithm.filter``) or ``failed`` (nothing could score it). Until then it is live,
and each step that leaves it live says ``carried_over``. A run that continues after an earlier step
says ``resumed``, which makes the events of later steps void. What a run holds is a fold over these
lines.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

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
    resumed = "resumed"


ENDS = (Event.trained, Event.filtered, Event.failed)


class LedgerError(UserError):
    """Groups were lost or counted twice."""


@dataclass
class Balance:
    """What the events of a run add up to.

    Attributes:
        admitted: Groups that were admitted.
        ended: Groups by how they ended.
        live: Ordinals of those that were admitted and have not ended.
        next_ordinal: Larger than that of any group that was admitted.
        step: Of the last event.
    """

    admitted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    live: set[int] = field(default_factory=set)
    next_ordinal: int = 0
    step: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Take one event in.

        Raises:
            LedgerError: A group is admitted twice, or ends without being live.
        """
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
                "admitted, or it has ended before"
            )
        elif kind in ENDS:
            self.live.remove(group)
            self.ended[kind] += 1


class Ledger:
    """The ledger of a run, and what it adds up to.

    Args:
        path: Of the file; ``None``: kept in memory alone.
        after_step: What is there of later steps is void; 0 before a new run.
    """

    def __init__(self, path: Path | None = None, after_step: int = 0) -> None:
        self._path = path
        self.balance = Balance()
        if path is None or not path.is_file():
            return
        _drop_torn_line(path)
        last = 0
        for event in events(path):
            last = event["step"]
            if last <= after_step:
                self.balance.add(event)
        if last > after_step:
            self._append([{"step": after_step, "event": Event.resumed}])

    def write(self, step: int, lines: Iterable[dict[str, Any]]) -> None:
        """Append events of a step.

        Args:
            step: Optimization step, from 1.
            lines: Each with ``event``, ``group`` and what more it has.

        Raises:
            LedgerError: See :meth:`Balance.add`.
        """
        events = [{"step": step, **line} for line in lines]
        for event in events:
            self.balance.add(event)
        self._append(events)

    def adopt(self, step: int, groups: Mapping[int, str]) -> None:
        """Take over live groups of a checkpoint that another run, or an earlier version, made.

        Args:
            step: Of the checkpoint.
            groups: Problem ids by ordinal.
        """
        if not self.balance.admitted:
            self.write(
                step,
                [
                    {"event": Event.admitted, "group": ordinal, "problem": problem}
                    for ordinal, problem in sorted(groups.items())
                ],
            )

    def check(self, step: int, live: Collection[int]) -> None:
        """Conservation: every group that was admitted has ended or is live.

        Args:
            step: That ends.
            live: Ordinals of the groups that are held for later steps.

        Raises:
            LedgerError: It does not hold.
        """
        balance = self.balance
        lost, unknown = balance.live - set(live), set(live) - balance.live
        if not lost and not unknown and len(live) == len(balance.live):
            return
        ended = ", ".join(f"{balance.ended[kind]} {kind}" for kind in ENDS)
        raise LedgerError(
            f"step {step}: {balance.admitted} groups were admitted, but {ended} and {len(live)} "
            f"live make {sum(balance.ended.values()) + len(live)}"
            + _named("lost", lost)
            + _named("live and not in the ledger", unknown)
            + ". This is a defect of rlmath; the run stops so that it trains on nothing twice."
        )

    def _append(self, lines: list[dict[str, Any]]) -> None:
        if self._path is not None and lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{to_json(line)}\n" for line in lines)


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a ledger that are in force, in their order."""
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # A process was ended while it wrote it.
        event = json.loads(line)
        if event["event"] == Event.resumed:
            found = [one for one in found if one["step"] <= event["step"]]
        else:
            found.append(event)
    return found


def _drop_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _named(what: str, groups: Collection[int]) -> str:
    return f"; {what}: {sorted(groups)[:10]}" if groups else ""
