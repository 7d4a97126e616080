import json

import pytest

from rlmath.monitor import MetricsWriter, plot_curves
from rlmath.monitor.curves import PANELS, _phase_color, _widen, panels_of
from rlmath.monitor.run_settings import ATTEMPTS_FILE


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


def test_panels_without_values_are_left_out(tmp_path, read_png):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"rollout/rewards": 1.0, "train/grad_norm": float("nan")})
    alone = read_png(plot_curves(tmp_path, title="A run"))
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"rollout/rewards": 1.0, "train/grad_norm": 2.0, "timing/generate": 3.0})
    assert read_png(plot_curves(tmp_path)).shape[0] > 1.5 * alone.shape[0]


def test_a_run_without_metrics_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no metrics to draw"):
        plot_curves(tmp_path)
    assert not (tmp_path / "curves.png").exists()


def test_each_of_several_rewards_is_drawn():
    lines = [
        {"step": 1, "rewards/math/mean": 1.0, "rewards/mine/mean": 0.2, "rewards/total/mean": 1}
    ]
    (panel,) = [one for one in panels_of(lines) if one.title == "Rewards"]
    assert panel.series == (("rewards/math/mean", "math"), ("rewards/mine/mean", "mine"))
    del lines[0]["rewards/mine/mean"]
    assert panels_of(lines) == list(PANELS), "one reward is the total"


def test_noise_does_not_fill_an_axis():
    from matplotlib.figure import Figure

    panels = {panel.title: panel for panel in PANELS}

    def limits(title, values):
        ax = Figure().add_subplot()
        ax.plot(range(len(values)), values)
        _widen(ax, panels[title])
        return ax.get_ylim()

    low, high = limits("Entropy", [0.7, 0.7003, 0.6998])
    assert high - low == pytest.approx(0.1)
    assert low < 0.7 < high
    low, high = limits("Entropy", [0.9, 0.2])
    assert high - low < 0.8, "a signal keeps its own range"
    low, high = limits("Response length", [1000.0, 1001.0])
    assert high - low == pytest.approx(200, rel=0.05)
    low, high = limits("Importance ratio", [1.0, 1.0 + 1e-6])
    assert high - low == pytest.approx(0.01)


def test_a_phase_has_one_color_in_every_run():
    names = ("generate", "update", "log_probs", "grade", "evaluate", "weight_sync", "save")
    colors = [_phase_color(name) for name in (*names, "other")]
    assert len(set(colors)) == len(colors)


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
