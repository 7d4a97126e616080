import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlmath.config.schema import RunnerConfig
from rlmath.monitor import open_monitor, read_metrics, read_samples


def test_unwritable_monitor_files_warn_and_end_no_run(tmp_path, group, capsys):
    (tmp_path / "samples").write_text("not a folder")
    (tmp_path / "decisions.jsonl").mkdir()
    with open_monitor(tmp_path, RunnerConfig(), total_steps=2) as monitor:
        for step in (1, 2):
            monitor.log_samples(step, [group])
            monitor.note(step, "what", "a choice", "why")
            monitor.log_step(step, {"a": 1.0})
    said = capsys.readouterr().err
    assert said.count("warning: not written: ") == 6 and "decisions.jsonl" in said
    assert len((tmp_path / "warnings.jsonl").read_text().splitlines()) == 6
    # The run's metrics are there.
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_digests_alone_are_limited_too(tmp_path):
    with open_monitor(tmp_path, RunnerConfig(samples_keep_gib=1e-6), total_steps=100) as monitor:
        (tmp_path / "samples").mkdir(exist_ok=True)
        for step in range(1, 100):
            (tmp_path / "samples" / f"step_{step:06d}.digests.json").write_text("{}" * 50)
        for step in (99, 100):
            monitor.log_step(step, {})
    left = sorted(int(path.name[5:11]) for path in (tmp_path / "samples").iterdir())
    assert left == list(range(90, 100))


def test_files_of_samples_are_limited(tmp_path, group):
    runner = RunnerConfig(samples_keep_gib=1e-9)
    with open_monitor(tmp_path, runner, total_steps=2) as monitor:
        for step in (1, 2):
            monitor.log_samples(step, [group], engines={"seconds": 2.0, "engines": []})
            monitor.log_step(step, {})
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "step_000002.digests.json",
        "step_000002.engines.json",
        "step_000002.jsonl",
    ]
    written = json.loads((tmp_path / "samples" / "step_000002.engines.json").read_text())
    assert written == {"step": 2, "seconds": 2.0, "engines": []}


def test_a_step_leaves_metrics_timings_samples_and_texts(tmp_path, group, capsys):
    runner = RunnerConfig(run_dir=str(tmp_path), tensorboard_samples=1)
    with open_monitor(tmp_path, runner, total_steps=2) as monitor:
        monitor.begin_step()
        monitor.log_samples(0, [group], kind="eval")
        monitor.log_step(0, {"eval/accuracy": 0.5})
        for step in (1, 2):
            with monitor.phase("generate"):
                monitor.log_samples(step, [group, group])
            monitor.count_tokens(30)
            written = monitor.log_step(step, {"rollout/rewards": 1.0})
        monitor.warn("look at this")
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert json.loads(json.dumps(written)).items() <= lines[2].items()
    assert set(written) == {
        "rollout/rewards",
        "timing/generate",
        "timing/other",
        "timing/step",
        "throughput/tokens_per_s",
    }
    assert written["throughput/tokens_per_s"] == 30 / written["timing/step"]
    assert "throughput/tokens_per_s" not in lines[0]
    files = {
        path.name: len(list(read_samples(path))) for path in (tmp_path / "samples").glob("*.jsonl")
    }
    assert files == {"eval_000000.jsonl": 2, "step_000001.jsonl": 4, "step_000002.jsonl": 4}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    texts = {tag: [e.step for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    assert texts == {"eval/sample_0/text_summary": [0], "rollout/sample_0/text_summary": [1, 2]}
    output = capsys.readouterr()
    assert output.out.splitlines()[-1].startswith("step 2/2  reward +1.00")
    assert output.err == "warning: look at this\n"
    (warning,) = map(json.loads, (tmp_path / "warnings.jsonl").read_text().splitlines())
    assert (warning["step"], warning["message"]) == (3, "look at this")
