"""Redo updates of a run on ranks, in its layout or another one, without engines."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.actor.observer import ObservedUpdate, watch_update, watched_update
from rlmath.commands.replay.choices import Choices, run_config
from rlmath.commands.replay.source import Source, Start
from rlmath.config.schema import Config
from rlmath.config.settings import replace_values
from rlmath.errors import UserError
from rlmath.monitor import Monitor, open_monitor
from rlmath.monitor.digests import StepDigests, digest, of_number
from rlmath.training.checks.catalog import step_checks
from rlmath.training.controllers import Coefficients
from rlmath.training.kept_batches import KeptStep, described_layout, read_step
from rlmath.training.opening import RunningRanks, open_ranks
from rlmath.training.plan import plan_step
from rlmath.training.rank_settings import training_ranks
from rlmath.training.step import UpdateParts, renew_reference, run_passes, update

# Sections that say nothing about an update.
_NOT_OF_RANKS = ("data", "reward", "eval", "alignment", "sft", "watchdog", "collapse", "weights")
_OF_THE_RUNNER = ("steps", "seed")


@dataclass(frozen=True)
class Redone:
    step: int
    digests: StepDigests
    metrics: Mapping[str, float]
    layout: Mapping[str, Any]  # Layout it was redone in; see described_layout.
    made_on: Mapping[str, Any]  # Layout of the run.


@dataclass(frozen=True)
class Both:
    """The step in question under the run's ``own`` choice and the ``other`` one."""

    kept: KeptStep
    own: Sequence[ObservedUpdate]
    other: Sequence[ObservedUpdate]
    minibatches: Sequence[Mapping[str, float]]  # Metrics of the other choice's.
    metrics: Mapping[str, float]
    same_split: bool  # Both have the same sequences in each minibatch.


def redo(
    source: Source, choices: Choices, other: Config | None, folder: Path
) -> tuple[list[Redone], Both | None]:
    """Redo the steps of a source, and with ``other`` the last one under that as well. Raises
    UserError: a batch is damaged, or the weights to begin with are not the run's; ActorError: a
    rank failed."""
    done: list[Redone] = []
    both = None
    with contextlib.closing(_steps(source, choices, other, folder)) as steps:
        for now in steps:
            if now.step == source.step and other is not None:
                one, both = _twice(now, other, choices, folder)
                done.append(one)
            else:
                done.append(_once(now.parts, now.kept, now.step))
    return done, both


@dataclass(frozen=True)
class _Step:
    step: int
    parts: UpdateParts
    kept: KeptStep
    begin: Start


def _steps(
    source: Source, choices: Choices, other: Config | None, folder: Path
) -> Generator[_Step, None, None]:
    """The steps in their order, each on ranks that have done those before it."""
    begin: Start = source.start
    on_same_ranks = list(_parts(source, choices, folder))
    for number, (config, steps) in enumerate(on_same_ranks):
        is_last = number == len(on_same_ranks) - 1
        ranks = config
        if is_last and other is not None and not config.algorithm.kl_coef:
            # A reference model if either has a KL term.
            ranks = replace_values(config, {"algorithm.kl_coef": other.algorithm.kl_coef})
        with _open(ranks, folder / f"part_{number}") as (opened, monitor):
            parts = _update_parts(dataclasses.replace(opened, config=config), monitor)
            _begin(parts, source, begin)
            done = begin.step
            for step in steps:
                for skipped in range(done + 1, step):
                    renew_reference(parts, skipped)
                done = step
                yield _Step(step, parts, source.batch(step, read_step), begin)
            if not is_last:
                begin = Start(steps[-1], folder / f"after_{steps[-1]}")
                _save(parts.run, begin)


def _parts(source: Source, choices: Choices, folder: Path) -> Iterator[tuple[Config, list[int]]]:
    """Steps that the same ranks can do: settings and layout may change where a run resumes."""
    for _, steps in itertools.groupby(source.steps, key=lambda step: _of_ranks(source, step)):
        own = list(steps)
        yield run_config(source, own[0], choices, folder), own


def _of_ranks(source: Source, step: int) -> dict[str, Any]:
    settings = dict(source.run.settings_of(step))
    runner = settings.pop("runner", {})
    for name in _NOT_OF_RANKS:
        settings.pop(name, None)
    layout = source.headers[step]["layout"]
    return settings | {name: runner.get(name) for name in _OF_THE_RUNNER} | {"layout": layout}


