"""The state that a resume continues, and its changes; see ``rlmath/monitor/run_settings.py``.

``config.yaml`` in a run's folder has the settings as given to the last start that began a step.
Each such start adds a line to ``attempts.jsonl`` with the step after which it began, and keeps its
settings under ``configs/``. Plain files, read without torch.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmath.checkpoint.manifest import MANIFEST
from rlmath.checkpoint.store import STEP_NAME
from rlmath.checks.inputs import contents, input_files
from rlmath.checks.made_with import software_versions
from rlmath.config.load import save, to_plain
from rlmath.config.schema import Config
from rlmath.model.folder import TINY
from rlmath.model.hub import hub_name
from rlmath.monitor.files import json_objects
from rlmath.monitor.run_settings import (
    ATTEMPTS_FILE,
    CONFIG_FILE,
    NOT_COMPARED,
    SFT_CONFIG_FILE,
    SFT_EXPORTED_FILE,
    Change,
    attempt_of,
    attempts,
    differing,
    flat,
    settings_in,
)

CONFIGS_FOLDER = "configs"
# A run that changes one of these is another experiment: refused on resume unless accepted.
GUARDED = ("model.path", "algorithm", "reward", "teacher.path", "plugins", "plugin_hashes")
# Settings of these sections that decide how fast rewards come, not which.
_UNGUARDED = ("reward.num_workers", "reward.timeout_s", "reward.workers_on")


@dataclass(frozen=True)
class _Loop:
    """Place in the run's folder that a command continues from."""

    config_file: str
    checkpoints: str
    exported: str
    guarded: tuple[str, ...]


LOOPS = {
    "train": _Loop(CONFIG_FILE, "checkpoints", "exported.json", GUARDED),
    "sft": _Loop(SFT_CONFIG_FILE, "sft_checkpoints", SFT_EXPORTED_FILE, ("model.path",)),
}


@dataclass(frozen=True)
class Continuation:
    checkpoint: Path  # The newest; the run continues after it.
    step: int
    steps: int  # Target number of steps, by setting.
    setting: str  # The key of the number of steps.
    # Settings and files that differ from those of the checkpoint's steps.
    changes: tuple[Change, ...]
    exported: bool  # The run has written the final model of this step.

    @property
    def finished(self) -> bool:
        """All steps are done and the final model is written: there is nothing to start."""
        return self.step >= self.steps and self.exported

    def describe(self) -> str:
        if self.finished:
            return (
                f"resume   already at step {self.step} of {self.steps}; raise {self.setting} to "
                "train on, or set runner.resume=never to start over"
            )
        lines = [f"resume   continues after step {self.step} of {self.steps}"]
        lines += [f"         changed {change}" for change in self.changes]
        return "\n".join(lines)


def continuation(config: Config, command: str = "train") -> Continuation | None:
    """The checkpoint that is continued; ``None``: the run starts from the beginning.

    The newest checkpoint is found by name; whether it is complete is checked when it is read.
    """
    runner, loop = config.runner, LOOPS.get(command)
    saves = command == "train" or config.sft.save_every
    if loop is None or not saves or runner.resume == "never":
        return None
    run_dir = Path(runner.run_dir)
    if runner.resume == "auto":
        step, source = newest_step(run_dir / loop.checkpoints), run_dir
        checkpoint = run_dir / loop.checkpoints / f"step_{step:06d}"
    else:
        checkpoint = Path(runner.resume).absolute()
        match = STEP_NAME.fullmatch(checkpoint.name)
        step, source = int(match[1]) if match else 0, checkpoint.parent.parent
    if not step:
        return None
    exported = _exported_step(run_dir / loop.exported) == step and runner.resume == "auto"
    steps, setting = (
        (config.sft.steps, "sft.steps") if command == "sft" else (runner.steps, "runner.steps")
    )
    file = source / loop.config_file
    saved: Mapping[str, Any] = settings_in(file) if file.is_file() else {}
    tried = attempts(source) if command == "train" else []
    # A later start may have been ended in its first step.
    if tried and (trained := attempt_of(tried, step)) is not tried[-1]:
        saved = trained.settings
    found = [*changes(saved, config)]
    if tried and (files := attempt_of(tried, step).files):
        found += differing(files, contents(input_files(config)))
    return Continuation(checkpoint, step, steps, setting, tuple(found), exported)


