"""Starts a run again from its last checkpoint when a part of it dies, hangs or collapses."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import ray

from rlmath.checkpoint import CheckpointStore
from rlmath.checkpoint.manifest import Manifest, read_manifest
from rlmath.cluster.watchdog import Stalled
from rlmath.config.schema import Config
from rlmath.errors import ComponentError, UserError, printable
from rlmath.monitor import DECISIONS_FILE, read_metrics
from rlmath.monitor.collapse import RollBack
from rlmath.monitor.files import replacing, to_json
from rlmath.training.checkpointing import open_store

# Failures that a restart may fix. An error of the settings, the data or a reward would come again.
COMPONENT_FAILURES = (ComponentError, Stalled, ray.exceptions.RayError)
ROLLBACKS_FILE = "rollbacks.json"


Events = Generator[Any, Any, None]


def supervise(config: Config, attempt: Callable[[Config], Events]) -> Events:
    """Run ``attempt``, which yields its steps, until it finishes.

    After a part has failed it is run again, from the newest checkpoint (while there is none, from
    that of another run which ``runner.resume`` names), at most
    ``runner.max_restarts`` times without a new checkpoint between; no more when its code raised the
    same error at the same step twice running. After a collapse whose detector
    asks for it, it is run again from the newest checkpoint before the collapse with a lower
    learning rate, at most ``collapse.max_rollbacks`` times in the run's life.

    Raises:
        Exception: The error that ended the last attempt.
    """
    run_dir = Path(config.runner.run_dir)
    store = open_store(config)
    rollbacks = run_dir / ROLLBACKS_FILE
    if config.runner.resume != "auto":
        rollbacks.unlink(missing_ok=True)
    # Where the next attempt resumes.
    how = config.runner.resume
    restarts = 0
    saved: Manifest | None = None
    raised: _Raised | None = None
    while True:
        try:
            yield from attempt(_with_lower_lr(_resuming(config, how), rollbacks))
            return
        except COMPONENT_FAILURES as error:
            newest = _newest_complete(store)
            restarts = restarts + 1 if newest == saved else 1
            saved = newest
            before, raised = raised, _Raised.of(error, run_dir)
            if raised is not None and raised == before:
                _notify(run_dir, "a part failed", "no restart", str(error), raised.describe())
                raise
            if restarts > config.runner.max_restarts:
                raise
            choice = f"restart {restarts} of runner.max_restarts={config.runner.max_restarts}"
            how = _next_resume(config, store)
            redone = _redone(_last_step(run_dir) + 1, newest, how)
            _notify(run_dir, "a part failed", choice, str(error), redone)
        except RollBack as collapse:
            how = _roll_back(config, store, collapse, rollbacks)
        # Free the attempt's objects: its processes have ended, its memory may be large.
        gc.collect()


@dataclasses.dataclass(frozen=True)
class _Raised:
    """Error of a component, and its step: the same error again means that a restart does
    not help."""

    step: int
    error: str

    @classmethod
    def of(cls, error: BaseException, run_dir: Path) -> _Raised | None:
        """``None``: a process ended or hung, which a restart may fix."""
        if not isinstance(error, ComponentError) or not error.raised:
            return None
        return cls(_last_step(run_dir) + 1, str(error).split("\n")[0])

    def describe(self) -> str:
        return (
            f"step {self.step} failed again with the same error, so restarting would not help. Fix "
            "the cause, then resume with runner.resume=auto"
        )


def _last_step(run_dir: Path) -> int:
    return max((line["step"] for line in read_metrics(run_dir)), default=0)


def _newest_complete(store: CheckpointStore) -> Manifest | None:
    """Manifest of the checkpoint to resume from; a damaged one is skipped, and one that was
    made again is another."""
    path = store.newest_complete().path
    return None if path is None else read_manifest(path)


def _next_resume(config: Config, store: CheckpointStore) -> str:
    """``runner.resume`` of an attempt after the first. A run that began from another run's
    checkpoint begins from it again while it has none itself: a collapse may have taken all."""
    how = config.runner.resume
    is_another_runs = how not in ("auto", "never") and not store.owns(Path(how))
    return how if is_another_runs and not store.steps() else "auto"


def _resuming(config: Config, how: str) -> Config:
    runner = dataclasses.replace(config.runner, resume=how)
    return dataclasses.replace(config, runner=runner)


def _first_step(newest: Manifest | None, how: str) -> int:
    """First step of an attempt."""
    begins_from = newest if how == "auto" else read_manifest(Path(how))
    return 1 + (begins_from.step if begins_from else 0)


def _redone(last: int, newest: Manifest | None, how: str) -> str:
    """The steps that are repeated, up to the one that failed or showed the collapse."""
    first = _first_step(newest, how)
    steps = f"step {first} is" if last <= first else f"steps {first} to {last} are"
    own = f"the checkpoint of step {first - 1}" if first > 1 else "the beginning"
    return f"resumes from {own if how == 'auto' else how}; {steps} repeated"


def _with_lower_lr(config: Config, rollbacks: Path) -> Config:
    factor = _read(rollbacks)[-1]["lr_factor"] if _read(rollbacks) else 1.0
    if factor == 1.0:
        return config
    optimizer = config.actor.optimizer
    optimizer = dataclasses.replace(
        optimizer, lr=optimizer.lr * factor, min_lr=optimizer.min_lr * factor
    )
    print(
        f"learning rate {optimizer.lr:g}: {factor:g} of the settings' after {len(_read(rollbacks))}"
        f" rollbacks ({rollbacks})",
        flush=True,
    )
    return dataclasses.replace(config, actor=dataclasses.replace(config.actor, optimizer=optimizer))


def _roll_back(config: Config, store: CheckpointStore, collapse: RollBack, rollbacks: Path) -> str:
    """Put the checkpoints since the collapse aside, and note the lower learning rate. Returns where
    the next attempt resumes."""
    earlier = _read(rollbacks)
    if len(earlier) >= config.collapse.max_rollbacks:
        raise UserError(
            f"the run collapsed again after {len(earlier)} rollbacks (collapse.max_rollbacks): "
            f"{collapse.reason}. Checkpoints and metrics are in {config.runner.run_dir}."
        ) from None
    store.set_aside(newer_than=collapse.onset - 1)
    how = _next_resume(config, store)
    newest = _newest_complete(store)
    to = _first_step(newest, how) - 1
    factor = config.collapse.rollback_lr_factor * (earlier[-1]["lr_factor"] if earlier else 1.0)
    entry = {"step": collapse.step, "to": to, "lr_factor": factor, "reason": collapse.reason}
    with replacing(rollbacks) as file:
        file.write((json.dumps([*earlier, entry], indent=1) + "\n").encode())
    run_dir = rollbacks.parent
    choice = f"rollback {len(earlier) + 1}, learning rate times {factor:g}"
    _notify(run_dir, "collapse", choice, collapse.reason, _redone(collapse.step, newest, how))
    return how


def _read(rollbacks: Path) -> list[dict[str, Any]]:
    if not rollbacks.is_file():
        return []
    entries: list[dict[str, Any]] = json.loads(rollbacks.read_text(encoding="utf-8"))
    return entries


def _notify(run_dir: Path, what: str, choice: str, reason: str, redone: str) -> None:
    print(f"warning: {printable(reason)}\n{choice}: {redone}", file=sys.stderr, flush=True)
    line = {
        "step": _last_step(run_dir) + 1,
        "what": what,
        "choice": f"{choice}: {redone}",
        "reason": reason.split("\n")[0],
    }
    with (run_dir / DECISIONS_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{to_json(line)}\n")
