"""The main job on material that it makes itself: ``launchers/quickstart.sh`` calls this.

Makes a tiny model and problems, fine-tunes the model to a weak start, trains it by reinforcement
learning, and says what happened. Arguments are Hydra overrides of ``experiment=quickstart``, or of
another of ``rlmath.quickstart.EXPERIMENTS`` if they name it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.checks import overview
from rlmath.checks import run as checks
from rlmath.checks.machine import Machine
from rlmath.config import arithmetic, load
from rlmath.config.lora import LoraConfig
from rlmath.config.schema import Config
from rlmath.config.settings import replace_values
from rlmath.monitor.progress import duration
from rlmath.monitor.summary import read_summary, update_summary
from rlmath.quickstart import EXPERIMENTS, make_problems, make_products, make_tiny_model
from rlmath.utils.command_line import run_command


def main(overrides: Sequence[str]) -> int:
    """Run the quickstart; returns the exit code."""
    started_s = time.monotonic()
    machine = Machine.here()
    experiment = [] if any(one in overrides for one in EXPERIMENTS) else [EXPERIMENTS[0]]
    config = load.load([*experiment, *for_machine(machine, overrides), *overrides])
    run_dir = Path(config.runner.run_dir)
    layout = arithmetic.resolve_layout(config, machine.device(config.cluster.device))
    config = replace_values(config, {"model.path": str(warm_start(config, machine))})
    checks.check(config, "train", machine)
    _say(f"2/2  GRPO, {config.runner.steps} steps")
    print(arithmetic.describe(config, layout), overview.describe_training(config), sep="\n")
    from rlmath.training import loop as train

    code = train.run(config)
    summary = read_summary(run_dir)
    setup_s = float(os.environ.get("RLMATH_SETUP_S", "0"))
    times = {"wall_s": time.monotonic() - started_s, "setup_s": setup_s}
    update_summary(run_dir, times)
    print(_story(summary | times))
    return code


def warm_start(config: Config, machine: Machine) -> Path:
    """Make the model and the problems, and fine-tune the model to its weak start. Returns the
    folder of the model that the run begins with."""
    _make_material(config)
    # A random model has nothing that adapters could be added to.
    config = replace_values(config, {"actor.lora": LoraConfig()})
    checks.check(config, "sft", machine)
    _say(f"1/2  light SFT on {config.sft.steps * config.sft.sequences_per_step} worked examples")
    from rlmath.training import sft

    sft.run(config)
    return Path(config.runner.run_dir) / "sft"


def for_machine(machine: Machine, overrides: Sequence[str]) -> list[str]:
    """Settings of the quickstart that depend on the machine; the user's own come after them."""
    if not machine.has_cuda or "cluster.device=cpu" in overrides:
        return []
    # Attention of packed sequences has no float32 kernel on CUDA.
    settings = [f"cluster.gpus_per_node={machine.gpus}", "model.dtype=bfloat16"]
    return settings if machine.gpus > 1 else [*settings, "actor.tensor_parallel=1"]


def _make_material(config: Config) -> None:
    """The tiny model and its problems, unless the settings name others."""
    run_dir = Path(config.runner.run_dir)
    if Path(config.model.path) == run_dir / "model":
        make_tiny_model(run_dir / "model", seed=config.runner.seed)
    data = config.data
    paths = [*data.train_paths, *data.eval_paths, *config.sft.train_paths]
    for name, make in (("data", make_problems), ("products", make_products)):
        if any(Path(path).parent == run_dir / name for path in paths):
            make(run_dir / name, seed=config.runner.seed)


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _story(summary: dict[str, Any]) -> str:
    lines = [
        f"took     {duration(summary['wall_s'])}, and {duration(summary['setup_s'])} of set-up",
        "try      bash launchers/quickstart.sh actor.pipeline_parallel=2",
        "         bash launchers/quickstart.sh rollout.engines=2 actor.optimizer.lr=5e-5",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(run_command(main, sys.argv[1:], is_run=True))
