"""The first digest of two runs that is not the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.errors import UserError
from rlmath.monitor.digests import PHASES, Phase, comparable
from rlmath.monitor.run_folder import RunFolder
from rlmath.monitor.run_settings import attempt_of, flat

_START = PHASES[0].name
_AFTER = PHASES[-1].name


@dataclass(frozen=True)
class Setting:
    """A setting, version or machine that two runs do not share; ``None`` where one lacks it."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Item:
    """An item with its own digest, which two runs do not share."""

    place: int  # Among the phase's items, from 0.
    a: str | None  # Its key in the first run, such as train.jsonl:12/3; None: absent.
    b: str | None  # Its key in the second.
    numbers: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class Parting:
    """Divergence point of two runs."""

    step: int
    phase: Phase
    equal: tuple[str, ...]
    items: tuple[Item, ...]  # Items that differ; empty when the step's file with them is gone.
    total: int
    # By run, the ranks whose weights differ from rank 0's.
    odd_ranks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True)
class Comparison:
    settings: tuple[Setting, ...]  # Differing settings, at the divergence point or the last step.
    files: tuple[Setting, ...]
    made_with: tuple[Setting, ...]  # Differing versions and machines.
    steps: tuple[int, ...]  # Common steps, ascending.
    only: tuple[tuple[int, ...], tuple[int, ...]]  # By run, steps that the other does not have.
    parting: Parting | None  # None: all that both have is equal.


def compare(run_a: RunFolder, run_b: RunFolder) -> Comparison:
    """Compare the digests of two runs, step by step and phase by phase. Raises UserError: a run has
    no digests, or they share no step."""
    a, b = run_a.digests, run_b.digests
    steps = sorted(a.keys() & b.keys())
    if not steps:
        raise UserError(
            f"{run_a.folder} has digests of steps {_range(a)} and {run_b.folder} of {_range(b)}: "
            "there is no step to compare"
        )
    only = (tuple(sorted(a.keys() - b.keys())), tuple(sorted(b.keys() - a.keys())))
    parting = None
    for step in steps:
        found = _first_difference(a[step], b[step])
        if found is not None:
            parting = _parting(run_a, run_b, step, *found)
            break
    at = steps[-1] if parting is None else parting.step
    # Step 0 is what was there before the first one.
    made = [
        attempt_of(run.attempts, max(at, 1)) if run.attempts else None for run in (run_a, run_b)
    ]
    settings = [{} if one is None else comparable(flat(one.settings)) for one in made]
    # A setting of one run only comes from another version of rlmath, or is an option of another
    # loss.
    shared = settings[0].keys() & settings[1].keys()
    files = [{} if one is None else one.files for one in made]
    named = files[0].keys() & files[1].keys()
    # A run without this record counts as equal.
    versions = [one.made_with for one in made if one is not None and one.made_with]
    return Comparison(
        _differing(*({key: one[key] for key in shared} for one in settings)),
        _differing(*({key: one[key] for key in named} for one in files)),
        _differing(*versions) if len(versions) == 2 else (),
        tuple(steps),
        only,
        parting,
    )


def _range(steps: Mapping[int, Any]) -> str:
    return f"{min(steps)} to {max(steps)}"


def _first_difference(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> tuple[Phase, tuple[str, str], tuple[str, ...]] | None:
    """The phase, its key in each run, and the phases that were equal."""
    if _START in a or _START in b:
        # A run that continues another one's checkpoint begins with the weights of its last step.
        keys = (_START if _START in a else _AFTER, _START if _START in b else _AFTER)
        return None if a.get(keys[0]) == b.get(keys[1]) else (PHASES[0], keys, ())
    equal: list[str] = []
    for phase in PHASES:
        if a.get(phase.name) != b.get(phase.name):
            return phase, (phase.name, phase.name), tuple(equal)
        if phase.name in a:
            equal.append(phase.name)
    return None


def _parting(
    run_a: RunFolder,
    run_b: RunFolder,
    step: int,
    phase: Phase,
    keys: tuple[str, str],
    equal: tuple[str, ...],
) -> Parting:
    details = [one for run in (run_a, run_b) if (one := run.details(step)) is not None]
    if len(details) < 2:
        return Parting(step, phase, equal, (), 0)
    digests = [one["items"].get(key, []) for one, key in zip(details, keys, strict=True)]
    names = [one["keys"].get(phase.of, []) for one in details]
    numbers = [one.get("numbers", {}).get(key) for one, key in zip(details, keys, strict=True)]
    total = max(map(len, digests))
    items = []
    for place in range(total):
        own = [_at(one, place) for one in digests]
        if own[0] != own[1]:
            pair = (_at(numbers[0], place), _at(numbers[1], place))
            noted = None if numbers[0] is None or numbers[1] is None else pair
            items.append(Item(place, _at(names[0], place), _at(names[1], place), noted))
    odd = [tuple(one.get("odd_ranks", [])) if phase.name == _AFTER else () for one in details]
    return Parting(step, phase, equal, tuple(items), total, (odd[0], odd[1]))


def _at(values: Sequence[Any] | None, place: int) -> Any:
    return values[place] if values is not None and place < len(values) else None


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Setting, ...]:
    return tuple(
        Setting(key, a.get(key), b.get(key))
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    )
