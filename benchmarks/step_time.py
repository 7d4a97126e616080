"""Seconds of a training step and where they go, against TRL's GRPOTrainer in the same run.

16 prompts x 8 samples on the tiny model on CPU: 64 tokens of fixed length, and up to 256 tokens of
uneven length (a random model ends a response at any token with the same probability). Both systems
make one optimizer step per rollout. They take turns, ``--rounds`` times. Prints one JSON line;
ratios above 1 mean that rlmath is faster; ``not_generate_or_train_share`` should be at most 0.1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from child import run_python

from rlmath.quickstart import make_problems, make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, GROUP_SIZE = 16, 8
# Steps at the beginning that warm caches and allocators and are not counted.
WARM_UP = 3
CASES = {"64_tokens_fixed": (64, True), "256_tokens_uneven": (256, False)}
# Phases that a step consists of; generation and training are generate, log_probs and update.
PHASES = ("generate", "grade", "advantage", "log_probs", "update", "weight_sync", "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="counted steps of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true", help="leave TRL out")
    parser.add_argument("overrides", nargs="*", help="settings of rlmath, such as its layout")
    arguments = parser.parse_args()
    steps = arguments.steps + WARM_UP
    result: dict[str, Any] = {"benchmark": "step_time", "prompts": PROMPTS, "samples": GROUP_SIZE}
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder)
        make_tiny_model(material / "model")
        make_problems(material / "data")
        for name, (max_tokens, fixed) in CASES.items():
            ours: list[dict[str, float]] = []
            theirs: list[float] = []
            for index in range(arguments.rounds):
                if not arguments.no_peer:
                    theirs += _trl(material, max_tokens, fixed, steps)
                run_dir = material / f"{name}_{index}"
                ours += _rlmath(material, run_dir, max_tokens, fixed, steps, arguments.overrides)
            result[name] = _compare(ours, theirs)
    print(json.dumps(result))


def _rlmath(
    material: Path, run_dir: Path, max_tokens: int, fixed: bool, steps: int, overrides: list[str]
) -> list[dict[str, float]]:
    settings = [
        "experiment=quickstart",
        f"model.path={material / 'model'}",
        f"data.train_paths=[{material / 'data' / 'train.jsonl'}]",
        f"runner.run_dir={run_dir}",
        f"runner.steps={steps}",
        "runner.check_export_sequences=0",
        f"algorithm.prompts_per_step={PROMPTS}",
        f"algorithm.group_size={GROUP_SIZE}",
        "algorithm.minibatches_per_step=1",
        f"rollout.max_response_tokens={max_tokens}",
        f"rollout.ignore_eos={str(fixed).lower()}",
        # The best use of two cores: a rank and an engine on each, with one kind working at a time.
        "actor.tensor_parallel=1",
        "actor.data_parallel=2",
        "actor.max_tokens_per_microbatch=2048",
        "rollout.engines=2",
        "eval.every=0",
        "data.eval_paths=[]",
        *overrides,
    ]
    run_python("-m", "rlmath", "train", *settings)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # The last step also saves a checkpoint.
    return lines[WARM_UP:-1]


def _trl(material: Path, max_tokens: int, fixed: bool, steps: int) -> list[float]:
    command = [
        str(ROOT / "benchmarks" / "trl_steps.py"),
        *("--model", str(material / "model")),
        *("--prompts", str(material / "data" / "train.jsonl")),
        *("--num-prompts", str(PROMPTS), "--group-size", str(GROUP_SIZE)),
        *("--max-tokens", str(max_tokens), "--steps", str(steps)),
        *(("--fixed-length",) if fixed else ()),
    ]
    output = run_python(*command)
    (line,) = [line for line in output.splitlines() if line.startswith("seconds ")]
    seconds: list[float] = json.loads(line.removeprefix("seconds "))
    return seconds[WARM_UP:-1]


def _compare(ours: list[dict[str, float]], theirs: list[float]) -> dict[str, Any]:
    def median(name: str) -> float:
        return statistics.median(line.get(f"timing/{name}", 0.0) for line in ours)

    step = median("step")
    split = {f"{phase}_s": round(median(phase), 4) for phase in PHASES}
    working = split["generate_s"] + split["log_probs_s"] + split["update_s"]
    compared: dict[str, Any] = {
        "step_s": round(step, 4),
        "step_s_range": [round(f(line["timing/step"] for line in ours), 4) for f in (min, max)],
        **split,
        "not_generate_or_train_share": round(1 - working / step, 4),
        "response_tokens": round(statistics.mean(line["rollout/response_tokens"] for line in ours)),
    }
    if theirs:
        peer = statistics.median(theirs)
        compared |= {
            "trl_step_s": round(peer, 4),
            "trl_step_s_range": [round(min(theirs), 4), round(max(theirs), 4)],
            "speed_ratio_to_trl": round(peer / step, 3),
        }
    return compared


if __name__ == "__main__":
    main()
