"""``benchmarks/real_model.py``: cut and continued, with runs that are only played."""

import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SETS = ("asdiv", "svamp", "mawps")


@pytest.fixture
def real_model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import real_model

    return real_model


class Runs:
    """Plays the commands: training evaluates at steps 0 and 20, and ends early where it is cut."""

    def __init__(self, cut=()):
        self.commands, self.cut = [], cut

    def __call__(self, *command, meanwhile=lambda: None):
        self.commands.append(command)
        settings = dict(one.split("=", 1) for one in command if "=" in one)
        if command[0] == "toolkits/word_problems.py":
            folder = Path(command[3])
            folder.mkdir(parents=True)
            for name in ("train", "worked", *SETS):
                (folder / f"{name}.jsonl").write_text("{}\n" * int(command[5]))
        elif command[2:3] == ("train",):
            self._train(Path(settings["runner.run_dir"]), meanwhile)
            if settings["runner.seed"] in self.cut:
                raise SystemExit("taken away")
        elif command[2:3] == ("evaluate",):
            samples(Path(settings["runner.run_dir"]) / "evaluation/samples", 0, [1, 0, 0, 0])
        return ""

    def _train(self, run_dir, meanwhile):
        run_dir.mkdir(exist_ok=True)
        meanwhile()
        rows = []
        for step, correct in ((0, [1, 0, 0, 0]), (20, [1, 1, 0, 0])):
            samples(run_dir / "samples", step, correct)
            rows.append(
                {"step": step} | {f"eval/{name}/accuracy": sum(correct) / 4 for name in SETS}
            )
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (run_dir / "metrics.jsonl").write_text(text + '{"step": 2')
            meanwhile()


def samples(folder, step, correct):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"problem_id": str(i), "correct": bool(one)} for i, one in enumerate(correct)]
    for name in SETS:
        (folder / f"eval_{name}_{step:06d}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def run(module, monkeypatch, tmp_path, runs, *more):
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    given = (
        f"--raw raw --to {tmp_path / 'to'} --model {tmp_path / 'model'} --held-out 4 --seeds 3 4"
    )
    monkeypatch.setattr(module, "run_python", runs)
    monkeypatch.setattr(sys, "argv", ["real_model.py", *given.split(), *more])
    module.main()


def test_a_cut_run_leaves_its_curve_and_continues(real_model, monkeypatch, tmp_path):
    runs, path = Runs(cut=("4",)), tmp_path / "to" / "results.json"
    with pytest.raises(SystemExit, match="taken away"):
        run(real_model, monkeypatch, tmp_path, runs, "--plot", str(tmp_path / "curves.png"))
    found = json.loads(path.read_text())
    assert "partial" not in found["grpo/3"] and found["grpo/4"]["partial"]
    assert [row["step"] for row in found["grpo/4"]["curve"]] == [0, 20]
    assert (tmp_path / "curves.png").stat().st_size
    again = Runs()
    run(real_model, monkeypatch, tmp_path, again, "--at-once", "2", "--", "runner.steps=80")
    (only,) = again.commands
    assert {"train", "runner.seed=4", "runner.steps=80", *real_model.SHARED_GPU} <= set(only)
    assert not any("partial" in part for part in json.loads(path.read_text()).values())


def test_each_seed_has_its_own_sft_and_order(real_model, monkeypatch, tmp_path):
    runs = Runs()
    run(real_model, monkeypatch, tmp_path, runs)
    for seed in ("3", "4"):
        sft, train = (c for c in runs.commands if f"runner.seed={seed}" in c)
        assert "sft" in sft and f"data.seed={seed}" in sft and f"data.seed={seed}" in train
        run_dir = next(one for one in sft if one.startswith("runner.run_dir=")).split("=")[1]
        assert train.count(f"model.path={run_dir}/sft") == 1
    with pytest.raises(SystemExit, match="holds out 4"):
        run(real_model, monkeypatch, tmp_path, runs, "--held-out", "5")


def test_the_error_of_a_rise_is_that_of_each_problems_difference(real_model, tmp_path):
    samples(tmp_path, 0, [1, 0, 0, 0, 1, 0, 0, 0])
    samples(tmp_path, 20, [1, 1, 0, 0, 1, 0, 0, 0])
    ends = (str(tmp_path / f"eval_{{}}_{step:06d}.jsonl") for step in (0, 20))
    rise = real_model.rises(*ends)["mawps"]
    assert (rise["before"], rise["rise"]) == (0.25, 0.125)
    assert rise["standard_error"] == pytest.approx(math.sqrt(1 / 8) / math.sqrt(8), abs=1e-4)
