"""The plan's closed form beside what a dry run counted, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.dry_run.jobs import Job, RankCount
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.memory import GIB, MIB, Phase, Step, stage_phases
from rlmath.model.spec import model_spec

# Phases of the plan that make up one of the count; the fullest is its peak.
_PARTS = {
    "update": ("logits", "training", "optimizer step"),
    "value update": ("value training", "value optimizer step"),
}


@dataclass(frozen=True)
class Row:
    """One phase of one rank.

    Attributes:
        job: The rank.
        phase: As it was counted.
        plan: Prediction of the plan, with its terms.
        counted_bytes: The count.
        contents: Contents of the count, by type and shape.
    """

    job: Job
    phase: str
    plan: Phase
    counted_bytes: int
    contents: dict[str, int]

    @property
    def error(self) -> float:
        """The plan's, relative to the count; below 0: the plan is short."""
        return self.plan.num_bytes / self.counted_bytes - 1

    def describe(self) -> str:
        """Both sides, term by term, in GiB."""
        terms = [f"    {size / GIB:8.3f}  {name}" for name, size in self.plan.terms.items()]
        most = [f"    {size / GIB:8.3f}  {what}" for what, size in self.contents.items()][:16]
        return "\n".join(
            [
                f"{self.job.name}, stage {self.job.stage}, {self.phase}: plan "
                f"{self.plan.num_bytes / GIB:.3f} GiB, counted {self.counted_bytes / GIB:.3f} GiB "
                f"({self.error:+.1%})",
                f"  plan ({self.plan.name}):",
                *terms,
                "  counted:",
                *most,
            ]
        )


def plan_of(job: Job) -> tuple[ActorShape, Step]:
    """The job in the plan's terms."""
    actor = ActorShape(
        job.layout,
        job.recompute_layers,
        job.microbatch_tokens,
        "local",
        job.lora,
        job.recompute_modules,
        job.overlap_gradients,
        job.overlap_param_gather,
    )
    step = Step(
        microbatches=job.microbatches,
        longest_tokens=max(sum(pair) for pair in job.lengths),
        bucket_bytes=job.bucket_mib * MIB,
        reference=job.reference,
        value_model=job.value_model,
        lm_head_float32=job.lm_head_float32,
        whole_logits=job.whole_logits,
        offload=job.offload,
        offload_in_backward=job.offload_in_backward,
    )
    return actor, step


def rows(count: RankCount) -> list[Row]:
    """Every phase that was counted."""
    job = count.job
    actor, step = plan_of(job)
    phases = {one.name: one for one in stage_phases(model_spec(job.config), actor, step, job.stage)}
    found = []
    for name, counted in count.phases.items():
        parts = [phases[part] for part in _PARTS.get(name, (name,)) if part in phases]
        plan = max(parts, key=lambda one: one.num_bytes)
        found.append(Row(job, name, plan, counted.gpu_bytes, counted.contents))
    return found


def worst(counts: Iterable[RankCount]) -> Row:
    """The phase in which plan and count differ most."""
    return max((row for count in counts for row in rows(count)), key=lambda row: abs(row.error))
