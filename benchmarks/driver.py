"""What a step's tokens cost the driver and a rank: CPU seconds, bytes sent, memory.

The driver's real code on synthetic samples (log-normal response lengths, mean 8 thousand tokens,
at most 27,648, groups of 16, as in the 1.5B recipe). Engines and ranks are stubs, light Ray actors:
a stub engine hands over samples as an engine does, and a stub rank does with a batch what a rank
does on its CPU, with a random number where the model would compute a log-prob. Ranks are called one
after the other, and a rank's seconds are the mean over them: on a cluster they work at once.

``--millions`` gives the sizes in millions of tokens; 64 needs about 40 GB of memory, so the default
is what fits on a laptop. Each size runs in its own process. Prints one JSON line: CPU seconds
per million tokens of each phase, the sum of those in which GPUs wait, bytes sent to a rank per
token of its share, the peak of private memory per token of the step, and the exponents with which
these grow from the smallest size to the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from rlmath.actor.group import _assemble
from rlmath.actor.settings import TokenValues
from rlmath.algorithms.advantages import AdvantageSettings, token_advantages
from rlmath.algorithms.aggregation import token_weights
from rlmath.algorithms.filters import TruncatedRule
from rlmath.algorithms.mismatch import measure
from rlmath.batching import assign, minibatches
from rlmath.batching.from_groups import estimator_rewards, training_batch
from rlmath.monitor.samples import write_samples
from rlmath.rollout.requests import Progress
from rlmath.training.metrics import batch_metrics, rollout_metrics
from rlmath.types import GradedSample, Group, Problem, Sample, TrainingBatch

ROOT = Path(__file__).resolve().parents[1]
GROUP_SIZE, PROMPT_TOKENS, MEAN, LONGEST = 16, 200, 8000, 27648
DATA_PARALLEL, MINIBATCHES, BUDGET = 8, 4, 32768
# Phases in which all GPUs wait; the others run while engines still generate.
IDLE = ("rollout_metrics", "samples_file", "batch", "send", "rank", "return", "mismatch_advantages")


class StubEngine:
    """Makes samples as the step loop does, and hands them over as an engine does."""

    def samples(self, first: int, problems: int) -> Progress:
        made = []
        for problem in range(first, first + problems):
            draw = np.random.default_rng(problem)
            for index in range(GROUP_SIZE):
                count = length(draw)
                tokens = draw.integers(150_000, size=count, dtype=np.int32)
                log_probs = -draw.random(count, dtype=np.float32)
                made.append(
                    Sample(
                        problem_id=f"p{problem}",
                        index=index,
                        token_ids=tokens,
                        log_probs=log_probs,
                        text=" ".join(map(hex, tokens.tolist()))[: 4 * count],
                        finish_reason="stop",
                        weights_version=0,
                        seed=index,
                        engine=0,
                    )
                )
        return Progress(tuple(made), 0, 0, 0.0)


class StubRank:
    """Does with a batch what a rank does, but for the model."""

    def __init__(self) -> None:
        self.memory = Memory()

    def log_probs(self, batch: TrainingBatch, rank: int) -> tuple[TokenValues, float]:
        began = time.process_time()
        rows = self._rows(batch, rank)
        values = torch.rand(rows.numel())
        return TokenValues(rows, values, values), time.process_time() - began

    def update(self, batch: TrainingBatch, rank: int) -> float:
        began = time.process_time()
        for members in minibatches(batch.group_ids.tolist(), MINIBATCHES, 0):
            part = batch.select(members)
            weights = token_weights(
                "token_mean", part.loss_mask, part.response_lengths, part.group_ids
            )
            rows = self._rows(part, rank)
            for field in (part.old_log_probs, part.engine_log_probs, part.advantages, weights):
                assert field is not None
                field[rows]
        return time.process_time() - began

    def peak(self) -> int:
        return self.memory.peak()

    def _rows(self, batch: TrainingBatch, rank: int) -> torch.Tensor:
        lengths = batch.sequence_lengths
        starts = torch.cumsum(lengths, 0) - lengths
        first = torch.cumsum(batch.response_lengths, 0) - batch.response_lengths
        rows = []
        for one in assign(lengths.tolist(), DATA_PARALLEL, BUDGET)[rank]:
            for i in one.sequences:
                start, size = int(starts[i]), int(lengths[i])
                batch.tokens[start : start + size].long()
                at = int(first[i])
                rows.append(torch.arange(at, at + int(batch.response_lengths[i])))
        return torch.cat(rows)


class Memory:
    """The peak of this process's private memory since it was made, in bytes."""

    def __init__(self) -> None:
        self._base = self._peak = private_memory()
        threading.Thread(target=self._watch, daemon=True).start()

    def peak(self) -> int:
        return self._peak - self._base

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, private_memory())
            time.sleep(0.005)


