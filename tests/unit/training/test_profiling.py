import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private.runtime_env.nsight import parse_nsight_config

from rlmath.cluster.nsys import under_nsys
from rlmath.config.load import load
from rlmath.config.profile import ProfileTool
from rlmath.engines.requests import EngineError
from rlmath.errors import UpdateStopped
from rlmath.training.profiling import profile_step


class Parts:
    """Ranks and engines that note what is asked of them."""

    def __init__(self, folder, fails=False):
        self.events = []
        self.folder, self.fails = folder, fails
        self.spec = SimpleNamespace(profile=object())

    def begin_profile(self, *arguments):
        self.events.append(("begin", *arguments))
        if len(arguments) == 1 and self.fails:
            raise EngineError("engine 0 failed")

    def end_profile(self, after_failure=False):
        self.events.append("abandon" if after_failure else "end")
        (self.folder / "profile" / "step_000005_engine_0_rank0.1.json.gz").touch()
        return ["rank 1: disk full"]

    def ask(self, method, *arguments):
        return getattr(self, method.__name__)(*arguments)

    def warn(self, message):
        self.events.append(message)


def run_of(folder, parts):
    config = load(["model.path=m", f"runner.run_dir={folder}", "runner.profile.steps=[5]"])
    return SimpleNamespace(config=config, actor=parts, sampling=SimpleNamespace(pool=parts))


def test_only_named_steps_are_profiled(tmp_path):
    parts = Parts(tmp_path)
    run, folder = run_of(tmp_path, parts), tmp_path / "profile" / "step_000005"
    for step in (1, 4, 6, 50):
        with profile_step(run, parts, step):
            pass
    assert parts.events == [] and not folder.exists()
    folder.mkdir(parents=True)
    # A profile of the step before a restart.
    (folder / "rank_7.json.gz").touch()
    (folder.parent / "step_000005_engine_1_rank0.0.json.gz").touch()
    with profile_step(run, parts, 5):
        parts.events.append("step")
    begin = [("begin", ProfileTool.torch, folder), ("begin", "step_000005")]
    warning = "step 5: its trace was not written: rank 1: disk full"
    assert parts.events == [*begin, "step", "end", "end", warning]
    assert [file.name for file in folder.iterdir()] == ["engine_0_rank0.1.json.gz"]


def test_a_failing_step_leaves_no_profiler_on(tmp_path):
    parts = Parts(tmp_path)
    run = run_of(tmp_path, parts)
    with pytest.raises(ValueError, match="of the step"), profile_step(run, parts, 5):
        raise ValueError("of the step")
    assert parts.events[-1] == "abandon" and "end" not in parts.events


@pytest.mark.parametrize("error", [UpdateStopped, KeyboardInterrupt])
def test_ending_run_does_not_wait_for_a_trace(tmp_path, error):
    parts = Parts(tmp_path)
    run = run_of(tmp_path, parts)
    with pytest.raises(error), profile_step(run, parts, 5):
        raise error
    assert [one[0] for one in parts.events] == ["begin", "begin"]


def test_an_engine_that_cannot_be_profiled_stops_no_run(tmp_path):
    parts = Parts(tmp_path, fails=True)
    with profile_step(run_of(tmp_path, parts), parts, 5):
        pass
    assert "step 5: the engines are not profiled: engine 0 failed" in parts.events


def test_nsys_is_called_with_a_path_that_a_shell_leaves_alone(tmp_path):
    """Ray joins the words with spaces."""
    environment = under_nsys(tmp_path / "my run's" / "rank_0", {"A": "1"})
    words = shlex.split(" ".join(parse_nsight_config(environment["nsight"])))
    assert words[:2] == ["nsys", "profile"]
    assert f"{tmp_path}/my run's/rank_0_%p" in words
    assert "--capture-range=cudaProfilerApi" in words and "--capture-range-end=repeat" in words
    # An absolute path takes the place of Ray's own folder.
    assert Path("/ray/logs") / environment["nsight"]["o"] == Path(environment["nsight"]["o"])
    assert environment["env_vars"]["A"] == "1"
