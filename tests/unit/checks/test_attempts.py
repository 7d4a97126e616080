"""A resumed run says what it changes, and is never continued as another experiment unasked."""

import copy
import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from rlmath.checks import attempts, inputs
from rlmath.cli import main
from rlmath.config import plugins
from rlmath.config.load import load, save
from rlmath.config.schema import Config
from rlmath.monitor import run_settings
from rlmath.training.model_card import model_card

# Too slow to run after each change.
pytestmark = pytest.mark.process


@cache
def quickstart():
    return OmegaConf.structured(load(["experiment=quickstart"]))


def settings(run_dir, *more):
    """The quickstart's settings with others, without composing them each time."""
    config = copy.deepcopy(quickstart())
    for text in (f"runner.run_dir={run_dir}", "runner.resume=auto", *more):
        key, _, value = text.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value))
    done = OmegaConf.to_object(config)
    assert isinstance(done, Config)
    return done


def checkpoint(folder, step):
    path = folder / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    return path


@pytest.fixture
def run_dir(tmp_path):
    """Folder of a run that is at step 8."""
    folder = tmp_path / "mine"
    save(settings(folder), folder / "config.yaml")
    checkpoint(folder / "checkpoints", 4)
    checkpoint(folder / "checkpoints", 8)
    return folder


def test_the_same_settings_continue_without_changes(run_dir):
    found = attempts.continuation(settings(run_dir))
    assert found is not None and (found.step, found.changes) == (8, ())
    assert attempts.refusals(settings(run_dir)) == []


def test_a_folder_without_a_complete_checkpoint_starts_from_the_beginning(tmp_path):
    (tmp_path / "checkpoints" / "step_000007").mkdir(parents=True)  # no manifest
    checkpoint(tmp_path / "checkpoints", 9).rename(tmp_path / "checkpoints" / "step_000009.partial")
    save(settings(tmp_path, "algorithm.loss=gspo"), tmp_path / "config.yaml")
    assert attempts.continuation(settings(tmp_path)) is None
    assert attempts.refusals(settings(tmp_path)) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("algorithm.loss=gspo", "algorithm.loss"),
        ("algorithm.filter.mask_duplicates=true", "algorithm.filter.mask_duplicates"),
        ("reward.correct=1", "reward.correct"),
        ("reward.items=[{name: math},{name: length}]", "reward.items"),
        ("model.path=elsewhere/model", "model.path"),
    ],
)
def test_another_experiment_is_refused_unless_accepted(run_dir, override, key):
    (message,) = attempts.refusals(settings(run_dir, override))
    assert key in message and "step 8" in message
    assert f"runner.accept_changes=[{key}]" in message
    for accepted in (key, key.partition(".")[0]):
        assert not attempts.refusals(
            settings(run_dir, override, f"runner.accept_changes=[{accepted}]")
        )
    assert attempts.refusals(
        settings(run_dir, override, "runner.accept_changes=[reward.timeout_s]")
    )
    assert not attempts.refusals(settings(run_dir, override, "runner.resume=never"))
    named = f"runner.resume={run_dir / 'checkpoints' / 'step_000008'}"
    assert not attempts.refusals(settings(run_dir, override, named))


def test_other_settings_may_change_and_are_printed(run_dir):
    config = settings(run_dir, "actor.optimizer.lr=1e-7", "runner.steps=99", "reward.timeout_s=9")
    assert attempts.refusals(config) == []
    found = attempts.continuation(config)
    keys = {change.key for change in found.changes}
    assert keys == {"actor.optimizer.lr", "runner.steps", "reward.timeout_s"}
    text = found.describe()
    assert "after step 8 of 99" in text
    assert all(key in text for key in keys) and "1e-07" in text


def test_tiny_and_relative_paths_name_the_same_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(settings(Path("run"), "model.path=run/model"), Path("run/config.yaml"))
    checkpoint(Path("run/checkpoints"), 1)
    for path in ("tiny", "run/model", str(tmp_path / "run" / "model")):
        assert attempts.refusals(settings(tmp_path / "run", f"model.path={path}")) == []
    assert attempts.refusals(settings(tmp_path / "run", "model.path=run/other"))


def test_a_model_of_the_hub_stays_the_same_in_another_cache(tmp_path):
    def folder(cache, name="a--b", revision="1f"):
        return str(tmp_path / cache / f"models--{name}" / "snapshots" / revision)

    run_dir = tmp_path / "run"
    save(settings(run_dir, f"model.path={folder('old')}"), run_dir / "config.yaml")
    checkpoint(run_dir / "checkpoints", 1)
    assert attempts.refusals(settings(run_dir, f"model.path={folder('new')}")) == []
    for other in (folder("new", name="a--c"), folder("new", revision="2e")):
        assert attempts.refusals(settings(run_dir, f"model.path={other}"))


