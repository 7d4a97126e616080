"""Which settings were read, whether two runs are equal, and the band of a reward."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmath.cli import main
from rlmath.commands.recipe_test.cli import _write
from rlmath.commands.recipe_test.reads import unread, watch_reads
from rlmath.commands.recipe_test.run import _compare, _in_band, band_file, read_band, reward_of
from rlmath.config.groups import CONF_DIR, options
from rlmath.config.load import load, save
from rlmath.config.schema import Config, OptimizerConfig
from rlmath.errors import UserError

SETTINGS = [
    "experiment=quickstart",
    "rollout.temperature=0.9",
    "actor.optimizer.weight_decay=0.25",
    "algorithm.kl_coef=0.1",
]


def test_reads_are_noted_and_looks_are_not(tmp_path: Path) -> None:
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


def test_a_section_that_leaves_the_process_is_read() -> None:
    config = load(SETTINGS)
    reads = watch_reads(config)
    copy = pickle.loads(pickle.dumps(config.actor.optimizer))
    assert type(copy) is OptimizerConfig and copy == load(SETTINGS).actor.optimizer
    assert {"actor.optimizer.weight_decay", "actor.optimizer.lr"} <= reads
    assert "actor.tensor_parallel" not in reads


def write_digests(folder: Path, weights: list[str]) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "settings": folder.name, "weights": one} for step, one in enumerate(weights)
    ]
    (folder / "digests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_resume_is_compared_digest_by_digest(tmp_path: Path) -> None:
    write_digests(tmp_path / "straight", ["a", "b", "c", "d", "e"])
    write_digests(tmp_path / "resumed", ["?", "?", "?", "d", "e"])
    assert _compare(tmp_path, 2, 4, "")[0]
    ok, text = _compare(tmp_path, 1, 4, "")
    assert not ok and "step 2 differs in weights" in text
    assert _compare(tmp_path, 4, 6, "") == (False, "step 5 has no digests")
    assert _compare(tmp_path, 2, 4, "UserError: x") == (False, "UserError: x")


def test_bands(tmp_path: Path) -> None:
    assert _in_band(0.5, {"low": 0.4, "high": 0.6}).ok
    assert _in_band(0.7, {"low": 0.4, "high": 0.6}).ok is False
    assert _in_band(float("nan"), {"low": 0.4, "high": 0.6}).ok is False
    assert _in_band(0.5, None).ok is None
    file = tmp_path / "mine.band.json"
    _write(file, 0.5, 0.1, 30)
    _write(file, 0.7, 0.1, 30)
    band: Any = read_band(file)
    assert (band["low"], band["high"], band["measured"]) == (0.4, 0.8, [0.5, 0.7])
    assert read_band(tmp_path / "none.json") is None
    file.write_text("{}")
    with pytest.raises(UserError, match="not a band"):
        read_band(file)
    lines = [{"step": step, "rollout/rewards": float(step)} for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert reward_of(tmp_path) == 8.0


def test_a_band_stands_beside_its_recipe() -> None:
    assert band_file([CONF_DIR], ["dapo"]) == CONF_DIR / "recipe" / "dapo.band.json"
    assert band_file([CONF_DIR], ["experiment=quickstart"]) == (
        CONF_DIR / "experiment" / "quickstart.band.json"
    )
    assert band_file([CONF_DIR], ["dapo", "actor.optimizer.lr=1"]) is None
    for group in ("experiment", "recipe"):
        for file in (CONF_DIR / group).glob("*.band.json"):
            assert file.name.removesuffix(".band.json") in options(group)
            band: Any = read_band(file)
            assert band["steps"] == 30 and band["low"] < min(band["measured"])
            assert band["high"] > max(band["measured"])


@pytest.mark.parametrize(
    "words",
    [[], ["dapo", "--steps", "3"], ["nothing"], ["quickstart", "runner.seed=1", "--write-band"]],
)
def test_mistakes_are_errors(words: list[str]) -> None:
    assert main(["test", *words]) == 2


@pytest.mark.parametrize("words", [["quickstart"], ["recipe=cispo"]])
def test_a_reward_outside_of_the_shipped_band_fails(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reads the band that is shipped, and its exit code says where the reward is."""
    band: Any = read_band(band_file([CONF_DIR], words))
    rewards: list[float] = []

    def of_reward(shrunk: Any, folder: Path, given: Any) -> Iterator[Any]:
        assert given == band
        yield _in_band(rewards[-1], given)

    monkeypatch.setattr("rlmath.commands.recipe_test.run.run_test", of_reward)
    for reward, code in ((band["low"] - 0.01, 1), (band["measured"][0], 0), (band["high"] + 1, 1)):
        rewards.append(reward)
        assert main(["test", *words]) == code
        assert ("FAILED  reward in band" in capsys.readouterr().out) == bool(code)
    # Fewer steps have no band.
    monkeypatch.setattr(
        "rlmath.commands.recipe_test.run.run_test",
        lambda shrunk, folder, given: iter([_in_band(9e9, given)]),
    )
    assert main(["test", *words, "--steps", "4"]) == 0