@contextlib.contextmanager
def _open(config: Config, folder: Path) -> Iterator[tuple[RunningRanks, Monitor]]:
    config = replace_values(config, {"runner.run_dir": str(folder)})
    with (
        open_ranks(config, training_ranks) as run,
        open_monitor(folder, config.runner, config.runner.steps) as monitor,
    ):
        yield run, monitor


def _update_parts(run: RunningRanks, monitor: Monitor) -> UpdateParts:
    return UpdateParts(run, monitor, Coefficients(run.config.algorithm), step_checks())


def _begin(parts: UpdateParts, source: Source, begin: Start) -> None:
    """Bring the ranks to where the replay begins, and check that the run was there."""
    run = parts.run
    if begin.path is not None:
        run.actor.load_checkpoint(begin.path)
    found = run.actor.weights_changes()[0].fingerprints
    parts.monitor.digest_log.start(found)
    if begin.step != source.start.step:
        return  # Reached by an earlier step.
    recorded = _recorded_weights(source, begin.step)
    if recorded is not None and recorded != digest(*map(of_number, found.values())):
        what = begin.path or run.config.model.path
        raise UserError(
            f"{what}: these are not the weights that the run had after step {begin.step} (another "
            "fingerprint in digests.jsonl): the model's files were changed, or the checkpoint is "
            "of another run; --from STEP begins elsewhere"
        )


def _recorded_weights(source: Source, step: int) -> str | None:
    """Digest of the weights after a step, or of those at the run's start."""
    for one in range(step, -1, -1):
        line = source.run.digests.get(one, {})
        found = line.get("weights") or line.get("start_weights")
        if found is not None:
            return str(found)
    return None


def _once(parts: UpdateParts, kept: KeptStep, step: int) -> Redone:
    """A step as the run did it, without its gate: that is about engines."""
    print(f"step {step}: {len(kept.batch)} sequences", flush=True)
    plan = dataclasses.replace(plan_step(parts.run.config, step, kept.kl_coef), gate=False)
    coefficients = parts.coefficients
    coefficients.kl_coef, coefficients.entropy_coef = kept.kl_coef, kept.entropy_coef
    alignment = run_passes(parts, kept.batch, plan)
    metrics = update(parts, kept.batch, plan, alignment, step)
    digests = parts.monitor.digests
    parts.monitor.digest_log.write(step)
    return Redone(step, digests, metrics, described_layout(parts.run), kept.layout)


def _twice(now: _Step, other: Config, choices: Choices, folder: Path) -> tuple[Redone, Both]:
    """The run's update and the other one, from the same weights and the same optimizer state."""
    parts, kept, step, begin = now.parts, now.kept, now.step, now.begin
    actor, config = parts.run.actor, parts.run.config
    if begin.path is None or begin.step != step - 1:
        begin = Start(step - 1, folder / f"after_{step - 1}")
        _save(parts.run, begin)
    actor.call(watch_update)
    redone = _once(parts, kept, step)
    own = actor.call(watched_update)
    assert begin.path is not None
    actor.load_checkpoint(begin.path)
    actor.weights_changes()  # The next update is compared with these, and not with the last one.
    actor.call(watch_update)
    algorithm = other.algorithm
    changed = _update_parts(dataclasses.replace(parts.run, config=other), parts.monitor)
    kl_coef = algorithm.kl_coef if _is_new("kl_coef", choices) else kept.kl_coef
    entropy_coef = algorithm.entropy_coef if _is_new("entropy_coef", choices) else kept.entropy_coef
    again = dataclasses.replace(kept, kl_coef=kl_coef, entropy_coef=entropy_coef)
    found = _once(changed, again, step)
    minibatches = found.digests.numbers["gradient"]
    split = [one.algorithm.minibatches_per_step for one in (config, other)]
    seen = actor.call(watched_update)
    return redone, Both(kept, own, seen, minibatches, found.metrics, split[0] == split[1])


def _is_new(name: str, choices: Choices) -> bool:
    return f"algorithm.{name}" in choices.update_keys


def _save(run: RunningRanks, to: Start) -> None:
    assert to.path is not None
    to.path.mkdir(parents=True, exist_ok=True)
    run.actor.save_checkpoint(to.path)