def test_accept_changes_names_what_exists_and_is_guarded(run_dir, capsys):
    common = ["train", "--check", "experiment=quickstart", f"runner.run_dir={run_dir}"]
    assert main([*common, "runner.accept_changes=[algorithm.los,actor.optimizer.lr]"]) == 2
    said = capsys.readouterr().err
    assert "algorithm.los;" in said and "algorithm.loss" in said
    assert "actor.optimizer.lr may be changed" in said


def is_finished(config):
    return attempts.continuation(config).finished


def test_finished_run_differs_from_one_without_export(run_dir):
    config = settings(run_dir, "runner.steps=8")
    assert not is_finished(config)
    # A folder alone is no export: its run may have ended before the rest was written.
    (run_dir / "hf").mkdir()
    (run_dir / "hf" / "config.json").write_text("{}")
    assert not is_finished(config)
    attempts.note_export(run_dir, step=8)
    assert is_finished(config) and not is_finished(settings(run_dir, "runner.steps=9"))
    text = attempts.continuation(config).describe()
    assert "already at step 8 of 8" in text and "runner.steps" in text


def test_the_export_of_a_shorter_run_is_not_that_of_a_longer_one(run_dir):
    attempts.note_export(run_dir, step=8)
    more = settings(run_dir, "runner.steps=9")
    attempts.record(more, after_step=8)
    checkpoint(run_dir / "checkpoints", 9)
    # Ended while it exported, hf/ still of step 8.
    assert not is_finished(more)
    attempts.note_export(run_dir, step=9)
    assert is_finished(more)
    # Nor does the export of a run count for another begun in its folder.
    attempts.record(more, after_step=0, begins=True)
    assert not is_finished(more)
    (run_dir / "exported.json").write_text('{"st')
    assert not is_finished(more)


def test_sft_guards_the_model_alone(tmp_path):
    base = ["sft.save_every=2", "sft.steps=6"]
    save(settings(tmp_path, *base), tmp_path / "sft_config.yaml")
    checkpoint(tmp_path / "sft_checkpoints", 6)
    assert attempts.refusals(settings(tmp_path, *base, "algorithm.loss=gspo"), "sft") == []
    assert attempts.refusals(settings(tmp_path, *base, "model.path=x"), "sft")
    attempts.note_export(tmp_path, 6, "sft")
    found = attempts.continuation(settings(tmp_path, *base), "sft")
    assert found is not None and found.finished and "sft.steps" in found.describe()
    assert attempts.continuation(settings(tmp_path, "sft.save_every=0"), "sft") is None


def test_each_attempt_keeps_its_settings_and_the_card_says_what_held_when(run_dir):
    attempts.record(settings(run_dir), after_step=0)
    attempts.record(settings(run_dir, "algorithm.loss=gspo"), after_step=8)
    attempts.record(settings(run_dir, "algorithm.loss=cispo"), after_step=12)
    # A rollback: what came after step 8 is trained again.
    attempts.record(settings(run_dir, "algorithm.loss=sapo"), after_step=8)
    with (run_dir / "attempts.jsonl").open("a") as file:
        file.write('{"after_step": 9, "conf')  # killed while it wrote
    found = run_settings.attempts(run_dir)
    assert [one.after_step for one in found] == [0, 8]
    loss = {
        step: run_settings.attempt_of(found, step).settings["algorithm"]["loss"]
        for step in (1, 8, 9, 20, None)
    }
    assert loss == {1: "ppo_clip", 8: "ppo_clip", 9: "sapo", 20: "sapo", None: "sapo"}
    card = model_card(run_dir)
    assert "| policy loss | sapo |" in card
    assert "| 8 | `algorithm.loss` | ppo_clip | sapo |" in card
    earlier = model_card(run_dir, step=8)
    assert "| policy loss | ppo_clip |" in earlier and "| sapo |" not in earlier
    assert len(list((run_dir / "configs").glob("*.yaml"))) == 4


