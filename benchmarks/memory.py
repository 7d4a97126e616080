"""Memory of one GPU in each phase of a step, counted, with and without each memory setting.

Dry runs (``benchmarks/dry_run``): the project's own model, optimizer, schedule and weight
gather of one rank on meta tensors, for 1.5B, 7B, 32B and 30B-A3B on 8, 64 and 256 GPUs; no GPU is
needed. Sampling is what stays on the GPU while engines sample. Beside each count stands what the
plan's arithmetic says of the actor's time (``rlmath/commands/plan/time.py``), relative to defaults
on the same GPUs, and the largest difference between the plan's memory and the count, of phases that
hold 1 GiB or more.

Prints one JSON line, or with ``--markdown`` the table of docs/records/performance.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.dry_run.compare import plan_of, rows  # noqa: E402
from benchmarks.dry_run.jobs import Job, RankCount, jobs_of  # noqa: E402
from benchmarks.dry_run.pool import Pool  # noqa: E402
from rlmath.commands.plan.gpus import GPUS, Efficiency  # noqa: E402
from rlmath.commands.plan.memory import GIB, moved_bytes  # noqa: E402
from rlmath.commands.plan.time import Work, actor_time_s, offload_time_s  # noqa: E402
from rlmath.errors import ConfigError  # noqa: E402
from rlmath.model.spec import model_spec  # noqa: E402

GPUS_PER_NODE = 8
NODES = (1, 8, 32)
PROMPT_TOKENS, RESPONSE_TOKENS = 1024, 15360
COMMON = (
    "cluster=gpu16x8",
    "model.dtype=bfloat16",
    "actor.sequence_parallel=true",
    f"data.max_prompt_tokens={PROMPT_TOKENS}",
    f"rollout.max_response_tokens={RESPONSE_TOKENS}",
    f"actor.max_tokens_per_microbatch={PROMPT_TOKENS + RESPONSE_TOKENS}",
)
WORK = Work(
    prompts=256,
    group_size=8,
    minibatches=4,
    prompt_tokens=PROMPT_TOKENS,
    response_tokens=RESPONSE_TOKENS,
    mean_response_tokens=RESPONSE_TOKENS // 2,
)
# As they are counted, and as the table names them.
PHASES = {
    "state": "sample",
    "log-probs": "log-probs",
    "update": "update",
    "weight sync": "weight sync",
}
COUNTED = (*PHASES, "optimizer step")


@dataclass(frozen=True)
class Subject:
    """A model and how its matrices are split."""

    name: str
    layout: tuple[str, ...]


MODELS = {
    "1.5B": Subject("Qwen2.5-1.5B", ("actor.tensor_parallel=1",)),
    "7B": Subject("Qwen2.5-7B", ("actor.tensor_parallel=4",)),
    "32B": Subject("Qwen2.5-32B", ("actor.tensor_parallel=8",)),
    "30B-A3B": Subject("Qwen3-30B-A3B", ("actor.tensor_parallel=2", "actor.expert_parallel=8")),
}
DEFAULTS = "defaults"
# Below this, as on a GPU that has offloaded all, a relative difference says nothing.
LEAST_BYTES = GIB
# Changed settings of each row; the first row is the actor without any of these settings.
SETTINGS: dict[str, tuple[str, ...]] = {
    "logits=whole": ("actor.logits=whole",),
    DEFAULTS: (),
    "recompute=selective": ("actor.recompute=selective",),
    "recompute=full": ("actor.recompute=full",),
    "offload=optimizer": ("actor.offload=optimizer",),
    "offload=all": ("actor.offload=all",),
    "lora.rank=32": ("actor.lora.rank=32",),
    "pipeline_parallel=2": ("actor.pipeline_parallel=2",),
    "pipeline_parallel=2, virtual_stages=2": (
        "actor.pipeline_parallel=2",
        "actor.virtual_stages=2",
    ),
    "offload=all, offload_in_backward": ("actor.offload=all", "actor.offload_in_backward=true"),
    "recompute=full, offload=all": ("actor.recompute=full", "actor.offload=all"),
    "recompute=full, offload=all, offload_in_backward": (
        "actor.recompute=full",
        "actor.offload=all",
        "actor.offload_in_backward=true",
    ),
}


@dataclass(frozen=True)
class Case:
    """One cell: a model on some nodes with some settings."""

    model: str
    settings: str
    nodes: int

    def jobs(self) -> list[Job]:
        """A rank of each stage."""
        subject = MODELS[self.model]
        overrides = (
            f"model.path=models/{subject.name}",
            *COMMON,
            f"cluster.nodes={self.nodes}",
            *subject.layout,
            *SETTINGS[self.settings],
        )
        return jobs_of(str(self), overrides, phases=COUNTED)

    @property
    def exists(self) -> bool:
        """Whether so few GPUs can be laid out so."""
        try:
            layout = self.jobs()[0].layout
        except ConfigError:
            return False
        return layout.tensor_parallel * layout.data_parallel % layout.expert_parallel == 0


def measure(case: Case, counts: Sequence[RankCount]) -> dict[str, Any]:
    """GiB of the fullest stage in each phase, and seconds of the actor."""
    phases = {
        name: max(count.phases[phase].gpu_bytes for count in counts) / GIB
        for phase, name in PHASES.items()
    }
    return {
        "model": case.model,
        "settings": case.settings,
        "gpus": case.nodes * GPUS_PER_NODE,
        "gib": {name: round(size, 2) for name, size in phases.items()},
        "plan_error": max(
            abs(row.error)
            for count in counts
            for row in rows(count)
            if row.counted_bytes >= LEAST_BYTES
        ),
        "actor_s": round(actor_seconds(case), 1),
    }


def actor_seconds(case: Case) -> float:
    """Times of log-probs, update and offload of a step, as the plan predicts on H100s."""
    job = case.jobs()[0]
    actor, step = plan_of(job)
    step = dataclasses.replace(step, minibatches=WORK.minibatches)
    spec, efficiency = model_spec(job.config), Efficiency()
    computing = sum(actor_time_s(spec, actor, WORK, GPUS["h100"], efficiency, GPUS_PER_NODE))
    return computing + offload_time_s(moved_bytes(spec, actor, step), efficiency)


def as_markdown(found: Sequence[dict[str, Any]]) -> str:
    """A line for each model and setting; cells have a number for each count of GPUs."""
    sizes = sorted({one["gpus"] for one in found})
    by_case = {(one["model"], one["settings"], one["gpus"]): one for one in found}

    def cell(
        model: str, settings: str, text: Callable[[dict[str, Any], dict[str, Any]], str]
    ) -> str:
        """The text of a case and of its model's defaults, for each count of GPUs."""
        cases = [by_case.get((model, settings, size)) for size in sizes]
        usual = [by_case[model, DEFAULTS, size] for size in sizes]
        return " / ".join(
            "–" if one is None else text(one, other)
            for one, other in zip(cases, usual, strict=True)
        )

    def gib(phase: str) -> Callable[[dict[str, Any], dict[str, Any]], str]:
        return lambda one, _: f"{one['gib'][phase]:.1f}"

    def slower(one: dict[str, Any], usual: dict[str, Any]) -> str:
        return f"{100 * one['actor_s'] / usual['actor_s'] - 100:+.0f}"

    head = ["model", "`actor.`", *PHASES.values(), "time, %"]
    lines = [head, ["---"] * len(head)]
    for model, settings in dict.fromkeys((one["model"], one["settings"]) for one in found):
        cells = [cell(model, settings, gib(phase)) for phase in PHASES.values()]
        name = settings if settings == DEFAULTS else f"`{settings}`"
        lines.append([model, name, *cells, cell(model, settings, slower)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--processes", type=int, default=1, help="that count side by side")
    parser.add_argument("--markdown", action="store_true", help="a table, with every setting")
    arguments = parser.parse_args()
    names = dict.fromkeys([DEFAULTS, *arguments.settings])
    settings = [name for name in SETTINGS if name in names]
    cases = [Case(m, s, n) for m in arguments.models for s in settings for n in NODES]
    cases = [case for case in cases if case.exists]
    by_case = [case.jobs() for case in cases]
    with Pool(arguments.processes) as pool:
        counts = iter(pool.count([job for jobs in by_case for job in jobs]))
    found = [
        measure(case, [next(counts) for _ in jobs])
        for case, jobs in zip(cases, by_case, strict=True)
    ]
    error = max(one["plan_error"] for one in found)
    if arguments.markdown:
        print(as_markdown(found))
        print(f"\nplan and count differ by at most {error:.1%}")
    else:
        print(json.dumps({"counts": found, "plan_error": round(error, 4)}))


if __name__ == "__main__":
    main()
