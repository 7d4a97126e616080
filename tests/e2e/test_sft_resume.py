"""Supervised fine-tuning resumes from a checkpoint as if it had not stopped."""

import json
import shutil

import pytest

from tests.e2e.runs import rlmath


def losses(run_dir):
    lines = (run_dir / "sft_log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.long
def test_a_run_in_two_parts_is_the_run_in_one(material, tmp_path):
    """The second part repeats steps that the first one did, whose checkpoints are lost."""

    def sft():
        run = rlmath(
            "sft",
            "experiment=quickstart",
            f"model.path={material / 'model'}",
            f"sft.train_paths=[{material / 'data' / 'sft.jsonl'}]",
            f"runner.run_dir={tmp_path}",
            "runner.resume=auto",
            "actor.tensor_parallel=1",
            "sft.sequences_per_step=16",
            "runner.keep_checkpoints=9",
            "sft.save_every=1",
            "sft.steps=4",
            "sft.optimizer.warmup_steps=2",
        )
        assert run.returncode == 0, run.stderr
        return losses(tmp_path)

    whole = sft()
    assert [line["step"] for line in whole] == [1, 2, 3, 4]
    for step in (3, 4):
        shutil.rmtree(tmp_path / "sft_checkpoints" / f"step_{step:06d}")
    shutil.rmtree(tmp_path / "sft")
    parts = sft()
    assert [line["step"] for line in parts] == [1, 2, 3, 4]
    assert [line["sft/loss"] for line in parts] == [line["sft/loss"] for line in whole]
    # Steps 3 and 4 were done twice, the others once.
    assert [a["time_s"] == b["time_s"] for a, b in zip(whole, parts, strict=True)] == [
        *(True, True),
        *(False, False),
    ]
    assert (tmp_path / "sft" / "config.json").is_file()


@pytest.mark.long
def test_a_run_continues_in_another_folder_from_its_mirror(material, tmp_path):
    """As it does in its own."""
    url = f"file://{tmp_path}/mirror"

    def sft(folder, steps, *settings):
        run = rlmath(
            "sft",
            "experiment=quickstart",
            f"model.path={material / 'model'}",
            f"sft.train_paths=[{material / 'data' / 'sft.jsonl'}]",
            f"runner.run_dir={tmp_path / folder}",
            "actor.tensor_parallel=1",
            "sft.sequences_per_step=16",
            "sft.save_every=1",
            f"sft.steps={steps}",
            "sft.optimizer.warmup_steps=1",
            *settings,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    sft("here", 2, f"runner.mirror={url}")
    said = sft("elsewhere", 3, f"runner.mirror={url}", f"runner.resume={url}")
    assert "downloaded step_000002" in said and "continues after step 2" in said
    assert (tmp_path / "mirror" / "sft_checkpoints" / "step_000003" / "manifest.json").is_file()
    sft("here", 3)
    here, elsewhere = losses(tmp_path / "here"), losses(tmp_path / "elsewhere")
    assert [line["step"] for line in elsewhere] == [1, 2, 3]
    assert [line["sft/loss"] for line in elsewhere] == [line["sft/loss"] for line in here]
