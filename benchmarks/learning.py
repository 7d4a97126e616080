"""Learning of estimators, losses and schedules: held-out accuracy on the quickstart's task, from
one SFT start.

Each case is the quickstart with another advantage, loss or schedule; everything else stays, the
seed too (``-- runner.seed=1`` for another). Prints one JSON line with the accuracy before and after
(``--steps`` steps, mean over ``--eval-samples`` answers to each of the held-out problems), the
standard error of a single figure, and the first evaluation (every ``--eval-every`` steps) at which
the accuracy was 0.7, 0.8 and 0.9. ``--plot`` draws the curves. One case takes about as long as a
quickstart. A case of distillation has the model that the first case trains for its teacher, so that
one is trained first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from child import run_python

from rlmath.quickstart import make_problems, make_tiny_model
from rlmath.quickstart.problems import SLIP_SHARE

# Settings beside the quickstart's: the clip ranges of a loss are those of its preset, but GSPO's,
# whose 3e-4 belongs to learning rates a hundred times smaller.
CASES: dict[str, list[str]] = {
    "advantage grpo, loss ppo_clip": [],
    "advantage rloo, loss ppo_clip": ["algorithm.advantage=rloo"],
    "advantage reinforce_pp_baseline, loss ppo_clip": ["algorithm.advantage=reinforce_pp_baseline"],
    "advantage dr_grpo, loss ppo_clip": [
        "algorithm.advantage=dr_grpo",
        "algorithm.aggregation=seq_sum_constant",
    ],
    "advantage grpo, loss gspo": [
        "algorithm.loss=gspo",
        "algorithm.aggregation=seq_mean_token_mean",
        "algorithm.loss_options.clip_low=0.03",
        "algorithm.loss_options.clip_high=0.04",
    ],
    "advantage grpo, loss cispo": [
        "algorithm.loss=cispo",
        "algorithm.loss_options.clip_low=1.0",
        "algorithm.loss_options.clip_high=4.0",
    ],
    # Five times the learning rate: LoRA's best is about ten times that of all weights.
    "LoRA rank 16, advantage grpo, loss ppo_clip": [
        "actor.lora.rank=16",
        "actor.optimizer.lr=1e-3",
        "actor.optimizer.min_lr=2e-4",
    ],
    "schedule carry_over": [
        "rollout.schedule=carry_over",
        "rollout.cut_after_tokens=20",
        "rollout.max_lag=2",
        "algorithm.correction.kind=token_truncate",
    ],
    "schedule pipelined": [
        "rollout.schedule=pipelined",
        "algorithm.correction.kind=token_truncate",
    ],
    "distillation alone": [
        "algorithm.advantage=teacher",
        "algorithm.distill_coef=1",
        "teacher.path={teacher}",
    ],
    "advantage grpo + distillation": ["algorithm.distill_coef=1", "teacher.path={teacher}"],
    "schedule continuous": [
        "rollout.schedule=continuous",
        "rollout.max_lag=2",
        "algorithm.correction.kind=token_truncate",
    ],
    "schedule continuous, lag 1": [
        "rollout.schedule=continuous",
        "rollout.max_lag=1",
        "algorithm.correction.kind=token_truncate",
    ],
}
# The case with the teacher's model.
TEACHER = next(iter(CASES))
LEVELS = (0.7, 0.8, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--eval-samples", type=int, default=4)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--slip-share", type=float, default=SLIP_SHARE, help="of the SFT's worked examples"
    )
    parser.add_argument("--plot", type=Path, help="PNG of held-out accuracy over steps")
    parser.add_argument("overrides", nargs="*", help="settings for every case, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        start = _sft(material, arguments.slip_share)

        def run(name: str) -> list[dict[str, float]]:
            run_dir, teacher = _folder(material, name), _folder(material, TEACHER) / "hf"
            settings = [
                *_quickstart(material, run_dir, start),
                f"runner.steps={arguments.steps}",
                f"eval.samples={arguments.eval_samples}",
                f"eval.every={arguments.eval_every}",
                "runner.check_export_sequences=0",
                *(setting.format(teacher=teacher) for setting in CASES[name]),
                *arguments.overrides,
            ]
            run_python("-m", "rlmath", "train", *settings)
            lines = (run_dir / "metrics.jsonl").read_text().splitlines()
            return [row for row in map(json.loads, lines) if "eval/accuracy" in row]

        distills = any(
            "{teacher}" in setting for name in arguments.cases for setting in CASES[name]
        )
        curves = {TEACHER: run(TEACHER)} if distills else {}
        left = [name for name in arguments.cases if name not in curves]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            curves |= dict(zip(left, pool.map(run, left), strict=True))
        problems = len((material / "data" / "eval.jsonl").read_text().splitlines())
    result = {
        "benchmark": "learning",
        "steps": arguments.steps,
        "problems": problems,
        "samples": arguments.eval_samples,
        "cases": {name: _summary(curve, problems) for name, curve in curves.items()},
    }
    if arguments.plot:
        _plot(curves, arguments.plot)
    print(json.dumps(result))


def _folder(material: Path, name: str) -> Path:
    return material / name.replace(" ", "_").replace(",", "")


def _quickstart(material: Path, run_dir: Path, model: Path) -> list[str]:
    data = material / "data"
    return [
        "experiment=quickstart",
        "actor.tensor_parallel=1",
        f"model.path={model}",
        f"data.train_paths=[{data / 'train.jsonl'}]",
        f"data.eval_paths=[{data / 'eval.jsonl'}]",
        f"sft.train_paths=[{data / 'sft.jsonl'}]",
        f"runner.run_dir={run_dir}",
    ]


def _sft(material: Path, slip_share: float) -> Path:
    """The weak start that all cases share. Returns its folder."""
    make_tiny_model(material / "model")
    make_problems(material / "data", slip_share=slip_share)
    settings = _quickstart(material, material / "start", material / "model")
    run_python("-m", "rlmath", "sft", *settings)
    return material / "start" / "sft"


def _summary(curve: list[dict[str, float]], problems: int) -> dict[str, Any]:
    before, after = curve[0]["eval/accuracy"], curve[-1]["eval/accuracy"]
    # Standard error of a figure over N problems; answers to one problem are not independent, so the
    # samples do not count.
    error = (after * (1 - after) / problems) ** 0.5
    steps_to = {
        str(level): next((row["step"] for row in curve if row["eval/accuracy"] >= level), None)
        for level in LEVELS
    }
    return {
        "before": round(before, 4),
        "after": round(after, 4),
        "standard_error": round(error, 4),
        "steps_to": steps_to,
    }


def _plot(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot([r["step"] for r in curve], [r["eval/accuracy"] for r in curve], label=name)
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
