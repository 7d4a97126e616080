"""Two steps of the whole loop, as the quickstart takes them, with its tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlmath.checks.machine import Machine
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.commands.selfcheck.worker import LOG_FILE
from rlmath.config.quoting import quoted_path
from rlmath.monitor import read_metrics
from rlmath.quickstart import make_problems, make_tiny_model
from rlmath.quickstart.run import for_machine

STEPS = 2
RUN = "run"
# The tiny model solves nothing: with the reward for answers no gradient would reach the update.
REWARD = """\
def odd_sum(completions, completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]
"""
FIGURES = {
    "alignment/mean_exp_abs_diff": ("mean exp|Δ|", ""),
    "train/grad_norm": ("gradient norm", ""),
    "rollout/rewards": ("mean reward", ""),
    "timing/step": ("step", "s"),
    "timing/generate": ("generate", "s"),
    "timing/update": ("update", "s"),
    "timing/weight_sync": ("weight sync", "s"),
}


def run(node: Node, record: Record) -> None:
    """Train; the loop's own checks stop it when a number cannot be."""
    folder = Path(node.folder)
    run_dir = folder / RUN
    make_tiny_model(folder / "model")
    make_problems(folder / "data", num_train=256, num_eval=16, num_sft=0)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    settings = settings_of(node, folder)
    with record.phase("rlmath train"):
        command = [sys.executable, "-W", "ignore", "-m", "rlmath", "train", *settings]
        code = subprocess.run(command, check=False).returncode
    record.figure("exit code", code, limit="0")
    log = folder / LOG_FILE
    record.require(
        code == 0, f"rlmath train ended with exit code {code}; the end of {log} says why"
    )
    if code:
        return
    lines = [line for line in read_metrics(run_dir) if line["step"] > 0]
    record.figure("steps", len(lines), limit=str(STEPS))
    record.require(len(lines) == STEPS, f"{len(lines)} of {STEPS} steps are in metrics.jsonl")
    for line in lines:
        for tag, (name, unit) in FIGURES.items():
            if tag in line:
                key = tag in ("alignment/mean_exp_abs_diff", "timing/step")
                record.figure(f"step {line['step']:g} {name}", line[tag], unit, key=key)
        norm = line.get("train/grad_norm", 0.0)
        record.require(
            0 < norm < float("inf"), f"step {line['step']:g}: the gradient's norm is {norm}"
        )
    for name in ("checkpoints", "hf"):
        record.require(bool(os.listdir(run_dir / name)), f"the run left no {name}/")


def settings_of(node: Node, folder: Path) -> list[str]:
    settings = [
        "experiment=quickstart",
        *for_machine(Machine.here(), []),
        f"model.path={folder / 'model'}",
        f"data.train_paths=[{folder / 'data' / 'train.jsonl'}]",
        f"data.eval_paths=[{folder / 'data' / 'eval.jsonl'}]",
        f"runner.run_dir={folder / RUN}",
        f"runner.steps={STEPS}",
        "runner.progress=false",
        f"reward.items=[{{name: {quoted_path(f'{folder}/reward.py:odd_sum')}}}]",
        "algorithm.prompts_per_step=8",
        "algorithm.group_size=4",
    ]
    if node.on_cuda:
        settings.append(f"cluster.gpus_per_node={node.gpus_up_to(8)}")
    else:
        settings += ["actor.tensor_parallel=1", f"cluster.device={node.device}"]
    return settings
