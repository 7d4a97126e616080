"""Runs as the monitor writes them, without a model."""

import pytest

from rlmath.checks import attempts
from rlmath.config.load import load, save
from rlmath.monitor import open_monitor, update_summary
from rlmath.monitor.digests import sample_key
from rlmath.monitor.token_files import write_tokens
from rlmath.training.supervise import _notify
from rlmath.training.token_traces import traced_places
from tests.unit.commands.report.run_maker import HOSTILE, STEPS, group, in_turns, trace


@pytest.fixture(scope="session")
def make_run():
    """A function that writes a run's folder."""

    def make(folder, *overrides, steps=STEPS, skill=0):
        settings = ["experiment=quickstart", f"runner.run_dir={folder}", f"runner.steps={STEPS}"]
        settings += ["model.path=tiny", "runner.token_samples=1"]
        config = load([*settings, *overrides])
        folder.mkdir(parents=True, exist_ok=True)
        attempts.record(config, 0)
        save(config, folder / "config.yaml")
        with open_monitor(folder, config.runner, STEPS) as monitor:
            for step in range(steps + 1):
                metrics = {}
                if step % 2 == 0:
                    right = 5.0 if step + skill > 2 else -5.0
                    held_out = group("eval.jsonl:0", [right], [r"\boxed{2}"], step)
                    monitor.log_samples(step, [held_out], kind="eval")
                    metrics |= {"eval/accuracy": right / 10 + 0.5}
                if step:
                    hostile = HOSTILE[:3] if step % 2 else HOSTILE[3:]
                    groups = [
                        group("train.jsonl:0", [5.0, -5.0, None], list(hostile), step),
                        group("train.jsonl:1", [-5.0, -5.0, -5.0], ["1", "3", "4"], step),
                        group(f"train.jsonl:{step + 1}", [5.0, 5.0, 5.0], ["2", "2", "2"], step),
                    ]
                    if step == 4:
                        groups[2] = in_turns(groups[2])
                    dropped = {"train.jsonl:1": "equal_rewards"}
                    monitor.log_samples(step, groups, dropped=dropped)
                    firsts = [one.samples[0] for one in groups]
                    places = traced_places([sample_key(one) for one in firsts], 1)
                    # A run that knows no traces is shown as well.
                    shown = [trace(firsts[place]) for place in places if step > 1]
                    write_tokens(folder, step, shown)
                    metrics |= {
                        "rollout/rewards": float(step),
                        "rollout/rewards_standard_error": 0.5,
                        "rollout/engine_restarts": float(step == 3),
                        "train/early_stopped_minibatches": float(step == 2),
                        "train/loss": float("nan") if step == 3 else 0.1,
                    }
                    monitor.note(step, "algorithm.correction.kind", "none", "no mismatch")
                if step == 3:
                    _notify(
                        folder, "a part failed", "restart 1", "rank 1 ended", "step 3 is repeated"
                    )
                    monitor.warn("step 3: <i>odd</i>")
                if step == 2:
                    reason = "entropy_low: since step 1 <b>low</b>"
                    monitor.note(step, "collapse.entropy_low", "warn", reason)
                with monitor.phase("generate"), monitor.phase("grade"):
                    pass
                monitor.log_step(step, metrics)
        if steps == STEPS:
            update_summary(folder, {"steps": STEPS})
        return folder

    return make


@pytest.fixture(scope="session")
def run_dir(make_run, tmp_path_factory):
    """A finished run; tests only read it."""
    return make_run(tmp_path_factory.mktemp("report") / "first")
