import json
import re

import numpy as np
import pytest

from rlmath.cli import main
from rlmath.commands.watch import POLL_S, in_progress, lines_after
from rlmath.commands.why import Address
from rlmath.config.load import load, save
from rlmath.monitor import open_monitor, update_summary
from rlmath.monitor.digests import details_path
from rlmath.monitor.monitor import WARNINGS_FILE
from rlmath.monitor.run_folder import SFT_LOG, RunFolder
from rlmath.monitor.run_settings import CONFIG_FILE, SFT_CONFIG_FILE, SFT_EXPORTED_FILE
from rlmath.monitor.token_files import TracedSample, write_tokens
from rlmath.rollout.ledger import LEDGER_FILE, Event, Ledger
from rlmath.utils.run_lock import only_run_in
from tests.unit.commands.made_run import Run
from tests.unit.commands.report.run_maker import group

SAMPLE = "2/train.jsonl:21/1"


class Varied(Run):
    """Groups of four samples with other rewards; one, which is cut off, has none."""

    def groups(self, step):
        rewards = [[1.0, -1.0, 3.0, None], [0.5, -1.0, -1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]
        texts = [r"so \boxed{2}", r"\boxed{3}", "2", "I give up"]
        return [group(f"train.jsonl:{step}{i}", r, texts, step) for i, r in enumerate(rewards)]


def why(folder, sample, capsys, *more, code=0):
    capsys.readouterr()
    assert main(["why", str(folder), sample, *more]) == code
    found = capsys.readouterr()
    return str(found.out if code == 0 else found.err)


class Distilled(Varied):
    def of_teacher(self, step, tokens):
        return {"teacher_log_probs": self.old_log_probs(step, tokens) - 0.5}


def test_why_shows_recorded_advantages(tmp_path, capsys):
    """Also of a sample that another advantage would be computed for now: nothing is."""
    run = Distilled(tmp_path / "run", "algorithm.distill_coef=2", "teacher.path=t").go(last=2)
    file = details_path(run.folder, 2)
    details = json.loads(file.read_text())
    place = details["keys"]["sequences"].index("train.jsonl:21/1")
    details["numbers"]["advantages"][place] = -0.4375
    file.write_text(json.dumps(details))
    text = why(run.folder, SAMPLE, capsys)
    assert "the advantages: sum over its 6 tokens -0.4375" in text
    numbers = details["numbers"]
    for phase, words in (
        ("old_log_probs", "the actor's log-probs before the update"),
        ("teacher_log_probs", "the teacher's log-probs"),
    ):
        assert f"{words}: sum over its 6 tokens {numbers[phase][place]:.6g}" in text
    file.unlink()
    assert "the step's file with digests is gone" in why(run.folder, SAMPLE, capsys)


def test_tokens_that_were_traced_are_shown(tmp_path, capsys):
    run = Varied(tmp_path / "run").go(last=2)
    names = ("token_ids", "engine_log_probs", "log_probs", "entropy", "advantages", "pulls")
    values = {name: np.linspace(-1, 1, 12, dtype=np.float32) for name in names}
    values |= {"loss_mask": np.ones(12, bool), "clipped": np.zeros(12, bool)}
    traced = TracedSample("train.jsonl:21/1", 12, 1, 1, True, 0.125, False)
    assert "this is none of them" in why(run.folder, SAMPLE, capsys)
    file = run.folder / "samples" / "step_000002.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(row | {'response_tokens': 12})}\n" for row in rows))
    write_tokens(run.folder, 2, [(traced, values)])
    text = why(run.folder, SAMPLE, capsys)
    assert "minibatch 2; each of its tokens weighs 0.125" in text
    assert "the minibatch was discarded" in text
    assert re.search(r"token +log_prob +difference +entropy +advantage", text)
    assert "... 4 more" in text
    assert "more" not in why(run.folder, SAMPLE, capsys, "--whole").partition("Update")[2]


