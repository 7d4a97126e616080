"""How long engines idle at the end of a step, by the way in which samples are assigned to them.

A simulation: the driver's real assignment (``rlmath/rollout/generation.py``) and other ways, with
fake engines under a virtual clock (``benchmarks/simulation``). The 1.5B recipe: 512
problems x 16 samples on 128 engines of one GPU, log-normal response lengths of at most 27,648
tokens. A token held costs what reading its keys and values takes at 80 % of an H100's memory
bandwidth. The rest of a decode step and how alike a problem's lengths are (``--step-ms``,
``--problem-sd``) are not known: by default they are such that whole groups take 260 s at a mean of
14 thousand tokens, as published for RLinf's run of this recipe, and so are 2 ms with 0.7 and 4 ms
with 0.3.

Prints one JSON line: of each mean length and way of assignment, seconds and idle share, as the mean
over the seeds, and two lower bounds in seconds: of the longest response alone on an engine,
and of all tokens shared equally. ``--refill`` replaces a share of the groups when they finish, as
dynamic sampling does.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.simulation.lengths import OWN_SD  # noqa: E402
from benchmarks.simulation.virtual_engines import VirtualPool  # noqa: E402
from rlmath.engines.requests import Request  # noqa: E402
from rlmath.rollout.generation import Generation  # noqa: E402
from rlmath.rollout.imposed_lengths import log_level  # noqa: E402

ENGINES, PROBLEMS, GROUP_SIZE, LONGEST = 128, 512, 16, 27648
# Keys and values of Qwen2.5-1.5B in bfloat16: 28 layers, 2 heads of 128.
TOKEN_BYTES = 2 * 28 * 2 * 128 * 2
TOKEN_S = TOKEN_BYTES / (0.8 * 3.35e12)


class Lengths:
    """Response lengths of a step, and what is known of them beforehand.

    Args:
        seed: Seed of the draw.
        mean: Mean of all lengths, in tokens.
        problem_sd: Deviation of the logarithm of a length, between problems.
        problems: Including those that may replace others.
    """

    def __init__(self, seed: int, mean: float, problem_sd: float, problems: int) -> None:
        draw = np.random.default_rng(seed)
        level = log_level(mean, LONGEST, math.hypot(problem_sd, OWN_SD))
        self.level = level + draw.normal(0, problem_sd, problems)
        own = draw.normal(0, OWN_SD, (problems, GROUP_SIZE))
        lengths = np.exp(self.level[:, None] + own)
        self.tokens = np.clip(lengths, 1, LONGEST).astype(int)
        self.is_dropped = draw.random(problems)

    def __call__(self, request: Request) -> int:
        return int(self.tokens[int(request.problem_id), request.index])


class WholeGroups(Generation):
    """All samples of a problem to one engine, all at once."""

    def _choose(self, free: Sequence[int], alive: Sequence[int]) -> Iterator[tuple[int, Request]]:
        while free and len(self._queue) >= GROUP_SIZE:
            index = min(free, key=lambda i: len(self.held[i]))
            for _ in range(GROUP_SIZE):
                yield index, self._queue.popleft()


class FewestSamples(Generation):
    """Single samples to the engine that has the fewest, up to an equal share."""

    def load(self, index: int, rest: float) -> float:
        return rest * len(self.held[index])


class _Informed(Generation):
    """All at once, the longest first, to the engine with the least work so far."""

    work: Callable[[Request], float]

    def _choose(self, free: Sequence[int], alive: Sequence[int]) -> Iterator[tuple[int, Request]]:
        heap = [(sum(map(self.work, self.held[index].values())), index) for index in free]
        heapq.heapify(heap)
        for request in sorted(self._queue, key=self.work, reverse=True):
            work, index = heap[0]
            heapq.heapreplace(heap, (work + self.work(request), index))
            yield index, request
        self._queue.clear()


def with_lengths(name: str, work: Callable[[Request], float]) -> type[Generation]:
    """A way of assignment that knows something of the lengths."""
    return type(name, (_Informed,), {"work": staticmethod(work)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--means", type=float, nargs="+", default=[8000, 14000])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--engines", type=int, default=ENGINES)
    parser.add_argument("--step-ms", type=float, default=3.0)
    parser.add_argument("--problem-sd", type=float, default=0.5)
    parser.add_argument("--refill", type=float, default=0.0, help="share of groups replaced")
    arguments = parser.parse_args()
    results = [results_of(mean, arguments) for mean in arguments.means]
    print(
        json.dumps(
            {
                "benchmark": "generation_schedule",
                "simulation": True,
                "engines": arguments.engines,
                "samples": PROBLEMS * GROUP_SIZE,
                "seeds": arguments.seeds,
                "refill": arguments.refill,
                "step_ms": arguments.step_ms,
                "token_ns": round(TOKEN_S * 1e9, 2),
                "problem_sd": arguments.problem_sd,
                "own_sd": OWN_SD,
                "results": results,
            }
        )
    )


def results_of(mean: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every way of assignment, with lengths of one mean."""
    step_s = arguments.step_ms / 1000
    found: dict[str, list[tuple[float, float]]] = {}
    bounds: list[tuple[float, float]] = []
    for seed in range(arguments.seeds):
        problems = PROBLEMS if not arguments.refill else 4 * PROBLEMS
        lengths = Lengths(seed, mean, arguments.problem_sd, problems)
        for name, (kind, capacity) in ways(lengths, arguments.refill).items():
            pool = VirtualPool(
                arguments.engines, lengths, capacity=capacity, step_s=step_s, token_s=TOKEN_S
            )
            found.setdefault(name, []).append(play(pool, kind, lengths, arguments.refill))
        own = lengths.tokens[:PROBLEMS].astype(float)
        longest = float(own.max())
        reads = float((own**2).sum()) / 2 * TOKEN_S / arguments.engines
        bounds.append((longest * (step_s + longest / 2 * TOKEN_S), longest * step_s + reads))
    return {
        "mean_tokens": mean,
        "ways": {
            name: {
                "seconds": _mean(one[0] for one in rounds),
                "idle_share": round(statistics.mean(one[1] for one in rounds), 3),
            }
            for name, rounds in found.items()
        },
        "longest_alone_s": _mean(one[0] for one in bounds),
        "equal_shares_s": _mean(one[1] for one in bounds),
    }


