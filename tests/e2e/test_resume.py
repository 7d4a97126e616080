"""A run that is continued from its checkpoint ends where one run straight through ends."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.e2e.runs import metrics, quickstart_settings, rlmath

# What a clock decides.
VARIES = ("timing/", "throughput/", "time_s")


def test_two_steps_are_one_and_one_more(material: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    changes = ["runner.resume=auto", "actor.tensor_parallel=1", "eval.every=0"]
    for folder, steps in ((straight, 2), (broken, 1), (broken, 2)):
        run = rlmath(
            "train", *quickstart_settings(material, folder), *changes, f"runner.steps={steps}"
        )
        assert run.returncode == 0, run.stderr
    assert "resumed after step 1" in run.stdout

    def comparable(folder: Path) -> list[dict[str, float]]:
        return [
            {k: v for k, v in line.items() if not k.startswith(VARIES) and "seconds" not in k}
            for line in metrics(folder)
        ]

    assert comparable(straight) == comparable(broken)
    one = load_file(straight / "hf" / "model.safetensors")
    other = load_file(broken / "hf" / "model.safetensors")
    assert all((one[name] == other[name]).all() for name in one)