def test_rewards_and_group(tmp_path, capsys):
    weighted = "reward.items=[{name: math, weight: 2}]"
    text = why(Varied(tmp_path / "run", weighted).go(last=2).folder, SAMPLE, capsys)
    assert re.search(r"→ +1  reward +-1  wrong", text)
    assert "total: -1; weighted: reward math" in text
    assert "the layer " in text and "accepted ['2']" in text
    unscored = why(tmp_path / "run", "2/train.jsonl:20/3", capsys)
    assert "total: none" in unscored and "math: could not score it" in unscored


def test_seed_engine_weights_and_end(tmp_path, capsys):
    text = why(Varied(tmp_path / "run").go(last=2).folder, "2/train.jsonl:20/3", capsys)
    assert f"seed {2**60 + 3}, engine " in text
    assert "weights version 1 (those after step 1)" in text
    assert "finish reason length: it was cut off at the limit" in text


def test_a_dropped_group_and_one_that_is_carried_over(tmp_path, capsys):
    class Filtered(Varied):
        def dropped_groups(self, step):
            return {f"train.jsonl:{step}2": "equal_rewards"}

        def trained_groups(self, step):
            kept = super().trained_groups(step)
            return kept[:1] if step == 1 else [*super().trained_groups(step - 1)[1:], *kept]

    run = Filtered(tmp_path / "run").go(last=2)
    assert "the group: equal_rewards" in why(run.folder, "1/train.jsonl:12/0", capsys)
    ledger = Ledger(run.folder / LEDGER_FILE)

    def event(kind, *groups, **more):
        return [{"event": kind, "group": group, **more} for group in groups]

    rows = [json.loads(line) for line in (run.folder / "samples/step_000001.jsonl").open()]
    seeds = {row["problem_id"]: row["seed"] for row in reversed(rows)}
    for number in (0, 1):
        problem = f"train.jsonl:1{number}"
        ledger.write(1, event(Event.admitted, number, problem=problem, seed=seeds[problem]))
    ledger.write(1, event(Event.finished, 0, 1) + event(Event.trained, 0))
    carried = why(run.folder, "1/train.jsonl:11/0", capsys)
    assert "none yet: the group is carried over, and no step up to 2" in carried
    assert "the advantages: sum" not in carried
    assert "trained on it" not in why(run.folder, "1/train.jsonl:10/0", capsys)
    # Digests say what a ledger cut off by a crash does not.
    assert "the advantages: sum" in why(run.folder, "2/train.jsonl:20/0", capsys)
    ledger.write(2, event(Event.trained, 1))
    carried = why(run.folder, "1/train.jsonl:11/0", capsys)
    assert "the group was carried over: step 2 trained on it" in carried
    assert "the advantages: sum" in carried


def test_long_texts_are_cut(tmp_path, capsys):
    class Long(Varied):
        def groups(self, step):
            return [group("train.jsonl:9", [1.0, -1.0], ["x" * 5000, "\x1b[2J2"], step)]

    run = Long(tmp_path / "run").go(last=1)
    text = why(run.folder, "1/train.jsonl:9/0", capsys)
    assert "--whole shows them" in text and "x" * 1000 not in text
    assert "x" * 5000 in why(run.folder, "1/train.jsonl:9/0", capsys, "--whole")
    assert "\x1b" not in why(run.folder, "1/train.jsonl:9/1", capsys)


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ("7/train.jsonl:21/0", "steps 1 to 2"),
        ("2/train.jsonl:21/9", "samples 0 to 3"),
        ("2/train.jsonl:99/0", "train.jsonl:20"),
        ("nothing", "STEP/PROBLEM/INDEX"),
    ],
)
def test_a_sample_that_is_not_there(sample, says, tmp_path, capsys):
    run = Varied(tmp_path / "run").go(last=2)
    assert says in why(run.folder, sample, capsys, code=2)


def test_a_sample_of_several_versions(tmp_path, capsys):
    run = Varied(tmp_path / "run").go(last=2)
    file = run.folder / "samples" / "step_000002.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["spans"] = [[0, 0], [1, 2]]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = why(run.folder, SAMPLE, capsys)
    assert "2 versions of the weights: 0 from token 0, 1 from token 2" in text


def test_a_problems_id_may_hold_slashes():
    assert Address.parse("3/data/a.jsonl:4#2/0") == Address(3, "data/a.jsonl:4#2", 0)


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