def newest_step(checkpoints: Path) -> int:
    """Step of the newest checkpoint in a folder of them, by name; 0: there is none."""
    if not checkpoints.is_dir():
        return 0
    matches = (STEP_NAME.fullmatch(path.name) for path in checkpoints.iterdir())
    found = [m for m in matches if m is not None and (checkpoints / m.string / MANIFEST).is_file()]
    return max((int(match[1]) for match in found), default=0)


def changes(saved: Mapping[str, Any], config: Config) -> Iterator[Change]:
    """Settings that differ from saved ones, which are nested as in YAML.

    Keys that only one side knows are left out: they are options of another loss.
    """
    before = flat(saved)
    now = flat_settings(config)
    own_model = str(Path(config.runner.run_dir) / "model")
    for key in now:
        if key not in before or key in NOT_COMPARED or _within(key, ("plugin_hashes",)):
            continue
        old, new = before[key], now[key]
        if key == "model.path":
            old, new = (own_model if path == TINY else path for path in (old, new))
        if key in ("model.path", "runner.run_dir") and _same_path(old, new):
            continue
        if old != new:
            yield Change(key, old, new)
    yield from _source_changes(saved.get("plugin_hashes") or {}, config.plugin_hashes)


def _source_changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    """Source files of plug-ins that differ, were added or are gone. A run that had no plug-ins, or
    has none now, differs in the settings that name them."""
    for name in sorted(before.keys() | now.keys()) if before and now else ():
        old, new = before.get(name), now.get(name)
        if old != new:
            yield Change(f"plugin_hashes.{name}", old, new)


def refusals(config: Config, command: str = "train") -> list[str]:
    """Messages for changes that make a resumed run another experiment and were not asked for.

    A checkpoint named by ``runner.resume`` is a decision; so is an entry of
    ``runner.accept_changes``, which names a setting or a section.
    """
    found = continuation(config, command)
    if found is None or config.runner.resume != "auto":
        return []
    accepted = config.runner.accept_changes
    guarded = [
        change
        for change in found.changes
        if _within(change.key, LOOPS[command].guarded)
        and change.key not in _UNGUARDED
        and not _within(change.key, accepted)
    ]
    if not guarded or found.finished:
        return []
    # Files have names that are no settings.
    named = ("plugin_hashes" if _within(one.key, ["plugin_hashes"]) else one.key for one in guarded)
    keys = ",".join(dict.fromkeys(named))
    listed = "; ".join(str(change) for change in guarded)
    return [
        f"runner.run_dir={config.runner.run_dir} holds a run at step {found.step} with other "
        f"settings: {listed}. Give another runner.run_dir for a new run, runner.resume=never to "
        f"start over there, or runner.accept_changes=[{keys}] to continue with the new values"
    ]


def record(
    config: Config, after_step: int, begins: bool = False, given: Config | None = None
) -> None:
    """Note that a start of the training loop begins its first step, and with which settings.

    Args:
        begins: A run begins with it, also where it continues another one's checkpoint: records of
            earlier starts in the folder are of another run.
        given: As the user gave them; a restart may have changed some. ``None``: as ``config``.
    """
    run_dir = Path(config.runner.run_dir)
    save(given or config, run_dir / CONFIG_FILE)
    forget_export(run_dir)
    file = run_dir / ATTEMPTS_FILE
    lines = list(json_objects(file))
    name = f"{CONFIGS_FOLDER}/attempt_{len(lines) + 1:03d}.yaml"
    save(config, run_dir / name)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = {
        "after_step": after_step,
        "begins": begins,
        "config": name,
        "started": started,
        "made_with": software_versions(),
        "files": contents(input_files(config)),
    }
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def note_export(run_dir: Path, step: int, command: str = "train") -> None:
    """The final model of a step is written, with all that belongs to it."""
    text = json.dumps({"step": step}) + "\n"
    (run_dir / LOOPS[command].exported).write_text(text, encoding="utf-8")


def forget_export(run_dir: Path, command: str = "train") -> None:
    """Forget the exported model at a start of the loop, since it belongs to an earlier start.

    Otherwise a longer run that is interrupted in its export would count as finished.
    """
    (run_dir / LOOPS[command].exported).unlink(missing_ok=True)


def _exported_step(file: Path) -> int | None:
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def flat_settings(config: Config) -> dict[str, Any]:
    return flat(to_plain(config))


def _within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def _same_path(one: Any, other: Any) -> bool:
    """The same folder, or the same revision of a model in two caches of the hub."""
    first, second = Path(str(one)).absolute(), Path(str(other)).absolute()
    in_hub = hub_name(first) is not None and hub_name(first) == hub_name(second)
    return first == second or (in_hub and first.name == second.name)
