"""Every setting of the grader, with its default and its unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

TASKS = ("math", "multiple_choice", "text")


class Fallback(StrEnum):
    """Where to look for an answer when there is no box; see ``GradingSettings``."""

    none = "none"
    marker = "marker"
    number = "number"


# Fallback of rewards: a policy that is rewarded for any number learns to name many.
REWARD_FALLBACK = Fallback.none
# Rewards of the recipe for a right final answer, and for any other.
CORRECT, INCORRECT = 5.0, -5.0

# Workers of a run's grader if the settings leave it open. The fast layers decide most answers on
# the driver; the rest comes in bursts and waits for a worker.
LEAST_WORKERS, MOST_WORKERS = 2, 32


def workers_for(cores: int) -> int:
    """Worker processes of a driver with ``cores`` cores: a quarter."""
    return min(max(cores // 4, LEAST_WORKERS), MOST_WORKERS)


@dataclass(frozen=True)
class GradingSettings:
    """Settings of extraction, equality and the worker pool.

    Attributes:
        fallback: where to look when there is no box. `none`: nowhere; `marker`: the last
            `<answer>…</answer>`, then what follows "answer is", "answer:", "答案是" or `####`;
            `number`: then also the last number. Neither reads the sentence around the answer, so
            train with `none`.
        require_unit: whether an answer without a unit is wrong when the gold has one. Two
            different units are wrong in any case, and a unit is ignored when the gold has none.
        timeout_s: limit on one symbolic check, counted from the start of its job.
        memory_limit_mib: address-space limit of a worker process.
        startup_timeout_s: limit on the start of a worker process (it imports SymPy).
        max_jobs_per_worker: a worker is replaced after this many jobs.
        num_workers: symbolic worker processes.
        cache_size: remembered verdicts, by (normalized answer, gold). 0 switches the cache off.
        audit_fraction: share of the verdicts of the fast layers that are checked again with SymPy
            in the background; disagreements are written to `disagreement_path`.
        disagreement_path: JSONL file for sampled disagreements, or None.
        verifier: name of a verifier that compares instead, see ``rlmath/grading/verifiers.py``.
        verifier_options: its options, as in YAML.
    """

    fallback: Fallback = Fallback.number
    require_unit: bool = False
    timeout_s: float = 1.5
    memory_limit_mib: int = 1_024
    startup_timeout_s: float = 60.0
    max_jobs_per_worker: int = 2_000
    num_workers: int = LEAST_WORKERS
    cache_size: int = 100_000
    audit_fraction: float = 0.01
    disagreement_path: str | None = None
    verifier: str | None = None
    verifier_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fallback not in list(Fallback):
            raise ValueError(f"fallback is {self.fallback!r}; it must be none, marker or number")
        for name in ("timeout_s", "startup_timeout_s", "max_jobs_per_worker", "num_workers"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.memory_limit_mib < 256:
            raise ValueError(
                f"memory_limit_mib is {self.memory_limit_mib}; a worker that has imported SymPy "
                "needs 256 or more"
            )
        if not 0 <= self.audit_fraction <= 1:
            raise ValueError(f"audit_fraction is {self.audit_fraction}; it must be in [0, 1]")
        if self.cache_size < 0:
            raise ValueError(f"cache_size is {self.cache_size}; it must be 0 or more")
