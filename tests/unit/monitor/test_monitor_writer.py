import html
import json
import math
import re
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from rlmath.monitor import MetricsWriter, read_metrics, set_aside, write_samples
from rlmath.monitor.samples import write_engines
from rlmath.monitor.trackers.tensorboard import as_markdown_code


def tensorboard(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def scalars(run_dir, tag):
    return [(event.step, event.value) for event in tensorboard(run_dir).Scalars(tag)]


def test_jsonl_and_tensorboard_have_the_metrics(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"eval/accuracy": 0.25})
        writer.write(1, {"rollout/rewards": -1.5, "rollout/accuracy": torch.tensor(0.5)})
        writer.write(3, {"rollout/rewards": 2})
        lines = read_metrics(tmp_path)  # Already there while the writer is open.
        assert scalars(tmp_path, "rollout/rewards") == [(1, -1.5), (3, 2.0)]
    assert [line.pop("step") for line in lines] == [0, 1, 3]
    assert all(line.pop("time_s") > 1.7e9 for line in lines)
    assert lines == [
        {"eval/accuracy": 0.25},
        {"rollout/rewards": -1.5, "rollout/accuracy": 0.5},
        {"rollout/rewards": 2.0},
    ]


def test_values_that_are_not_finite_keep_the_file_valid_json(tmp_path):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, values)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    content = json.loads(line, parse_constant=refuse)
    assert [content[tag] for tag in "abcd"] == [None, None, None, 1.0]
    assert content["not_finite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    assert math.isnan(scalars(tmp_path, "a")[0][1])


def test_a_resumed_run_drops_what_comes_after_its_checkpoint(tmp_path, group):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"x": float(step)})
            write_samples(tmp_path, step, [group])
        write_samples(tmp_path, 5, [group], kind="eval")
        write_engines(tmp_path, 5, {})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x": 6')  # The process was killed here.
    # TensorBoard reads its files in the order of their names, which begin with the second and end
    # with a count of the process, as text: 10 comes before 9.
    time.sleep(1 - time.time() % 1)
    with MetricsWriter(tmp_path, last_step=3) as writer:
        assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
        writer.write(4, {"x": 40.0})
    assert [(line["step"], line["x"]) for line in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert scalars(tmp_path, "x") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        f"step_00000{step}.jsonl" for step in (1, 2, 3)
    ]


def test_a_damaged_line_costs_no_other(tmp_path, capsys):
    lines = [f'{{"step": {step}, "x": {step}}}\n' for step in range(1, 6)]
    lines[1] = '{"step": 2, "\x00\x00\n'
    lines[3] = "[]\n"
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step"')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3, 5]
    said = capsys.readouterr().err.splitlines()
    assert [text.partition("metrics.jsonl, ")[2] for text in said] == [
        "line 2: damaged, and left out",
        "line 4: damaged, and left out",
    ]


def test_a_run_that_starts_over_sets_the_earlier_one_aside(tmp_path, group):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"x": 1.0})
        write_samples(tmp_path, 1, [group])
    (tmp_path / "decisions.jsonl").write_text("{}\n")
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"x": 5.0})
    assert not (tmp_path / "decisions.jsonl").exists()
    assert (tmp_path / "set_aside_1" / "decisions.jsonl").read_text() == "{}\n"
    assert [line["x"] for line in read_metrics(tmp_path)] == [5.0]
    assert scalars(tmp_path, "x") == [(0, 5.0)]
    assert not (tmp_path / "samples").exists()
    aside = tmp_path / "set_aside_1"
    assert [line["x"] for line in read_metrics(aside)] == [1.0]
    assert scalars(aside, "x") == [(1, 1.0)]
    assert [path.name for path in (aside / "samples").iterdir()] == ["step_000001.jsonl"]


def test_digests_of_a_step_that_was_not_logged_are_no_earlier_run(tmp_path):
    (tmp_path / "digests.jsonl").write_text('{"step": 50, "weights": "x"}\n')
    set_aside(tmp_path)
    assert not list(tmp_path.iterdir())


def test_steps_rise_and_metrics_are_numbers(tmp_path):
    with MetricsWriter(tmp_path, last_step=2) as writer:
        with pytest.raises(ValueError, match="step 2 comes after step 2"):
            writer.write(2, {})
        with pytest.raises(TypeError, match="metric 'x' is no number but 'high'"):
            writer.write(3, {"x": "high"})
        writer.write(3, {"x": True})
    assert [line["x"] for line in read_metrics(tmp_path)] == [1.0]


HOSTILE = "<script>alert(1)</script>\n# title\n\n* a & b\n```\n\n\t$x_1$ **c** [l](javascript:x)\n"


def visible_text(text):
    """Text as TensorBoard's reader sees it: its HTML with the markup taken off."""
    page = markdown_to_safe_html(as_markdown_code(text))
    match = re.fullmatch(r"<pre><code>(.*)</code></pre>", page, re.DOTALL)
    assert match, page
    assert "<" not in match.group(1)
    return html.unescape(match.group(1))


def test_texts_reach_tensorboard_as_data(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {}, texts={"rollout/sample_0": HOSTILE, "eval/sample_0": "plain"})
    events = tensorboard(tmp_path)
    assert set(events.Tags()["tensors"]) == {
        "rollout/sample_0/text_summary",
        "eval/sample_0/text_summary",
    }
    (event,) = events.Tensors("rollout/sample_0/text_summary")
    assert event.tensor_proto.string_val[0].decode() == as_markdown_code(HOSTILE)
    assert visible_text(HOSTILE).expandtabs(4).strip() == HOSTILE.expandtabs(4).strip()


@given(st.text("<>&\"'`*_#-[]()!\\{}$|~=+1. ab\n", min_size=1).filter(str.strip))
def test_no_markup_in_a_text_is_read(text):
    assert visible_text(text).split() == text.split()


def test_the_settings_are_in_tensorboard_as_text_and_hparams(tmp_path):
    from tensorboard.plugins.hparams import plugin_data_pb2

    values = {"actor.optimizer.lr": 1e-6, "algorithm.loss": "gspo", "data.train_paths": ["a"]}
    with MetricsWriter(tmp_path, last_step=4) as writer:
        writer.write_settings("algorithm:\n  loss: gspo\n", values, ["eval/accuracy"])
        writer.write(5, {"eval/accuracy": 0.5})
    events = tensorboard(tmp_path)
    (text,) = events.Tensors("settings/text_summary")
    assert b"loss: gspo" in text.tensor_proto.string_val[0]
    found = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(found).session_start_info.hparams
    assert hparams["actor.optimizer.lr"].number_value == 1e-6
    assert hparams["algorithm.loss"].string_value == "gspo"
    assert "data.train_paths" not in hparams
    # In the run's own folder: TensorBoard would show another one as another run.
    assert [path.name for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()] == []
    assert scalars(tmp_path, "eval/accuracy") == [(5, 0.5)]