def ways(lengths: Lengths, refill: float) -> dict[str, tuple[type[Generation], int]]:
    """Ways of assignment, each with how many samples an engine may have at once. What knows lengths
    assigns all samples at the beginning, and so not those of a refill."""

    def known_problem(request: Request) -> float:
        return math.exp(2 * lengths.level[int(request.problem_id)])

    def known_length(request: Request) -> float:
        return lengths(request) ** 2

    found: dict[str, tuple[type[Generation], int]] = {
        "whole_groups": (WholeGroups, 10**6),
        "fewest_samples": (FewestSamples, 256),
        "rlmath": (Generation, 256),
        "rlmath_48_at_once": (Generation, 48),
        "rlmath_32_at_once": (Generation, 32),
    }
    if not refill:
        found["problem_means_known"] = with_lengths("ProblemMeansKnown", known_problem), 256
        found["lengths_known"] = with_lengths("LengthsKnown", known_length), 256
    return found


def play(
    pool: VirtualPool, kind: type[Generation], lengths: Lengths, refill: float
) -> tuple[float, float]:
    """A round.

    Returns:
        Its seconds, and the engines' idle share.
    """
    waiting = dict.fromkeys(map(str, range(PROBLEMS)), GROUP_SIZE)
    asked = PROBLEMS
    new: list[Request] = []

    def more(idle: bool) -> Sequence[Request]:
        requests, new[:] = list(new), []
        return requests

    one = pool.begin([request for problem in waiting for request in group(problem)], kind)
    for sample in one.samples(more):
        waiting[sample.problem_id] -= 1
        dropped = lengths.is_dropped[int(sample.problem_id)] < refill
        if not waiting[sample.problem_id] and dropped:
            new += group(str(asked))
            waiting[str(asked)] = GROUP_SIZE
            asked += 1
    assert not any(waiting.values())
    return one.duration_s, one.idle_share()


def group(problem: str) -> list[Request]:
    """The requests of a problem."""
    return [Request(problem, i, (1,), LONGEST, 1.0, 1.0, seed=0) for i in range(GROUP_SIZE)]


def _mean(values: Iterator[float]) -> float:
    return round(statistics.mean(values), 1)


if __name__ == "__main__":
    main()
