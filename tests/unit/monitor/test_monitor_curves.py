import json

import pytest

from rlmath.monitor import MetricsWriter, plot_curves
from rlmath.monitor.curves import PANELS
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
