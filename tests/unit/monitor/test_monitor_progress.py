import io
import json
import math
import time

import pytest
from rich.console import Console

from rlmath.monitor import MetricsWriter, ProgressDisplay, plot_curves
from rlmath.monitor.curves import PANELS
from rlmath.monitor.progress import step_line
from rlmath.monitor.run_settings import ATTEMPTS_FILE

METRICS = {
    "rollout/rewards": 1.5,
    "rollout/accuracy": 0.65,
    "throughput/tokens_per_s": 9123.4,
    "timing/step": 2.31,
    "train/grad_norm": 0.3,
}


def display(terminal, width=100, **arguments):
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, soft_wrap=True
    )
    return ProgressDisplay(20, console=console, **arguments), console.file


def test_without_a_terminal_each_step_is_one_line():
    progress, output = display(terminal=False, width=40)
    with progress:
        progress.phase("evaluate")
        progress.step(0, {"eval/accuracy": 0.5})
        progress.phase("generate")
        progress.phase("generate")
        progress.step(1, METRICS)
        progress.step(2, {**METRICS, "eval/accuracy": 0.7})
        progress.phase("generate")
    evaluation, zero, started, first, second = output.getvalue().splitlines()
    assert evaluation.endswith(" s  evaluate")
    assert zero.startswith("step  0/20  held-out 0.500")
    # The phases up to the first step, and of no other. What it compiles is in no figure.
    assert started.startswith("step 1 ") and " s  generate  (the first step also comp" in started
    assert first == "step  1/20  reward +1.50  accuracy 0.650  2.3 s"
    assert "held-out 0.700" in second and "tokens/s 9123  2.3 s  left " in second


def test_log_probs_of_the_first_step_are_no_part_of_the_start():
    progress, output = display(terminal=False, first_step=7)
    with progress:
        for phase in ("generate", "log_probs", "generate"):
            progress.phase(phase)
        progress.step(7, METRICS)
    shown = output.getvalue().splitlines()
    assert shown[1].startswith("step 7 ") and shown[1].endswith(" s  log-probs of the actor")
    assert len(shown) == 3


def test_time_left_is_without_the_first_step_and_what_is_before_it(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    progress, _ = display(terminal=False)
    for step, at in ((0, 50.0), (1, 500.0), (2, 510.0), (3, 520.0)):
        now[0] = at
        progress.step(step, {})
        assert math.isnan(progress.seconds_left()) == (step < 2)
    assert progress.seconds_left() == pytest.approx(10 * 17)


def test_a_step_that_samples_nothing_says_so():
    """Dynamic sampling that asks for more than it needs leaves groups for whole steps."""
    metrics = {"sampling/requested_groups": 0.0, "sampling/trained_groups": 32.0}
    line = step_line(2, 4, metrics, 1.9, 6.0)
    assert line == "step 2/4  32 groups sampled before  1.9 s  left 6 s"
    # Where engines are a step ahead, groups that were asked for before come in.
    assert "before" not in step_line(2, 4, {**metrics, "rollout/rewards": 1.0}, 1.9, 6.0)


def test_a_terminal_has_a_line_per_step_that_stays_and_a_bar():
    progress, output = display(terminal=True)
    with progress:
        progress.step(1, {**METRICS, "eval/accuracy": 0.7})
        progress.step(2, METRICS)
        progress.phase("weight_sync")
        progress._live.refresh()
        shown = output.getvalue()
        progress._console.print("a message")
    lines = [line for line in shown.splitlines() if "reward +1.50" in line]
    assert len(lines) == 2, "each step's line is printed once and stays"
    assert "held-out 0.700" in lines[0]
    assert "tokens/s 9123" in lines[1]
    bar = shown[shown.rindex("step 2/20") :]
    assert "weight_sync" in bar
    assert "reward" not in bar
    assert "a message" in output.getvalue()
    assert "done" in output.getvalue()


def test_an_evaluation_counts_no_steps():
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100, soft_wrap=True)
        with ProgressDisplay(0, console=console) as progress:
            progress.phase("evaluate")
            progress.step(0, {"eval/accuracy": 0.5, "timing/step": 3.0})
        shown = console.file.getvalue()
        assert "held-out 0.500  3.0 s" in shown
        assert "0/0" not in shown
        assert "left" not in shown


def test_time_left_is_the_mean_of_the_last_ten_steps():
    progress, _ = display(terminal=False, first_step=5)
    assert math.isnan(progress.seconds_left())
    progress._ends.clear()
    progress._ends.extend([0.0, *(100.0 + 2 * step for step in range(10))])
    progress._ends.append(120.0)
    progress._done = 15
    assert progress.seconds_left() == pytest.approx((120 - 100) / 10 * 5)


def test_a_long_phase_says_how_far_it_is(monkeypatch):
    """In a terminal on the bar; elsewhere a line now and then."""
    from rlmath.monitor import progress as module
    from rlmath.monitor.sampling import SamplingProgress

    def sampling():
        return SamplingProgress(done=30, wanted=32, tokens=500, unfinished=(0, 2))

    progress, output = display(terminal=True, sampling=sampling)
    with progress:
        progress.phase("generate")
        progress._live.refresh()
        assert "30/32 samples, engine 1 has 2 of the last 2" in output.getvalue()
        progress.phase("update")
    monkeypatch.setattr(module, "REPORT_S", 0.02)
    progress, output = display(terminal=False, sampling=sampling)
    with progress:
        progress.step(3, METRICS)
        progress.phase("generate")
        deadline = time.monotonic() + 20
        while "30/32" not in output.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "step 4/20  generate  30/32 samples" in output.getvalue()


@pytest.fixture(scope="module")
def read_png():
    from matplotlib.image import imread

    return imread


def test_a_whole_run_is_drawn(tmp_path, read_png):
    tags = [tag for panel in PANELS for tag, _ in panel.series]
    tags += [panel.right[0] for panel in PANELS if panel.right]
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 31):
            values = dict.fromkeys(tags, 1.0 + step / 100)
            phases = {f"timing/{phase}": 0.5 for phase in ("generate", "update", "other")}
            writer.write(step, {**values, **phases, "timing/step": 1.5})
    picture = read_png(plot_curves(tmp_path))
    height, width, _ = picture.shape
    assert width > 1000 and height > 1000
    columns = [picture[:, : width // 2], picture[:, width // 2 :]]
    rows = [
        part[at : at + height // 4] for part in columns for at in range(0, height - 4, height // 4)
    ]
    # Eight panels, and in each something is drawn.
    assert len(rows) == 8
    assert all((part[..., :3].min(axis=-1) < 0.5).sum() > 500 for part in rows)


def test_a_run_without_metrics_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no metrics to draw"):
        plot_curves(tmp_path)
    assert not (tmp_path / "curves.png").exists()


def test_a_resume_and_the_standard_error_are_drawn(tmp_path, read_png):
    def picture(*resumed_after, **more):
        lines = [{"after_step": step, "config": "-"} for step in resumed_after]
        (tmp_path / ATTEMPTS_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        with MetricsWriter(tmp_path) as writer:
            for step in range(1, 11):
                writer.write(step, {"rollout/rewards": step / 10, **more})
        return read_png(plot_curves(tmp_path))

    plain = picture()
    assert (plain != picture(5)).any()
    assert (plain != picture(**{"rollout/rewards_standard_error": 0.1})).any()
