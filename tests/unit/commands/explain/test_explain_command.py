import json

import pytest

from rlmath.checks import attempts
from rlmath.cli import main
from rlmath.commands.explain.outcomes import REST, read_window
from rlmath.config.load import load
from rlmath.monitor import write_samples
from rlmath.monitor.run_folder import RunFolder
from rlmath.types import GradedSample, Group, Problem
from tests.support.samples import make_sample


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Four steps of two problems; from step 3 on the second reward, of weight 0.5, is lower."""
    folder = tmp_path_factory.mktemp("explain") / "run"
    items = "reward.items=[{name: math}, {name: tag_count, weight: 0.5}]"
    config = load(["experiment=quickstart", f"runner.run_dir={folder}", items])
    folder.mkdir(parents=True)
    attempts.record(config, 0)
    for step in range(1, 5):
        groups = []
        for name in ("train.jsonl:0", "train.jsonl:1#2"):
            samples = []
            for index, right in enumerate((True, False, False)):
                math, tags = (5.0 if right else -5.0), (1.0 if step < 3 else -3.0)
                total = math + 0.5 * tags - (1.0 if index == 2 else 0.0)
                reason = "length" if index == 2 else "stop"
                sample = make_sample(name, index, 10, text="x", finish_reason=reason)
                status = "correct" if right else "wrong"
                rewards = {"math": math, "tag_count": tags}
                samples.append(GradedSample(sample, total, right, status, "2", rewards, "exact"))
            groups.append(Group(Problem(name, "?", (1,), ("2",)), tuple(samples)))
        write_samples(folder, step, groups, dropped={"train.jsonl:0": "equal_rewards"})
    return folder


def test_a_sample_is_read_with_its_weighted_parts(run_dir):
    found = read_window(RunFolder(run_dir), range(3, 4))
    last = found[-1]
    assert last.address == "3/train.jsonl:1#2/2"
    assert (last.problem, last.source) == ("train.jsonl:1", "train.jsonl")
    assert last.parts == {"reward math": -5.0, "reward tag_count": -1.5, REST: -1.0}
    assert last.reward == -7.5 and last.truncated and not last.dropped
    assert found[0].dropped and found[0].parts[REST] == 0.0


def test_as_text_and_as_json(run_dir, capsys):
    assert main(["explain", str(run_dir), "--steps", "3:5"]) == 0
    text = capsys.readouterr().out
    assert "steps 1:3" in text and "change: -2 ± " in text
    (line,) = (one for one in text.splitlines() if one.startswith("  reward tag_count"))
    assert line.split()[2] == "-2" and line.endswith("100.0%")
    assert "3/train.jsonl:0/0" in text
    assert main(["explain", str(run_dir), "--steps", "4:5", "--against", "1:2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [4, 5] and found["against"] == [1, 2]
    assert found["change"] == pytest.approx(-2)
    assert sum(one["share"] for one in found["causes"]) == pytest.approx(found["change"], abs=1e-9)
    assert found["causes"][0]["name"] == "reward tag_count"
    arguments = ["--steps", "4:5", "--metric", "length", "--trained"]
    assert main(["explain", str(run_dir), *arguments]) == 0
    assert "change: +0 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "9:12", "--against", "1:3"], "no samples of steps 9:12"),
        (["--steps", "3:5", "--against", "2:4"], "share steps"),
        (["--steps", "1:3"], "no step before it"),
        (["--steps", "5:3"], "A < B"),
        (["--steps", "three"], "400:450"),
        ([], "--steps"),
    ],
)
def test_windows_that_cannot_be(run_dir, capsys, arguments, said):
    assert main(["explain", str(run_dir), *arguments]) == 2
    assert said in capsys.readouterr().err
