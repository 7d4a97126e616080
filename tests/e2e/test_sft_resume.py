"""Supervised fine-tuning goes on from a checkpoint as if it had not stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.runs import rlmath


def losses(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "sft_log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_in_two_parts_is_the_run_in_one(material: Path, tmp_path: Path) -> None:
    def sft(name: str, steps: int, *more: str) -> list[dict[str, Any]]:
        run = rlmath(
            "sft",
            "experiment=quickstart",
            f"model.path={material / 'model'}",
            f"sft.train_paths=[{material / 'data' / 'sft.jsonl'}]",
            f"runner.run_dir={tmp_path / name}",
            "runner.resume=auto",
            "actor.tensor_parallel=1",
            "sft.sequences_per_step=16",
            f"sft.steps={steps}",
            *more,
        )
        assert run.returncode == 0, run.stderr
        return losses(tmp_path / name)

    whole = sft("whole", 4)
    assert [line["step"] for line in sft("parts", 2, "sft.save_every=1")] == [1, 2]
    parts = sft("parts", 4, "sft.save_every=1")
    assert [line["step"] for line in parts] == [1, 2, 3, 4]
    assert [line["sft/loss"] for line in parts] == [line["sft/loss"] for line in whole]
    assert (tmp_path / "parts" / "sft" / "config.json").is_file()
