"""A verl and a TRL user's files, as ``docs/coming_from.md`` has them, are imported and train."""

import re
import shlex

import pytest
from omegaconf import OmegaConf

from tests.e2e.runs import ROOT, metrics, python, rlmath

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
FILES = re.compile(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def section(title):
    """Files and commands of an example of the page."""
    text = PAGE.partition(f"## Example: {title}\n")[2].partition("\n## ")[0]
    commands = re.findall(
        r"^    (\S.*)$", re.sub(r"\\\n\s*", "", FILES.sub("", text)), re.MULTILINE
    )
    return dict(FILES.findall(text)), [shlex.split(one) for one in commands]


def call(folder, words):
    done = (rlmath if words[0] == "rlmath" else python)(*words[1:], folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def imported_and_trained(folder, title, trains):
    """Output of the import. Runs the page's commands, but for the one that trains on a GPU."""
    files, commands = section(title)
    for name, content in files.items():
        (folder / name).write_text(content)
    *first, on_gpus, here = commands
    assert here[: len(on_gpus)] == on_gpus and "runner.steps=2" in here
    said = [call(folder, words) for words in first]
    call(folder, [*here, *([] if trains else ["--check"])])
    return said[-1]


# The check calls the user's reward.
@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_verl_run_of_the_page_trains(tmp_path, trains):
    said = imported_and_trained(tmp_path, "a verl run", trains)
    assert "none " not in said and "unread " not in said, said
    assert (tmp_path / "train.parquet").is_file(), "make_data.py is one of the commands"
    if not trains:
        return
    (run_dir,) = (tmp_path / "runs").iterdir()
    lines = metrics(run_dir)
    assert [one["step"] for one in lines] == [1, 2]
    # 8 prompts in 2 optimizer steps; the user's function gives 0, 0.1 or 1.
    assert all(0 < one["rollout/rewards"] < 1 for one in lines), sorted(lines[0])
    config = OmegaConf.load(run_dir / "config.yaml")
    assert config.reward["items"][0].name == "rewards.py:compute_score"
    assert config.algorithm.minibatches_per_step == 2 and config.algorithm.group_size == 4
    assert set(config.plugin_hashes) == {"rewards.py"}


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_trl_script_of_the_page_trains(tmp_path, trains):
    said = imported_and_trained(tmp_path, "a TRL script", trains)
    assert "none " not in said and "unread " not in said, said
    assert "imported/grpo_rewards.py: right_sum" in said
    module = (tmp_path / "imported" / "grpo_rewards.py").read_text()
    # The constant goes with the function; the training does not.
    assert "NUMBER = " in module and "import re" in module and "trl" not in module
    if not trains:
        return
    lines = metrics(tmp_path / "runs" / "sums")
    assert [one["step"] for one in lines] == [1, 2]
    assert all(0 < one["rollout/rewards"] < 1 for one in lines), sorted(lines[0])
    config = OmegaConf.load(tmp_path / "runs" / "sums" / "config.yaml")
    assert config.reward["items"][0].name == "imported/grpo_rewards.py:right_sum"
    assert config.algorithm.aggregation == "seq_sum_constant"
