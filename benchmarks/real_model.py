"""A real small model on grade-school word problems: SFT, then GRPO, with held-out accuracy before,
during and after, for several seeds; with ``--peer trl`` beside TRL's GRPOTrainer.

    python benchmarks/real_model.py --raw ../shared/data --to runs/real_model --seeds 0 1 2

Makes model and problems (``toolkits/small_model.py``, ``toolkits/word_problems.py``), runs
``experiment=smollm2_word_problems`` and writes ``TO/results.json`` and, with ``--plot``, a picture.
A part whose result is there is not run again, so that a run that was cut continues. Settings after
``--`` are for every run; ``--label`` keeps their results apart from others.

The error of an accuracy is over problems; the error of a rise is that of the mean of each problem's
difference, since both ends have the same problems.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from child import run_python

EXPERIMENT = "experiment=smollm2_word_problems"
SETS = ("asdiv", "svamp", "mawps")
# Tags of metrics.jsonl that the record shows.
SHOWN = (
    "rollout/accuracy",
    "rollout/response_length",
    "train/entropy_loss",
    "train/grad_norm",
    "alignment/mean_exp_abs_diff",
    "alignment/k3",
    "timing/generate",
    "timing/update",
    "timing/weight_sync",
    "timing/step",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", type=Path, required=True, help="folder with the published files")
    parser.add_argument("--to", type=Path, required=True, help="folder for everything it makes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--label", default="grpo", help="name of the runs with these settings")
    parser.add_argument("--peer", choices=("trl",), help="also run this one, on the first seed")
    parser.add_argument("--plot", type=Path, help="PNG of held-out accuracy")
    parser.add_argument("overrides", nargs="*", help="settings for every run, after --")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    common = _material(arguments.raw, arguments.to)
    results: dict[str, Any] = _read(arguments.to / "results.json") or {}

    def part(name: str, make: Any) -> Any:
        if name not in results:
            results[name] = make()
            (arguments.to / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        return results[name]

    part("before_sft", lambda: _evaluate(arguments.to / "before_sft", common, None))
    for seed in arguments.seeds:
        start = arguments.to / f"start_{seed}"
        part(f"sft/{seed}", lambda: _sft(start, common, seed))  # noqa: B023
        run_dir = arguments.to / f"{arguments.label}_{seed}"
        settings = [*common, f"runner.seed={seed}", f"data.seed={seed}", *arguments.overrides]
        part(f"{arguments.label}/{seed}", lambda: _train(run_dir, start / "sft", settings))  # noqa: B023
    if arguments.peer:
        seed = arguments.seeds[0]
        settings = [*common, f"runner.seed={seed}", f"data.seed={seed}", *arguments.overrides]
        start = arguments.to / f"start_{seed}"
        part(f"trl/{seed}", lambda: _trl(arguments.to / f"trl_{seed}", start / "sft", settings))
    if arguments.plot:
        _plot(results, arguments.plot)
    for name, result in results.items():
        if "rise" in result:
            print(name, json.dumps(result["rise"]))


def _material(raw: Path, to: Path) -> list[str]:
    model, problems = to / "model", to / "problems"
    if not (model / "config.json").exists():
        run_python("toolkits/small_model.py", str(model))
    if not (problems / "train.jsonl").exists():
        run_python("toolkits/word_problems.py", str(raw), "--to", str(problems))
    names = {name: problems / f"{name}.jsonl" for name in SETS}
    benchmarks = ",".join(f"{{name: {name}, path: {path}}}" for name, path in names.items())
    return [
        EXPERIMENT,
        f"model.path={model}",
        f"data.train_paths=[{problems / 'train.jsonl'}]",
        f"sft.train_paths=[{problems / 'worked.jsonl'}]",
        f"eval.benchmarks=[{benchmarks}]",
    ]


def _sft(run_dir: Path, common: list[str], seed: int) -> dict[str, Any]:
    began_s = time.perf_counter()
    settings = [*common, f"runner.run_dir={run_dir}", f"runner.seed={seed}", f"data.seed={seed}"]
    run_python("-m", "rlmath", "sft", *settings)
    return {"wall_s": time.perf_counter() - began_s}


def _train(run_dir: Path, start: Path, settings: list[str]) -> dict[str, Any]:
    began_s = time.perf_counter()
    settings = [*settings, f"model.path={start}", f"runner.run_dir={run_dir}"]
    run_python("-m", "rlmath", "train", *settings)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [
        {"step": row["step"]} | {name: row[f"eval/{name}/accuracy"] for name in SETS}
        for row in rows
        if f"eval/{SETS[0]}/accuracy" in row
    ]
    steps = [{tag: row.get(tag) for tag in ("step", *SHOWN)} for row in rows if SHOWN[0] in row]
    first, last = curve[0]["step"], curve[-1]["step"]
    rise = {
        name: _rise(
            _correct(run_dir / "samples" / f"eval_{name}_{first:06d}.jsonl"),
            _correct(run_dir / "samples" / f"eval_{name}_{last:06d}.jsonl"),
        )
        for name in SETS
    }
    return {
        "wall_s": time.perf_counter() - began_s,
        "curve": curve,
        "steps": steps,
        "rise": rise,
    }


def _evaluate(run_dir: Path, settings: list[str], model: Path | None) -> dict[str, Any]:
    chosen = [*settings, f"runner.run_dir={run_dir}"]
    if model is not None:
        chosen.append(f"model.path={model}")
    run_python("-m", "rlmath", "evaluate", *chosen)
    found = {
        name: _correct(run_dir / "evaluation" / "samples" / f"eval_{name}_000000.jsonl")
        for name in SETS
    }
    return {name: statistics.mean(values.values()) for name, values in found.items()}


def _trl(to: Path, start: Path, settings: list[str]) -> dict[str, Any]:
    """TRL's trainer with the experiment's settings; its models are evaluated as ours are."""
    config = json.loads(run_python("-c", _RESOLVE, *settings))
    run_dir = to / "models"
    arguments = [
        f"--model={start}",
        f"--rows={config['rows']}",
        f"--to={run_dir}",
        f"--steps={config['steps']}",
        f"--save-every={config['eval_every']}",
        f"--seed={config['seed']}",
        f"--settings={json.dumps(config)}",
    ]
    out = run_python("benchmarks/trl_learning.py", *arguments)
    line = next(line for line in out.splitlines() if line.startswith("result "))
    found: dict[str, Any] = json.loads(line.removeprefix("result "))
    curve = [{"step": 0} | _evaluate(to / "evaluate_0", settings, start)]
    for step in range(config["eval_every"], config["steps"] + 1, config["eval_every"]):
        model = run_dir / f"checkpoint-{step * config['minibatches_per_step']}"
        curve.append({"step": step} | _evaluate(to / f"evaluate_{step}", settings, model))
    samples = "evaluation/samples/eval_{}_000000.jsonl"
    rise = {
        name: _rise(
            _correct(to / "evaluate_0" / samples.format(name)),
            _correct(to / f"evaluate_{curve[-1]['step']}" / samples.format(name)),
        )
        for name in SETS
    }
    return {"curve": curve, "rise": rise, **found}


# The experiment's settings, as TRL's script takes them.
_RESOLVE = """
import json, sys
from rlmath.config import load
config = load.load(sys.argv[1:])
algorithm, optimizer = config.algorithm, config.actor.optimizer
print(json.dumps({
    "rows": config.data.train_paths[0],
    "system_prompt": config.data.system_prompt,
    "prompts_per_step": algorithm.prompts_per_step,
    "group_size": algorithm.group_size,
    "minibatches_per_step": algorithm.minibatches_per_step,
    "rewards": [
        {"name": item.name, "weight": item.weight, "params": dict(item.params)}
        for item in config.reward.items
    ],
    "part_sequences": 32,
    "max_response_tokens": config.rollout.max_response_tokens,
    "clip_low": algorithm.loss_options["clip_low"],
    "clip_high": algorithm.loss_options["clip_high"],
    "lr": optimizer.lr,
    "adam_beta2": optimizer.adam_beta2,
    "adam_eps": optimizer.adam_eps,
    "steps": config.runner.steps,
    "eval_every": config.eval.every,
    "seed": config.runner.seed,
}))
"""


def _correct(path: Path) -> dict[str, float]:
    """Problem to the share of its samples that are right."""
    found: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "problem_id" in row:
            found.setdefault(row["problem_id"], []).append(float(bool(row["correct"])))
    return {problem: statistics.mean(values) for problem, values in found.items()}


def _rise(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    assert before.keys() == after.keys(), "both ends have the same problems"
    differences = [after[problem] - before[problem] for problem in before]
    rise = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "before": round(statistics.mean(before.values()), 4),
        "after": round(statistics.mean(after.values()), 4),
        "rise": round(rise, 4),
        "standard_error": round(error, 4),
        "errors": round(rise / error, 2) if error else 0.0,
    }


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panes = plt.subplots(1, len(SETS), figsize=(11, 3.6), sharey=True, layout="constrained")
    curves = {name: result["curve"] for name, result in results.items() if "curve" in result}
    for pane, name in zip(panes, SETS, strict=True):
        for label, curve in curves.items():
            style = "--" if label.startswith("trl") else "-"
            steps = [row["step"] for row in curve]
            pane.plot(steps, [row[name] for row in curve], style, marker="o", ms=3, label=label)
        pane.axhline(results["before_sft"][name], color="gray", lw=0.8, ls=":")
        pane.set(title=name, xlabel="GRPO step")
        pane.grid(alpha=0.3)
    panes[0].set_ylabel("held-out accuracy")
    panes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