def test_changed_input_files_are_printed_and_in_the_card(run_dir):
    data, reward = run_dir / "data", run_dir / "mine.py"
    data.mkdir()
    for name in ("train.jsonl", "eval.jsonl"):
        (data / name).write_text("{}\n")
    reward.write_text("def mine(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    (run_dir / "model").mkdir()
    (run_dir / "model" / "tokenizer_config.json").write_text("{}")
    now = settings(
        run_dir,
        f"reward.items=[{{name: '{reward}:mine'}}]",
        f"data.train_paths=[{data}/train.jsonl]",
        f"data.eval_paths=[{data}/eval.jsonl]",
        f"model.path={run_dir}/model",
    )
    now.plugin_hashes = plugins.found_hashes(now)
    save(now, run_dir / "config.yaml")
    attempts.record(now, after_step=0)
    found = attempts.continuation(now)
    assert found is not None and found.changes == ()
    (data / "train.jsonl").write_text("[]\n")
    reward.write_text(reward.read_text().replace("0.0", "1.0"))
    (run_dir / "model" / "tokenizer_config.json").write_text("[]")
    (data / "eval.jsonl").unlink()  # Its reader says so.
    found = attempts.continuation(now)
    assert found is not None and [one.key for one in found.changes] == [
        f"contents of {data / 'train.jsonl'}",
        "contents of model.path's tokenizer_config.json",
    ]
    assert f"changed contents of {data / 'train.jsonl'}: " in found.describe()
    # A reward that raised is fixed: its next start has another hash, and says so.
    assert attempts.refusals(now) == []
    fixed = dataclasses.replace(now, plugin_hashes=plugins.found_hashes(now))
    (message,) = attempts.refusals(fixed)
    assert f"plugin_hashes.{reward}: " in message and "accept_changes=[plugin_hashes]" in message
    fixed.runner.accept_changes = ["plugin_hashes"]
    assert attempts.refusals(fixed) == []
    fixed.runner.accept_changes = []
    attempts.record(now, after_step=8)
    card = model_card(run_dir)
    assert "| 8 | `contents of train.jsonl` | " in card and str(run_dir) not in card
    # Files that are too large to be read at every start are known by their size and some places.
    with (data / "train.jsonl").open("wb") as file:
        file.truncate(inputs._READ_WHOLE_BYTES + 1)
    before = inputs.contents(inputs.input_files(now))
    with (data / "train.jsonl").open("r+b") as file:
        file.write(b"x")
    assert inputs.contents(inputs.input_files(now)) != before


def test_a_run_that_begins_from_a_checkpoint_has_none_of_the_folders_earlier_starts(run_dir):
    attempts.record(settings(run_dir), after_step=0, begins=True)
    attempts.record(settings(run_dir), after_step=8)
    named = "runner.resume=other/checkpoints/step_000050"
    attempts.record(settings(run_dir, named), after_step=50, begins=True)
    attempts.record(settings(run_dir), after_step=52)
    assert [one.after_step for one in run_settings.attempts(run_dir)] == [50, 52]
    assert run_settings.resume_steps(run_dir) == [50, 52]


def test_check_shows_where_a_run_continues(tmp_path, capsys):
    rows = [{"prompt": "1+1=", "solutions": ["\\boxed{2}"]}] * 64
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir = tmp_path / "run"
    common = [
        *("model.path=tiny", f"runner.run_dir={run_dir}", f"data.train_paths=[{data}]"),
        *("algorithm.prompts_per_step=4", "algorithm.group_size=4", "cluster.device=cpu"),
        *("data.max_prompt_tokens=16", "rollout.max_response_tokens=16"),
        *("actor.max_tokens_per_microbatch=256", "runner.steps=20"),
        *("data.prompt_template='{prompt}'", "data.apply_chat_template=false"),
    ]
    save(load(common), run_dir / "config.yaml")
    checkpoint(run_dir / "checkpoints", 8)
    assert main(["train", "--check", *common, "actor.optimizer.lr=5e-7"]) == 0
    said = capsys.readouterr().out
    assert "continues after step 8 of 20" in said and "actor.optimizer.lr" in said
    assert main(["train", "--check", *common, "algorithm.advantage=rloo"]) == 2
    assert "algorithm.advantage" in capsys.readouterr().err
    about = run_dir / "checkpoints" / "step_000008" / "actor" / "about.json"
    about.parent.mkdir()
    about.write_text(json.dumps({"dtype": "float32", "lora": {"rank": 4, "alpha": 32.0}}))
    assert main(["train", "--check", *common]) == 2
    assert "actor.lora.rank: 4 -> 0" in capsys.readouterr().err


def test_a_resume_compares_with_the_last_start_that_trained(run_dir):
    """One that was accepted and then ended in its first step has trained nothing."""
    attempts.record(settings(run_dir), after_step=0, begins=True)
    gspo = settings(run_dir, "algorithm.loss=gspo", "runner.accept_changes=[algorithm]")
    attempts.record(gspo, after_step=8)
    assert "gspo" in (run_dir / "config.yaml").read_text()
    assert attempts.refusals(settings(run_dir)) == []
    found = attempts.continuation(settings(run_dir))
    assert found is not None and found.changes == ()
    assert found.checkpoint == run_dir / "checkpoints" / "step_000008"
    assert "ppo_clip -> gspo" in attempts.refusals(settings(run_dir, "algorithm.loss=gspo"))[0]
    # Once it has trained a step, it is the one to compare with.
    checkpoint(run_dir / "checkpoints", 9)
    assert attempts.refusals(settings(run_dir, "algorithm.loss=gspo")) == []
    assert attempts.refusals(settings(run_dir))


def test_a_restart_with_a_lower_rate_leaves_the_settings_as_given(run_dir):
    lower = settings(run_dir, "actor.optimizer.lr=1e-7")
    attempts.record(lower, 0, begins=True, given=settings(run_dir))
    found = attempts.continuation(settings(run_dir))
    assert found is not None and found.changes == ()
    assert run_settings.attempts(run_dir)[-1].settings["actor"]["optimizer"]["lr"] == 1e-7
