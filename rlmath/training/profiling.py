from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rlmath.engines.protocol import Engine
from rlmath.errors import ComponentError, UpdateStopped
from rlmath.monitor import Monitor
from rlmath.training.opening import Running
from rlmath.training.rank_settings import profile_folder


@contextlib.contextmanager
def profile_step(run: Running, monitor: Monitor, step: int) -> Iterator[None]:
    """Profile this block on all ranks and engines, if ``runner.profile`` names the step.

    A trace that cannot be written is a warning. If the block fails, ranks that still answer write
    theirs. A run that has been asked to end writes none.
    """
    profile = run.config.runner.profile
    if step not in profile.steps:
        yield
        return
    folder, pool = profile_folder(run.config) / f"step_{step:06d}", run.sampling.pool
    shutil.rmtree(folder, ignore_errors=True)  # From before a restart.
    folder.mkdir(parents=True)
    for file in _of_engines(folder):
        file.unlink()

    def on_engines(call: Callable[[], object]) -> None:
        if pool.spec.profile is None:
            return
        try:
            call()
        except ComponentError as error:  # For example a restart.
            monitor.warn(f"step {step}: the engines are not profiled: {error}")

    run.actor.begin_profile(profile.tool, folder)
    on_engines(lambda: pool.ask(Engine.begin_profile, folder.name))
    try:
        yield
    except UpdateStopped:
        raise
    except Exception:
        run.actor.end_profile(after_failure=True)
        raise
    on_engines(lambda: pool.ask(Engine.end_profile))
    for file in _of_engines(folder):
        file.rename(folder / file.name.removeprefix(f"{folder.name}_"))
    for problem in run.actor.end_profile():
        monitor.warn(f"step {step}: its trace was not written: {problem}")
    print(f"profile  step {step}: {folder.parent}", flush=True)


def _of_engines(folder: Path) -> list[Path]:
    """Traces that vLLM has written of a step, in one folder."""
    return sorted(folder.parent.glob(f"{folder.name}_*"))
