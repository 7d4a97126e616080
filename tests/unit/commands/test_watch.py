from rlmath.cli import main
from rlmath.commands.watch import POLL_S, in_progress, lines_after
from rlmath.config.load import load, save
from rlmath.monitor import open_monitor, update_summary
from rlmath.monitor.monitor import WARNINGS_FILE
from rlmath.monitor.run_folder import SFT_LOG, RunFolder
from rlmath.monitor.run_settings import CONFIG_FILE, SFT_CONFIG_FILE, SFT_EXPORTED_FILE
from rlmath.utils.run_lock import only_run_in


def make_steps(folder, first, last, warning=""):
    """Steps ``first`` to ``last`` of 14; what the monitor itself prints is not of the command."""
    config = load(["experiment=quickstart", f"runner.run_dir={folder}", "runner.steps=14"])
    folder.mkdir(exist_ok=True)
    save(config, folder / CONFIG_FILE)
    with open_monitor(
        folder, config.runner, 14, first - 1 if first > 1 else None, line_every=100
    ) as monitor:
        for step in range(first, last + 1):
            if warning:
                monitor.warn(warning)
            monitor.log_step(step, {"rollout/rewards": float(step)})
    if last == 14:
        update_summary(folder, {"steps": 14})


def test_a_run_is_followed_to_its_end(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    make_steps(folder, 1, 12)
    said: list[str] = []

    def wait(seconds):
        assert seconds == POLL_S
        said.extend(capsys.readouterr().out.splitlines())
        step = RunFolder(folder).last_step + 1
        make_steps(folder, step, step, "odd\x1b[2J")
        capsys.readouterr()

    monkeypatch.setattr("rlmath.commands.watch.time.sleep", wait)
    capsys.readouterr()
    with only_run_in(folder):
        assert main(["watch", str(folder)]) == 0
    said += capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said if line.startswith("step") and "reward" in line] == [
        f"{step}/14" for step in range(3, 15)
    ]
    assert [line.split()[0] for line in said[:4]] == ["learning", "health", "time", "step"]
    assert said[2].startswith("time     running: step 12 of 14;")
    assert said[3].startswith("step  3/14  reward +3.00")
    assert said[-1].startswith("time     finished: 14 steps")
    assert said[-2].startswith("health   warning: 2; the last, at step 14: odd")
    # The contents of a text do not move the cursor.
    assert [line for line in said if line.startswith("step") and "odd" in line] == [
        rf"step {step}: odd\x1b[2J" for step in (13, 14)
    ]


def test_a_run_that_has_ended(tmp_path, capsys):
    make_steps(tmp_path / "run", 1, 12)
    capsys.readouterr()
    assert main(["watch", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 13 and "ended or interrupted at step 12 of 14" in said[-1]
    assert main(["watch", str(tmp_path)]) == 2


def test_watch_shows_progress(tmp_path):
    make_steps(tmp_path / "run", 1, 3)
    files = RunFolder(tmp_path / "run")
    for at, line in enumerate(files.metrics):
        line["time_s"] = 1000.0 + 20 * at
    said = in_progress(files, 1100.0)
    assert said == "step 4 for 1:00; the last steps took 20 s each; 3:40 left"
    assert "left 3:40" in next(lines_after(files, 2))


def test_watch_and_report_show_a_folder_of_sft_alone(tmp_path, capsys):
    folder = tmp_path / "run"
    config = load(["experiment=quickstart", f"runner.run_dir={folder}", "sft.steps=14"])
    (folder / SFT_LOG).mkdir(parents=True)
    old = '{"step": 3, "time_s": 1.0, "message": "of an SFT that was started before"}\n'
    (folder / SFT_LOG / WARNINGS_FILE).write_text(old)
    with open_monitor(folder / SFT_LOG, config.runner, 14, line_every=100) as monitor:
        for step in range(1, 15):
            monitor.log_step(step, {"sft/loss": 3.0 - 0.1 * step, "sft/lr": 1e-4})
    save(config, folder / SFT_CONFIG_FILE)
    capsys.readouterr()
    assert main(["watch", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "step 14/14  loss 1.600" in said and "yes: loss fell by 0.7" in said
    assert "no alarm" in said
    assert "ended or interrupted at step 14 of 14" in said  # The model is not written yet.
    (folder / SFT_EXPORTED_FILE).write_text('{"step": 14}\n')
    assert main(["watch", str(folder)]) == 0
    assert "finished: 14 steps" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert '"sft/loss":[2.9,2.8' in page and "sft.jsonl" in page and "samples_keep_gib)" not in page
