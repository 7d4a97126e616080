"""A step as its files have it: the sample in question, its group, and all that was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.checks import attempts
from rlmath.commands.report.run_files import TRAINING, RunFiles, SamplesFile, read_run
from rlmath.config.load import from_plain
from rlmath.config.schema import Config
from rlmath.errors import UserError
from rlmath.monitor.digests import read_details
from rlmath.rollout.ledger import LEDGER_FILE, Event, events

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Address:
    """``STEP/PROBLEM/INDEX``, as ``rlmath explain`` and the report write it."""

    step: int
    problem: str
    index: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read one; a problem's id may hold slashes.

        Raises:
            ValueError: It is none.
        """
        step, _, rest = text.partition("/")
        problem, _, index = rest.rpartition("/")
        if not problem or not step.isdigit() or not index.isdigit():
            raise ValueError(f"{text} is not STEP/PROBLEM/INDEX, such as 12/train.jsonl:345/0")
        return cls(int(step), problem, int(index))

    @property
    def key(self) -> str:
        """Within its step."""
        return f"{self.problem}/{self.index}"


@dataclass(frozen=True)
class Step:
    """What a run has of a step and of one sample in it.

    Attributes:
        config: The settings in force when it was sampled.
        row: The sample.
        group: All samples of its problem, the sample among them, by index.
        details: The digests of the step that sampled it; ``None``: they are gone.
        update: Of the step that trained on it.
    """

    files: RunFiles
    config: Config
    address: Address
    row: Row
    group: Sequence[Row]
    details: Mapping[str, Any] | None
    update: Update

    def noted(self, phase: str, of: str, key: str) -> tuple[str, Any] | None:
        """Digest and number of one of its ``samples`` or ``problems``; ``None``: there are none."""
        return _noted(self.details, phase, of, key)


@dataclass(frozen=True)
class Update:
    """The step that trained on a sample: the one that sampled it, or a later one when its group was
    carried over.

    Attributes:
        step: Its number; ``None``: no step has trained on the sample.
        config: The settings in force.
        trained: What it trained on, in its order; empty when that is not known.
        details: Its digests; ``None``: they are gone.
    """

    step: int | None
    config: Config
    trained: Sequence[Row]
    details: Mapping[str, Any] | None

    def noted(self, phase: str, key: str) -> tuple[str, Any] | None:
        """Digest and number of one of its sequences; ``None``: there are none."""
        return _noted(self.details, phase, "sequences", key)


def _noted(
    details: Mapping[str, Any] | None, phase: str, of: str, key: str
) -> tuple[str, Any] | None:
    if details is None or phase not in details["items"]:
        return None
    keys: list[str] = details["keys"][of]
    if key not in keys:
        return None
    place = keys.index(key)
    numbers = details["numbers"].get(phase)
    return details["items"][phase][place], None if numbers is None else numbers[place]


def read_step(run_dir: Path, address: Address) -> Step:
    """Read a step.

    Raises:
        UserError: The run, the step or the sample is not there.
    """
    files = read_run(run_dir)
    of_steps = {file.step: file for file in files.samples if file.kind == TRAINING}
    if address.step not in of_steps:
        have = f"steps {min(of_steps)} to {max(of_steps)}" if of_steps else "no step"
        raise UserError(
            f"{run_dir} has no samples of step {address.step}; its samples/ has {have}. See "
            "runner.samples_every and runner.samples_keep_gib"
        )
    rows = {_key(row): row for row in files.rows(of_steps[address.step])}
    group = sorted(
        (row for row in rows.values() if row["problem_id"] == address.problem),
        key=lambda row: int(row["index"]),
    )
    if address.key not in rows:
        raise UserError(_not_there(address, rows, group))
    found = attempts.attempts(run_dir)
    if not found:
        raise UserError(f"{run_dir} has no {attempts.CONFIG_FILE}, so its settings are not known")
    details = read_details(run_dir, address.step)
    step = trained_in(run_dir, rows[address.key], group, details)
    of = address.step if step is None else step
    theirs = details if step is None else read_details(run_dir, step)
    trained = [] if step is None else _trained(files, of_steps, step, rows[address.key], theirs)
    return Step(
        files,
        from_plain(attempts.in_force(found, address.step)),
        address,
        rows[address.key],
        group,
        details,
        Update(step, from_plain(attempts.in_force(found, of)), trained, theirs),
    )


def trained_in(
    run_dir: Path, row: Row, group: Sequence[Row], details: Mapping[str, Any] | None
) -> int | None:
    """The step that trained on a sample, by the ledger; ``None``: none has.

    Args:
        row: The sample.
        group: Its group. The ledger has the seed of its first sample.
        details: Digests of the step that sampled it: what is known without a ledger.
    """
    path = run_dir / LEDGER_FILE
    if row.get("dropped") is not None:
        return None
    by_digests = details is None or _key(row) in details["keys"].get("sequences", [])
    without_ledger = int(row["step"]) if by_digests else None
    if not path.is_file():
        return without_ledger
    who = row["problem_id"], group[0].get("seed")
    ordinals: set[int] = set()
    for event in events(path):
        if event["event"] == Event.admitted:
            if (event["problem"], event.get("seed", who[1])) == who:
                ordinals.add(event["group"])
        elif event["event"] == Event.trained and event["group"] in ordinals:
            return int(event["step"])
        elif event["event"] == Event.lost and event["group"] in ordinals:
            return without_ledger
    return None if ordinals else without_ledger


def _not_there(address: Address, rows: Mapping[str, Row], group: Sequence[Row]) -> str:
    if group:
        return f"problem {address.problem} has samples 0 to {len(group) - 1} in step {address.step}"
    problems = list(dict.fromkeys(row["problem_id"] for row in rows.values()))
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    return (
        f"step {address.step} did not sample the problem {address.problem}; it sampled "
        f"{', '.join(problems[:5])}{more}"
    )


def _trained(
    files: RunFiles,
    of_steps: Mapping[int, SamplesFile],
    step: int,
    row: Row,
    details: Mapping[str, Any] | None,
) -> list[Row]:
    """The rows of the step's sequences; those of groups that were carried over are in the files of
    earlier steps."""
    keys = (details or {}).get("keys", {}).get("sequences", [])
    known = {_key(row): row}
    for earlier in sorted((one for one in of_steps if one <= step), reverse=True):
        if all(key in known for key in keys):
            break
        for row in files.rows(of_steps[earlier]):
            known.setdefault(_key(row), row)
    return [known[key] for key in keys] if all(key in known for key in keys) else []


def _key(row: Row) -> str:
    return f"{row['problem_id']}/{row.get('index')}"
