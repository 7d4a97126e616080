import time

import pytest

from rlmath.monitor import PhaseTimer


def test_phases_and_other_add_up_to_the_step():
    entered = []
    timer = PhaseTimer(entered.append)
    with timer("generate"):
        time.sleep(0.03)
        with timer("grade"):
            time.sleep(0.02)
    time.sleep(0.01)
    with timer("generate"):
        time.sleep(0.01)
    metrics = timer.finish_step()
    assert entered == ["generate", "grade", "generate", "generate"]
    assert set(metrics) == {"timing/generate", "timing/grade", "timing/other", "timing/step"}
    assert metrics["timing/generate"] >= 0.04
    assert metrics["timing/grade"] >= 0.02
    assert metrics["timing/other"] >= 0.01
    parts = sum(metrics.values()) - metrics["timing/step"]
    assert parts == pytest.approx(metrics["timing/step"], rel=1e-9)


def test_a_step_begins_where_the_last_ended():
    timer = PhaseTimer()
    with timer("generate"):
        pass
    timer.finish_step()
    time.sleep(0.01)
    metrics = timer.finish_step()
    assert set(metrics) == {"timing/other", "timing/step"}
    assert metrics["timing/other"] == metrics["timing/step"] >= 0.01


def test_an_error_ends_its_phase():
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer("update"):
        raise KeyError("x")
    assert "timing/update" in timer.finish_step()


def test_a_step_cannot_end_within_a_phase():
    timer = PhaseTimer()
    with timer("update"), pytest.raises(RuntimeError, match="within the phase 'update'"):
        timer.finish_step()


def test_a_pause_is_in_no_phase_and_counts_as_progress(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    timer = PhaseTimer()
    with timer.pause():
        first = timer.changes
        assert timer.changes > first  # The watchdog sees nothing stall.
        clock[0] += 3600
    seen = timer.changes
    assert timer.changes == seen
    with timer("update"):
        clock[0] += 1
    times = timer.finish_step()
    assert times == {"timing/update": 1.0, "timing/other": 0.0, "timing/step": 1.0}
