"""A real small model on grade-school word problems: SFT, then GRPO, with held-out accuracy before,
during and after, for several seeds; with ``--peer trl`` beside TRL's GRPOTrainer.

    python benchmarks/real_model.py --raw ../shared/data --to runs/real_model --seeds 0 1 2

Makes model and problems (``toolkits/small_model.py``, ``toolkits/word_problems.py``), runs
``experiment=smollm2_word_problems`` and writes ``TO/results.json`` and, with ``--plot``, a picture,
both every few seconds, so that a run that is cut leaves what it had. Run again, it continues; a
part whose result is complete is not run again. Each seed has its own SFT and order of problems.
Settings after ``--`` are for every run; ``--label`` keeps apart the results of GRPO with them.

The error of an accuracy is over problems; the error of a rise is that of the mean of each problem's
difference, since both ends have the same problems.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from child import run_python

EXPERIMENT = "experiment=smollm2_word_problems"
SETS = ("asdiv", "svamp", "mawps")
SAMPLES = "evaluation/samples/eval_{}_000000.jsonl"
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
# Engines that share a GPU, each with a KV cache of a given size: vLLM would measure what is free,
# which the others change meanwhile.
SHARED_GPU = (
    "rollout.engine_arguments=benchmarks/shared_gpu.py:kv_cache",
    "rollout.engine_options.gib=4",
)
Put = Callable[[dict[str, Any]], None]


def main() -> None:
    arguments = _arguments()
    if arguments.peer and importlib.util.find_spec("trl") is None:
        raise SystemExit("--peer trl: pip install --no-deps trl==1.16.0 accelerate==1.15.0")
    to = arguments.to.absolute()
    to.mkdir(parents=True, exist_ok=True)
    results = Results(to / "results.json", arguments.plot)
    common = [*_material(arguments, to), *arguments.overrides]
    if arguments.at_once > 1:
        common.extend(SHARED_GPU)

    def seeded(seed: int) -> list[str]:
        return [*common, f"runner.seed={seed}", f"data.seed={seed}"]

    def one_seed(seed: int) -> None:
        start, run_dir = to / f"start_{seed}", to / f"{arguments.label}_{seed}"
        results.part(f"sft/{seed}", functools.partial(_sft, start, seeded(seed)))
        settings = [*seeded(seed), f"model.path={start / 'sft'}"]
        results.part(f"{arguments.label}/{seed}", functools.partial(_train, run_dir, settings))

    with ThreadPoolExecutor(arguments.at_once) as pool:
        failed = [
            str(future.exception())
            for future in [pool.submit(one_seed, seed) for seed in arguments.seeds]
            if future.exception()
        ]
    seed = arguments.seeds[0]
    if arguments.peer and not results.is_complete(f"{arguments.label}/{seed}"):
        failed.append(f"trl/{seed} needs the result of {arguments.label}/{seed}")
    elif arguments.peer:
        run_dir, start = to / f"{arguments.label}_{seed}", to / f"start_{seed}" / "sft"
        trl = functools.partial(_trl, to / f"trl_{seed}", start, run_dir, seeded(seed))
        results.part(f"trl/{seed}", trl)
    results.part("before_sft", functools.partial(_before_sft, to / "before_sft", common))
    for name, result in results.found.items():
        if result.get("rise"):
            print(name, json.dumps(result["rise"]))
    if failed:
        raise SystemExit("\n".join(failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", type=Path, required=True, help="folder with the published files")
    parser.add_argument("--to", type=Path, required=True, help="folder for everything it makes")
    parser.add_argument("--model", type=Path, help="the model's folder; without it, it is made")
    parser.add_argument("--held-out", type=int, default=400, help="problems of each set")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--at-once", type=int, default=1, help="seeds that run at the same time")
    parser.add_argument("--label", default="grpo", help="name of the runs with these settings")
    parser.add_argument("--peer", choices=("trl",), help="also run this one, on the first seed")
    parser.add_argument("--plot", type=Path, help="PNG of held-out accuracy")
    parser.add_argument("overrides", nargs="*", help="settings for every run, after --")
    return parser.parse_args()


class Results:
    """``results.json``, written whenever a part has something new.

    Attributes:
        found: Part to its result; ``partial``: the part is not at its end.
    """

    def __init__(self, path: Path, plot: Path | None) -> None:
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._path, self._plot = path, plot
        self._drawn: Any = None
        self._lock = threading.Lock()

    def is_complete(self, name: str) -> bool:
        return name in self.found and not self.found[name].get("partial")

    def part(self, name: str, make: Callable[[Put], dict[str, Any]]) -> None:
        """Make a part's result unless it is complete."""
        if not self.is_complete(name):
            self._put(name, make(lambda result: self._put(name, result | {"partial": True})))

    def _put(self, name: str, result: dict[str, Any]) -> None:
        with self._lock:
            self.found[name] = result
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self.found, indent=1) + "\n")
            part.replace(self._path)
            curves = {name: one["curve"] for name, one in self.found.items() if one.get("curve")}
            if self._plot is not None and curves and curves != self._drawn:
                _plot(curves, self.found.get("before_sft"), self._plot)
                self._drawn = curves


