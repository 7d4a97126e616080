import io
import math

import pytest
from rich.console import Console

from rlmath.monitor import ProgressDisplay
from rlmath.monitor.progress import duration

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
        progress.phase("generate")
        progress.step(1, METRICS)
        progress.step(2, {**METRICS, "eval/accuracy": 0.7})
    first, second = output.getvalue().splitlines()
    assert first.startswith("step  1/20  reward +1.50  accuracy 0.650  tokens/s 9123  2.3 s  left ")
    assert "held-out 0.700" in second


def test_a_terminal_shows_phase_step_and_metrics():
    progress, output = display(terminal=True)
    with progress:
        progress.step(1, {**METRICS, "eval/accuracy": 0.7})
        progress.step(2, METRICS)
        progress.phase("weight_sync")
        progress._live.refresh()
        shown = output.getvalue()
        progress._console.print("a message")
    assert "step 2/20" in shown and "weight_sync" in shown
    assert "reward +1.50" in shown and "tokens/s 9123" in shown
    assert "held-out 0.700" in shown  # The last evaluation stays in view.
    assert "a message" in output.getvalue()
    assert "done" in output.getvalue()


def test_an_interrupted_run_is_shown_as_stopped():
    progress, output = display(terminal=True)
    with pytest.raises(KeyboardInterrupt), progress:
        raise KeyboardInterrupt
    assert "stopped" in output.getvalue()


def test_time_left_is_the_mean_of_the_last_ten_steps():
    progress, _ = display(terminal=False, first_step=5)
    assert math.isnan(progress.seconds_left())
    progress._ends.clear()
    progress._ends.extend([0.0, *(100.0 + 2 * step for step in range(10))])
    progress._ends.append(120.0)
    progress._done = 15
    assert progress.seconds_left() == pytest.approx((120 - 100) / 10 * 5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (float("nan"), "?"),
        (0.2, "0s"),
        (59.4, "59s"),
        (60, "1:00"),
        (185, "3:05"),
        (7385, "2:03:05"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
