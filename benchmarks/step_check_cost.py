r"""Cost of step checks in a live run, in each process.

    RLMATH_CHECK_COST=FOLDER \\
      rlmath train experiment=quickstart plugins=[benchmarks/step_check_cost.py]
    python benchmarks/step_check_cost.py FOLDER RUN_DIR

The first command is a run with a timer around each check of the driver and around what the ranks
do for them. The second prints milliseconds per step, on the wall and of the thread's CPU, and their
share of a step's time. What a check waits for in a collective is apart: the step's next collective
would wait for the same rank.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "RLMATH_CHECK_COST"
# The first steps touch memory for the first time, and start the second grader.
WARM_UP = 2
# Functions of the ranks: module, class or nothing, and functions; an update ends with the last one.
IN_RANKS = (
    (
        "actor.gradient_shares",
        "GradientShares",
        ("begin", "_receive", "sums", "gradient_sizes", "nothing_given", "differs_from", "totals"),
    ),
    ("actor.step_probe", "StepProbe", ("before", "after")),
    ("actor.model_base", "RankModel", ("check_given", "worst_findings")),
    ("actor.policy", "MegatronActor", ("_compute_again", "_compare_slopes")),
    ("actor.policy", "", ("sequence_report",)),
    ("actor.policy_loss", "", ("sums_of_sequences",)),
    ("actor.frozen_weights", "FrozenWeights", ("find_changed",)),
    ("weights.gather", "BucketGatherer", ("find_drift",)),
)
# Older than the step checks, and with other users: the gate, and fingerprints of all weights.
NOT_COUNTED = ("LogProbAgreement", "ChangedWeights", "EngineConstants", "LeftoverMemory")


class Timer:
    """Seconds of functions in this process, of each step; what one of them calls is its own."""

    def __init__(self, kind: str) -> None:
        self.kind, self.steps = kind, 0
        # On the wall, of the thread's CPU, the number of calls, and in collectives.
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        self._inside = threading.local()

    def time_function(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a timer around it."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            if getattr(self._inside, "name", None):
                return function(*arguments, **options)
            self._inside.name = name
            began = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self._inside.name = None
                if self.steps >= WARM_UP:
                    self.seconds[name][0] += time.perf_counter() - began[0]
                    self.seconds[name][1] += time.thread_time() - began[1]
                    self.seconds[name][2] += 1

        return run

    def collective(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A collective whose time on the wall is that of the check which calls it as well."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                name = getattr(self._inside, "name", None)
                if name and self.steps >= WARM_UP:
                    self.seconds[name][3] += time.perf_counter() - began

        return run

    def end_step(self) -> None:
        """Count a step, and write down what there is."""
        self.steps += 1
        if self.steps == WARM_UP:
            self._cpu = time.process_time()
        if self.steps > WARM_UP:
            cpu = time.process_time() - self._cpu
            found = {"kind": self.kind, "steps": self.steps - WARM_UP, "cpu_s": cpu}
            path = Path(os.environ[FOLDER], f"{self.kind}_{os.getpid()}.json")
            path.write_text(json.dumps(found | {"seconds": self.seconds}))

    def ending(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function after which a step is counted."""

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            finally:
                self.end_step()

        return run


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in its place."""
    setattr(owner, name, make(getattr(owner, name)))


def plant() -> None:
    """Put timers around the checks, in whatever process this is."""
    driver, rank = Timer("driver"), Timer("rank")
    importlib.import_module("rlmath.training.checks.catalog")
    base = importlib.import_module("rlmath.training.checks.base")
    for check in base.StepCheck.__subclasses__():
        for name in ("before_update", "after_update", "after_sync"):
            if name in vars(check):
                replace(check, name, functools.partial(driver.time_function, check.__name__))
    # The weight sync is the last part of a step.
    replace(base.StepChecks, "after_sync", driver.ending)
    for module, owner, names in IN_RANKS:
        found = importlib.import_module(f"rlmath.{module}")
        for name in names:
            where = getattr(found, owner) if owner else found
            replace(where, name, functools.partial(rank.time_function, name))
    distributed = importlib.import_module("torch.distributed")
    for name in ("all_reduce", "all_gather_into_tensor", "all_gather_object"):
        replace(distributed, name, rank.collective)
    worker = importlib.import_module("rlmath.actor.rank_step").RankStep
    replace(worker, "update", rank.ending)


def report(folder: Path, run_dir: Path) -> None:
    """Print what was measured."""
    processes = [json.loads(one.read_text()) for one in sorted(folder.glob("*.json"))]
    lines = [json.loads(one) for one in (run_dir / "metrics.jsonl").read_text().splitlines()]
    walls = sorted(line["timing/step"] for line in lines if line["step"] > WARM_UP)
    wall = sum(walls) / len(walls)
    print(f"{len(walls)} steps of {wall:.3f} s, {walls[len(walls) // 2]:.3f} in the median")
    for one in processes:
        steps = one["steps"]
        counted = [0.0, 0.0, 0.0]
        print(f"{one['kind']}: {one['cpu_s'] / steps:.3f} s of CPU per step")
        for name, seconds in sorted(one["seconds"].items(), key=lambda pair: -pair[1][1]):
            own = [1e3 * seconds[place] / steps for place in (0, 1, 3)]
            calls = seconds[2] / steps
            other = name in NOT_COUNTED
            print(
                f"  {name:<20} {own[0]:8.2f} ms wall, {own[2]:8.2f} of them in collectives, "
                f"{own[1]:8.2f} ms CPU in {calls:7.1f} calls"
                f"{' *' * other}"
            )
            if not other:
                counted = [a + b for a, b in zip(counted, own, strict=True)]
        print(
            f"  {'together':<20} {counted[0]:8.2f} ms wall, {counted[2]:8.2f} of them in "
            f"collectives, {counted[1]:8.2f} ms CPU"
        )
        shares = [one / wall / 10 for one in (counted[0] - counted[2], counted[1])]
        print(f"  of a step's time {shares[0]:.2f} % wall but collectives, {shares[1]:.2f} % CPU")


if __name__ == "__main__":
    report(Path(sys.argv[1]), Path(sys.argv[2]))
elif os.environ.get(FOLDER):
    plant()
