"""Settings that were read, whether two runs are equal, and the band of a reward."""

import dataclasses
import json
import pickle

import pytest

from rlmath.cli import main
from rlmath.commands.recipe_test.band import (
    LEARNING_RATE,
    Band,
    band_file,
    band_of,
    lr_factor,
    read_band,
    reward_of,
    rewards_of,
    write_band,
)
from rlmath.commands.recipe_test.reads import unread, watch_reads
from rlmath.commands.recipe_test.run import _compare, _in_band
from rlmath.config.groups import CONF_DIR, options
from rlmath.config.load import load, save
from rlmath.config.schema import Config, OptimizerConfig
from rlmath.errors import UserError

SETTINGS = [
    "experiment=quickstart",
    "rollout.temperature=0.9",
    "actor.optimizer.weight_decay=0.25",
    "algorithm.kl_coef=0.1",
    "model.architecture=Qwen2ForCausalLM",
]


def test_reads_are_noted_and_looks_are_not(tmp_path):
    config = load(SETTINGS)
    reads = watch_reads(config)
    save(config, tmp_path / "config.yaml")
    again = dataclasses.replace(config, runner=dataclasses.replace(config.runner, seed=3))
    repr(config.algorithm)
    assert not {one for one in reads if one.count(".")}
    assert isinstance(again, Config) and again.algorithm.kl_coef == 0.1
    assert again.runner.seed == 3
    assert {"algorithm.kl_coef", "runner.seed"} <= reads
    left = unread(config, reads, {"model.path"})
    assert "rollout.temperature" in left and "actor.optimizer.weight_decay" in left
    assert not {"algorithm.kl_coef", "model.path", "rollout.top_p"} & set(left)
    assert "model.architecture" not in left, "checks compare the model's folder with it"


def test_a_section_that_leaves_the_process_is_read():
    config = load(SETTINGS)
    reads = watch_reads(config)
    copy = pickle.loads(pickle.dumps(config.actor.optimizer))
    assert type(copy) is OptimizerConfig and copy == load(SETTINGS).actor.optimizer
    assert {"actor.optimizer.weight_decay", "actor.optimizer.lr"} <= reads
    assert "actor.tensor_parallel" not in reads


def write_digests(folder, weights):
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "settings": folder.name, "weights": one} for step, one in enumerate(weights)
    ]
    (folder / "digests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_resume_is_compared_digest_by_digest(tmp_path):
    write_digests(tmp_path / "straight", ["a", "b", "c", "d", "e"])
    write_digests(tmp_path / "resumed", ["?", "?", "?", "d", "e"])
    assert _compare(tmp_path, 2, 4, "")[0]
    ok, text = _compare(tmp_path, 1, 4, "")
    assert not ok and "step 2 differs in weights" in text
    assert _compare(tmp_path, 4, 6, "") == (False, "step 5 has no digests")
    assert _compare(tmp_path, 2, 4, "UserError: x") == (False, "UserError: x")


BAND = Band(30, 5.0, 0.25, 0.4, 0.6, (0.5,))


def test_a_band_is_as_wide_as_what_was_learned():
    band = band_of(30, 5.0, [0.2, 0.3], [0.5, 0.6])
    assert (band.start, band.measured, band.lr_factor) == (0.25, (0.5, 0.6), 5.0)
    assert band.low == pytest.approx(0.4) and band.high == pytest.approx(0.7)
    falling = band_of(30, 1.0, [1.0], [0.4])
    assert falling.low == pytest.approx(0.2) and falling.high == pytest.approx(0.6)


@pytest.mark.parametrize("ends", [[0.25, 0.25], [0.5, 0.2], [float("nan")]])
def test_a_band_that_a_recipe_without_learning_meets_is_refused(ends):
    with pytest.raises(UserError, match="nothing would pass"):
        band_of(30, 1.0, [0.25], ends)


def test_bands_are_files(tmp_path):
    file = tmp_path / "mine.band.json"
    assert read_band(file) is None
    write_band(file, BAND)
    assert read_band(file) == BAND
    file.write_text("{}")
    with pytest.raises(UserError, match="not a band"):
        read_band(file)


def test_a_learning_rate_becomes_that_of_the_small_model():
    assert lr_factor(1e-6) * 1e-6 == pytest.approx(LEARNING_RATE)
    assert lr_factor(0.0) == 1.0


def test_rewards_are_those_of_the_last_steps(tmp_path):
    lines = [{"step": step, "rollout/rewards": float(step)} for step in range(1, 21)]
    lines.append({"step": 21})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert rewards_of(tmp_path)[0] == 1.0 and reward_of(tmp_path) == 15.5


def test_a_band_stands_beside_its_recipe():
    assert band_file([CONF_DIR], ["dapo"]) == CONF_DIR / "recipe" / "dapo.band.json"
    assert band_file([CONF_DIR], ["experiment=quickstart"]) == (
        CONF_DIR / "experiment" / "quickstart.band.json"
    )
    assert band_file([CONF_DIR], ["dapo", "actor.optimizer.lr=1"]) is None


# A run that measures speed learns nothing.
SHIPPED = [name for name in options("experiment") if not name.startswith("speed_")]
SHIPPED += options("recipe")


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_recipe_has_a_band_that_it_can_leave(name):
    band = read_band(band_file([CONF_DIR], [name]))
    assert band is not None and band.steps == 30
    assert band.start < band.low < min(band.measured) and max(band.measured) < band.high


@pytest.mark.parametrize(
    "words",
    [[], ["dapo", "--steps", "3"], ["nothing"], ["quickstart", "runner.seed=1", "--write-band"]],
)
def test_mistakes_are_errors(words):
    assert main(["test", *words]) == 2


@pytest.mark.parametrize("words", [["quickstart"], ["recipe=cispo"]])
def test_a_reward_outside_of_the_shipped_band_fails(words, monkeypatch, capsys):
    """The command reads the band that is shipped, and its exit code says where the reward is."""
    band = read_band(band_file([CONF_DIR], words))
    rewards = []

    def of_reward(shrunk, folder, given):
        assert given == band
        yield _in_band(rewards[-1], given)

    monkeypatch.setattr("rlmath.commands.recipe_test.run.run_test", of_reward)
    for reward, code in ((band.low - 0.01, 1), (band.measured[0], 0), (band.high + 1, 1)):
        rewards.append(reward)
        assert main(["test", *words]) == code
        assert ("FAILED  reward in band" in capsys.readouterr().out) == bool(code)
    # Fewer steps have no band.
    monkeypatch.setattr(
        "rlmath.commands.recipe_test.run.run_test",
        lambda shrunk, folder, given: iter([_in_band(9e9, given)]),
    )
    assert main(["test", *words, "--steps", "4"]) == 0