def _material(arguments: argparse.Namespace, to: Path) -> list[str]:
    model, problems = (arguments.model or to / "model").absolute(), to / "problems"
    if not (model / "config.json").exists():
        run_python("toolkits/small_model.py", str(model))
    if not (problems / "train.jsonl").exists():
        made = ["--to", str(problems), "--held-out", str(arguments.held_out)]
        run_python("toolkits/word_problems.py", str(arguments.raw.absolute()), *made)
    held_out = len((problems / f"{SETS[0]}.jsonl").read_text().splitlines())
    if held_out != arguments.held_out:
        raise SystemExit(f"--held-out {arguments.held_out}: {problems} holds out {held_out}")
    paths = {name: problems / f"{name}.jsonl" for name in SETS}
    benchmarks = ",".join(f"{{name: {name}, path: {path}}}" for name, path in paths.items())
    return [
        EXPERIMENT,
        f"model.path={model}",
        f"data.train_paths=[{problems / 'train.jsonl'}]",
        f"sft.train_paths=[{problems / 'worked.jsonl'}]",
        f"eval.benchmarks=[{benchmarks}]",
    ]


def _sft(run_dir: Path, settings: list[str], put: Put) -> dict[str, Any]:
    began_s = time.perf_counter()
    run_python("-m", "rlmath", "sft", *settings, f"runner.run_dir={run_dir}")
    return {"wall_s": time.perf_counter() - began_s}


def _train(run_dir: Path, settings: list[str], put: Put) -> dict[str, Any]:
    began_s = time.perf_counter()

    def measured() -> dict[str, Any]:
        return {"wall_s": time.perf_counter() - began_s} | results_of(run_dir)

    command = ("-m", "rlmath", "train", *settings, f"runner.run_dir={run_dir}")
    run_python(*command, meanwhile=lambda: put(measured()))
    return measured()


def results_of(run_dir: Path) -> dict[str, Any]:
    """Steps, held-out accuracy and its rise, so far."""
    rows = _rows(run_dir / "metrics.jsonl")
    curve = [
        {"step": row["step"]} | {name: row[f"eval/{name}/accuracy"] for name in SETS}
        for row in rows
        if f"eval/{SETS[0]}/accuracy" in row
    ]
    steps = [{tag: row.get(tag) for tag in ("step", *SHOWN)} for row in rows if SHOWN[0] in row]
    found: dict[str, Any] = {"curve": curve, "steps": steps}
    if len(curve) > 1:
        ends = [run_dir / f"samples/eval_{{}}_{curve[end]['step']:06d}.jsonl" for end in (0, -1)]
        found["rise"] = rises(*map(str, ends))
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a file that is still written."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _before_sft(run_dir: Path, settings: list[str], put: Put) -> dict[str, float]:
    return _evaluate(run_dir, settings)


def _evaluate(run_dir: Path, settings: list[str]) -> dict[str, float]:
    run_python("-m", "rlmath", "evaluate", *settings, f"runner.run_dir={run_dir}")
    found = {name: _correct(run_dir / SAMPLES.format(name)) for name in SETS}
    return {name: statistics.mean(values.values()) for name, values in found.items()}


def _trl(to: Path, start: Path, run_dir: Path, settings: list[str], put: Put) -> dict[str, Any]:
    """TRL's trainer with the experiment's settings, from the model that GRPO in ``run_dir`` started
    from; its models are evaluated as ours are, the last one first."""
    config = json.loads(run_python("-c", _RESOLVE, *settings))
    models = to / "models"
    arguments = [f"--model={start}", f"--to={models}", f"--settings={json.dumps(config)}"]
    result: dict[str, Any] = {"curve": results_of(run_dir)["curve"][:1]}

    def trained() -> dict[str, Any]:
        return result | {"history": _rows(models / "history.jsonl")}

    run_python("benchmarks/trl_learning.py", *arguments, meanwhile=lambda: put(trained()))
    result = trained()
    steps, every = config["steps"], config["eval_every"]
    for step in (steps, *range(every, steps, every)):
        model = models / f"checkpoint-{step * config['minibatches_per_step']}"
        accuracy = _evaluate(to / f"evaluate_{step}", [*settings, f"model.path={model}"])
        result["curve"].append({"step": step} | accuracy)
        result["curve"].sort(key=lambda row: row["step"])
        before = run_dir / "samples/eval_{}_000000.jsonl"
        result["rise"] = rises(str(before), str(to / f"evaluate_{steps}" / SAMPLES))
        put(result)
    return result


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
    for row in _rows(path):
        if "problem_id" in row:
            found.setdefault(row["problem_id"], []).append(float(bool(row["correct"])))
    return {problem: statistics.mean(values) for problem, values in found.items()}


def rises(before: str, after: str) -> dict[str, dict[str, float]]:
    """Rise of each set's accuracy between two files of samples, which have {} for its name."""
    ends = ((_correct(Path(before.format(n))), _correct(Path(after.format(n)))) for n in SETS)
    return {name: _rise(*found) for name, found in zip(SETS, ends, strict=True)}


def _rise(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    if before.keys() != after.keys():
        raise SystemExit("a rise is over the same problems at both ends, and these differ")
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


def _plot(curves: dict[str, Any], before_sft: dict[str, float] | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panes = plt.subplots(1, len(SETS), figsize=(11, 3.6), sharey=True, layout="constrained")
    for pane, name in zip(panes, SETS, strict=True):
        for label, curve in curves.items():
            style = "--" if label.startswith("trl") else "-"
            steps = [row["step"] for row in curve]
            pane.plot(steps, [row[name] for row in curve], style, marker="o", ms=3, label=label)
        if before_sft is not None:
            pane.axhline(before_sft[name], color="gray", lw=0.8, ls=":")
        pane.set(title=name, xlabel="GRPO step")
        pane.grid(alpha=0.3)
    panes[0].set_ylabel("held-out accuracy")
    panes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
