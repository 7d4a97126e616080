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
        min_significant_digits: a decimal can match a fraction or an irrational number only with at
            least this many significant digits. Unless the two are exactly equal.
        decimal_rel_tol: and only if it lies within this relative distance, inclusive.
        percent_either_way: whether `N%` equals `N` and `N/100` when one side alone has the sign.
            When False it equals `N/100` only.
        require_unit: whether an answer without a unit is wrong when the gold has one. Two
            different units are wrong in any case, and a unit is ignored when the gold has none.
        max_answer_chars: a longer answer is compared as a string only.
        max_tokens: an answer with more tokens is compared as a string only.
        max_depth: an answer nested more deeply is compared as a string only.
        max_exact_bits: integers up to this many bits are computed exactly in the fast layers.
        timeout_s: limit on one symbolic check, counted from the start of its job.
        memory_limit_mib: address-space limit of a worker process.
        startup_timeout_s: limit on the start of a worker process (it imports SymPy).
        max_jobs_per_worker: a worker is replaced after this many jobs.
        num_workers: symbolic worker processes.
        cache_size: remembered verdicts, by (normalized answer, gold). 0 switches the cache off.
        audit_fraction: share of the verdicts of the fast layers that are checked again with SymPy
            in the background; disagreements are written to `disagreement_path`.
        disagreement_path: JSONL file for sampled disagreements, or None.
        max_disagreements: no more than this many lines are written to it.
        verifier: name of a verifier that compares instead, see ``rlmath/grading/verifiers.py``.
        verifier_options: its options, as in YAML.
    """

    fallback: Fallback = Fallback.number
    min_significant_digits: int = 6
    decimal_rel_tol: float = 1e-6
    percent_either_way: bool = True
    require_unit: bool = False
    max_answer_chars: int = 8_000
    max_tokens: int = 2_000
    max_depth: int = 40
    max_exact_bits: int = 20_000
    timeout_s: float = 1.5
    memory_limit_mib: int = 1_024
    startup_timeout_s: float = 60.0
    max_jobs_per_worker: int = 2_000
    num_workers: int = LEAST_WORKERS
    cache_size: int = 100_000
    audit_fraction: float = 0.01
    disagreement_path: str | None = None
    max_disagreements: int = 1_000
    verifier: str | None = None
    verifier_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fallback not in list(Fallback):
            raise ValueError(f"fallback is {self.fallback!r}; it must be none, marker or number")
        positive = (
            *("min_significant_digits", "max_answer_chars", "max_tokens", "max_depth"),
            *("max_exact_bits", "timeout_s", "startup_timeout_s", "max_jobs_per_worker"),
            "num_workers",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.memory_limit_mib < 256:
            raise ValueError(
                f"memory_limit_mib is {self.memory_limit_mib}; a worker that has imported SymPy "
                "needs 256 or more"
            )
        if not 0 <= self.decimal_rel_tol < 1:
            raise ValueError(f"decimal_rel_tol is {self.decimal_rel_tol}; it must be in [0, 1)")
        if not 0 <= self.audit_fraction <= 1:
            raise ValueError(f"audit_fraction is {self.audit_fraction}; it must be in [0, 1]")
        if self.cache_size < 0 or self.max_disagreements < 0:
            raise ValueError("cache_size and max_disagreements must be 0 or more")