def private_memory() -> int:
    """Bytes of this process that no other shares."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def length(draw: np.random.Generator) -> int:
    """Of a response, in tokens."""
    return max(1, min(LONGEST, int(draw.lognormal(math.log(MEAN) - 0.5, 1.0))))


class Phases:
    """CPU seconds of this process, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] += time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one_step(arguments.millions[0])))
        return
    sizes = []
    for millions in arguments.millions:
        done = subprocess.run(
            [sys.executable, __file__, "--one", "--millions", str(millions)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        sizes.append(json.loads(done.stdout.splitlines()[-1]))
    exponents = {}
    if len(sizes) > 1:
        names = ("idle_cpu_s", "driver_bytes", "rank_bytes")
        exponents = {name: exponent(sizes[0], sizes[-1], name) for name in names}
    print(json.dumps({"benchmark": "driver", "stubs": True, "sizes": sizes, "growth": exponents}))


def exponent(small: dict[str, Any], large: dict[str, Any], name: str) -> float:
    """``a`` in ``y ~ tokens^a``; 1 is linear."""
    ratio = max(large[name], 1e-9) / max(small[name], 1e-9)
    return round(math.log(ratio) / math.log(large["tokens"] / small["tokens"]), 3)


def one_step(millions: float) -> dict[str, Any]:
    """One step of about ``millions`` million tokens."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    engine, rank = ray.remote(StubEngine).remote(), ray.remote(StubRank).remote()
    ray.get(rank.peak.remote())
    problems = max(1, round(millions * 1e6 / (MEAN * GROUP_SIZE)))
    phase, memory = Phases(), Memory()
    groups = receive(engine, problems, phase)
    with phase("rollout_metrics"):
        rollout_metrics(groups)
    with tempfile.TemporaryDirectory() as folder, phase("samples_file"):
        write_samples(folder, 1, groups)
    with phase("batch"):
        batch = training_batch(groups, truncated=TruncatedRule.keep, mask_duplicates=True)
        batch_metrics(batch)
    tokens = int(batch.tokens.numel())
    sent = 0
    ranks = list(range(DATA_PARALLEL))
    with phase("send"):
        ref = ray.put(batch)
    sent += size_of(batch)
    shares = ray.get([rank.log_probs.remote(ref, i) for i in ranks])
    phase.seconds["rank"] += sum(seconds for _, seconds in shares) / len(ranks)
    with phase("return"):
        old, _ = _assemble([share for share, _ in shares], batch)
    with phase("mismatch_advantages"):
        measure(old, batch.engine_log_probs)
        settings = AdvantageSettings()
        advantages = token_advantages(
            estimator_rewards(groups, settings),
            batch.group_ids,
            batch.response_lengths,
            batch.loss_mask,
            settings,
        )
    batch = dataclasses.replace(batch, old_log_probs=old, advantages=advantages)
    with phase("send"):
        ref = ray.put(batch)
    sent += size_of(batch)
    seconds = ray.get([rank.update.remote(ref, i) for i in ranks])
    phase.seconds["rank"] += sum(seconds) / len(ranks)
    peak = ray.get(rank.peak.remote())
    ray.shutdown()
    return {
        "tokens": tokens,
        "cpu_s_per_million_tokens": {
            name: round(value / tokens * 1e6, 4) for name, value in phase.seconds.items()
        },
        "idle_cpu_s": round(sum(phase.seconds[name] for name in IDLE), 4),
        "idle_cpu_s_per_million_tokens": round(
            sum(phase.seconds[name] for name in IDLE) / tokens * 1e6, 4
        ),
        "bytes_sent_per_token_of_share": round(sent / (tokens / DATA_PARALLEL), 2),
        "driver_bytes": memory.peak(),
        "driver_bytes_per_token": round(memory.peak() / tokens, 1),
        "rank_bytes": peak,
        "rank_bytes_per_token": round(peak / tokens, 1),
    }


def receive(engine: Any, problems: int, phase: Phases) -> list[Group]:
    """The step's groups, as an engine's answers bring them."""
    groups = []
    for first in range(problems):
        ref = engine.samples.remote(first, 1)
        ray.wait([ref])
        with phase("receive"):
            progress: Progress = ray.get(ref)
        problem = Problem(f"p{first}", "?" * PROMPT_TOKENS, (7,) * PROMPT_TOKENS, ("1",))
        groups.append(Group(problem, tuple(graded(progress.samples))))
    return groups


def graded(samples: Sequence[Sample]) -> list[GradedSample]:
    """Grading is measured by ``benchmarks/grading.py``."""
    return [
        GradedSample(sample, float(i % 2), bool(i % 2), "correct" if i % 2 else "wrong")
        for i, sample in enumerate(samples)
    ]


def size_of(value: Any) -> int:
    """Bytes of a value in the object store."""
    buffers: list[Any] = []
    body = ray.cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(body) + sum(one.raw().nbytes for one in buffers)


if __name__ == "__main__":
    main()
