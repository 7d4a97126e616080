"""Cost of a step's tokens for the driver and a rank: CPU seconds, bytes sent, memory.

The driver's real code on synthetic samples (log-normal response lengths, mean 8 thousand tokens,
at most 27,648, groups of 16, as in the 1.5B recipe). Engines and ranks are stubs, light Ray actors:
a stub engine hands over samples as an engine does, and a stub rank has a rank's own step with a
random number where the model would compute a log-prob. Ranks are called one after the other, and a
rank's seconds are the mean over them: on a cluster they work at once. One of them has a process for
itself, whose memory is measured; another process plays all others.

``--millions`` gives the sizes in millions of tokens; 64 take 4 GB of memory, half of it shared.
Each size runs in its own process. Its second step is measured: pages of memory that a process, or
Ray's object store, touches for the first time cost more than what is written to them, and a run has
many steps. Prints one JSON line: CPU seconds per million tokens of each phase, the sum of those in
which GPUs wait (and that sum of the first step), bytes sent to a rank over 8 bytes per token of its
share, the peak of private memory per token of the step, and the exponents with which these grow
from the smallest size to the largest.
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
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch

from rlmath.actor.loss_fields import LossFields
from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_step import RankStep
from rlmath.actor.settings import UpdateResult
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.advantages import AdvantageSettings, sequence_advantages
from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.filters import TruncatedRule
from rlmath.algorithms.peers import Alone
from rlmath.batching.from_groups import SampleRewards, estimator_rewards, sampled_sequences
from rlmath.batching.shards import Shard, ShardSettings, Share, shards
from rlmath.config.schema import Config
from rlmath.engines.requests import Progress
from rlmath.monitor.json_lines import LinesProcess
from rlmath.monitor.repetition import repetition
from rlmath.monitor.samples import write_samples
from rlmath.training.checks.independent import dependent_samples
from rlmath.training.checks.samples import wrong_ends, wrong_prompts, wrong_rewards
from rlmath.training.checks.sequences import expected_sequences
from rlmath.training.metrics import batch_metrics, rollout_metrics
from rlmath.types import GradedSample, Group, Problem, Sample

ROOT = Path(__file__).resolve().parents[1]
GROUP_SIZE, PROMPT_TOKENS, MEAN, LONGEST = 16, 200, 8000, 27648
MINIBATCHES, BUDGET = 4, 32768
# The token that ends a response, and how many tokens are below it.
END = 150_000
PLAN = StepPlan(passes=("old",), minibatches=MINIBATCHES)
# Phases in which all GPUs wait. Samples are received and graded while engines generate, and their
# file is written while the ranks compute.
IDLE = ("rollout_metrics", "batch", "checks", "send", "rank", "return", "mismatch_advantages")


class StubEngine:
    """Makes samples as the step loop does, and hands them over as an engine does."""

    def samples(self, first: int, problems: int) -> Progress:
        made = []
        for problem in range(first, first + problems):
            draw = np.random.default_rng(problem)
            for index in range(GROUP_SIZE):
                count = length(draw)
                tokens = draw.integers(END, size=count, dtype=np.int32)
                tokens[-1] = END
                log_probs = -draw.random(count, dtype=np.float32)
                made.append(
                    Sample(
                        problem_id=f"p{problem}",
                        index=index,
                        token_ids=tokens,
                        log_probs=log_probs,
                        text=" ".join(map(hex, tokens.tolist()))[: 4 * count],
                        finish_reason="stop",
                        spans=((0, 0),),
                        seed=index,
                        engine=0,
                    )
                )
        return Progress(tuple(made), 0, 0, 0, 0.0)


class StubModel(Alone):
    """Stands where a rank has its policy: packs, and draws numbers."""

    is_last_stage = reports = True

    def shard_log_probs(self, shard: Shard, name: str = "policy", seed: int = 0) -> TokenValues:
        tokens = shard.batch.loss_mask.numel()
        self._read(shard.whole())
        return TokenValues(torch.arange(tokens), -torch.rand(tokens), torch.rand(tokens))

    def update_shard(self, shard: Shard, plan: StepPlan) -> UpdateResult:
        for share in shard.shares():
            batch = share.batch
            micro_batches = self._read(share)
            fields = {
                "old_log_probs": batch.old_log_probs,
                "engine_log_probs": batch.engine_log_probs,
                "advantages": batch.advantages,
                "mask": batch.loss_mask,
                "weights": share.weights,
            }
            LossFields(micro_batches, torch.device("cpu"), fields)
        return UpdateResult([{}], {}, None)

    def _read(self, share: Share) -> list[Any]:
        # The fields that the packing reads; the others belong to Megatron.
        batch = share.batch
        ends = torch.cumsum(batch.response_lengths, 0).tolist()
        starts, found = [0, *ends], []
        batch.tokens.long()
        for one in share.micro_batches:
            rows = torch.arange(starts[one.sequences[0]], ends[one.sequences[-1]])
            found.append(SimpleNamespace(response_rows=rows))
        return found


class StubRank:
    """A rank's own step around a stub model. May play several data-parallel ranks, in turn."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.seconds: dict[str, float] = defaultdict(float)

    def call(self, method: str, shard: Any, *arguments: Any) -> Any:
        """A call of the rank with this shard; the other calls go to the same one."""
        began = time.process_time()
        if method == "part":
            self.step = RankStep(StubModel(), None, shard)
            result = None
        else:
            result = getattr(self.step, method)(*arguments)
        self.seconds[method] += time.process_time() - began
        return result

    def reset(self) -> None:
        """Forget what was measured."""
        self.memory = Memory()
        self.seconds.clear()

    def reset_seconds(self) -> None:
        """Forget the seconds, and not the peak of memory."""
        self.seconds.clear()

    def cost(self) -> tuple[dict[str, float], int]:
        return dict(self.seconds), self.memory.peak()


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
    """Length of a response, in tokens."""
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
    parser.add_argument("--data-parallel", type=int, default=8, help="ranks that share a step")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ranks = arguments.data_parallel
    if arguments.one:
        print(json.dumps(one_size(arguments.millions[0], ranks)))
        return
    sizes = []
    for millions in arguments.millions:
        done = subprocess.run(
            [
                *(sys.executable, __file__, "--one"),
                *("--millions", str(millions), "--data-parallel", str(ranks)),
            ],
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
    result = {"benchmark": "driver", "stubs": True, "data_parallel": ranks}
    print(json.dumps(result | {"sizes": sizes, "growth": exponents}))


def exponent(small: dict[str, Any], large: dict[str, Any], name: str) -> float:
    """``a`` in ``y ~ tokens^a``; 1 is linear."""
    ratio = max(large[name], 1e-9) / max(small[name], 1e-9)
    return round(math.log(ratio) / math.log(large["tokens"] / small["tokens"]), 3)


def one_size(millions: float, ranks: int) -> dict[str, Any]:
    """Two steps of about ``millions`` million tokens, of which the second is measured."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    engine = ray.remote(StubEngine).remote()
    players = [ray.remote(StubRank).remote() for _ in range(2)]
    lines = LinesProcess()
    problems = max(1, round(millions * 1e6 / (MEAN * GROUP_SIZE)))
    # Once with little, for what Python and torch do at the first call.
    play(engine, players, lines, 4, Phases(), min(ranks, 8))
    ray.get([one.reset.remote() for one in players])
    first, phase, memory = Phases(), Phases(), Memory()
    play(engine, players, lines, problems, first, ranks)
    first.seconds["rank"] = rank_seconds(players, ranks)
    ray.get([one.reset_seconds.remote() for one in players])
    tokens, sent = play(engine, players, lines, problems, phase, ranks)
    phase.seconds["rank"] = rank_seconds(players, ranks)
    peak = ray.get(players[0].cost.remote())[1]
    lines.close()
    ray.shutdown()
    idle, of_first = (sum(one.seconds[name] for name in IDLE) for one in (phase, first))
    return {
        "tokens": tokens,
        "cpu_s_per_million_tokens": {
            name: round(value / tokens * 1e6, 4) for name, value in phase.seconds.items()
        },
        "idle_cpu_s": round(idle, 4),
        "idle_cpu_s_per_million_tokens": round(idle / tokens * 1e6, 4),
        "first_step_idle_cpu_s_per_million_tokens": round(of_first / tokens * 1e6, 4),
        "bytes_sent_over_8_bytes_per_token": round(sent, 4),
        "driver_bytes": memory.peak(),
        "driver_bytes_per_token": round(memory.peak() / tokens, 1),
        "rank_bytes": peak,
        "rank_bytes_per_token": round(peak / tokens, 1),
    }


def rank_seconds(players: Sequence[Any], ranks: int) -> float:
    """Figures of one rank, the mean over all that were played."""
    costs = ray.get([one.cost.remote() for one in players])
    return float(sum(sum(seconds.values()) for seconds, _ in costs) / ranks)


def play(
    engine: Any,
    players: Sequence[Any],
    lines: LinesProcess,
    problems: int,
    phase: Phases,
    ranks: int,
) -> tuple[int, float]:
    """A step, of which the first player is rank 0, and the second all others.

    Returns:
        Its tokens; and over 8 bytes a token, of the rank with the most, the bytes that the driver
        sends it.
    """
    groups = receive(engine, problems, phase)
    with phase("rollout_metrics"):
        rollout_metrics(groups)
    with tempfile.TemporaryDirectory() as folder, phase("samples_file"):
        write_samples(folder, 1, groups, process=lines)
    with phase("batch"):
        sequences = sampled_sequences(groups, truncated=TruncatedRule.keep, mask_duplicates=True)
        batch_metrics(sequences)
    with phase("checks"):
        step_checks(groups, sequences.loss_token_counts)
    tokens = int(sequences.sequence_lengths.sum())
    settings = dataclasses.replace(ShardSettings(ranks, BUDGET), minibatches=MINIBATCHES)
    shares, refs, sent = [], [], 0.0
    dealt = shards(sequences, settings)
    for _ in range(ranks):
        with phase("send"):
            shard = next(dealt)
            refs.append(ray.put(shard))
            shares.append(shard.places)
        sent = max(sent, size_of(shard) / (8 * int(shard.batch.sequence_lengths.sum())))
        del shard
    alignments, figures = [], []
    advantage = AdvantageSettings()
    for i, ref in enumerate(refs):
        rank = players[min(i, 1)]
        ray.get(rank.call.remote("part", ref))
        answer = rank.call.remote("run_passes", None, PLAN)
        ray.wait([answer])
        with phase("return"):
            alignments.append(ray.get(answer))
        with phase("mismatch_advantages"):
            if not i:
                found = sequence_advantages(
                    estimator_rewards(SampleRewards.of(groups, {}), advantage),
                    sequences.group_ids,
                    sequences.loss_token_counts,
                    advantage,
                )
            own = found.select(shares[i])
        figures.append(ray.get(rank.call.remote("add_advantages", None, PLAN, own)))
        ray.get(rank.call.remote("update", None, PLAN))
    with phase("mismatch_advantages"):
        joined = Alignment.join(alignments)
        joined.fresh.metrics()
    assert sorted(joined.places.tolist()) == list(range(len(sequences)))
    return tokens, sent


def step_checks(groups: Sequence[Group], tokens: torch.Tensor) -> None:
    """The data of all samples and tokens that the driver's step checks read."""
    samples = [one for group in groups for one in group.samples]
    broken = wrong_prompts(groups)
    broken += wrong_ends(samples, frozenset((END,)), frozenset((LONGEST,)))
    item = SimpleNamespace(label="math", weight=1.0, reward=None)
    broken += wrong_rewards(samples, [item], penalized=False)
    broken += dependent_samples([[one.sample for one in group.samples] for group in groups])
    expected_sequences(Config(), groups, tokens, {})
    assert not broken, broken


def receive(engine: Any, problems: int, phase: Phases) -> list[Group]:
    """The step's groups, as an engine's answers bring them."""
    groups = []
    for first in range(problems):
        ref = engine.samples.remote(first, 1)
        ray.wait([ref])
        with phase("receive"):
            progress: Progress = ray.get(ref)
        problem = Problem(f"p{first}", "?" * PROMPT_TOKENS, (7,) * PROMPT_TOKENS, ("1",))
        with phase("grade"):
            groups.append(Group(problem, tuple(grade_all(progress.samples))))
    return groups


def grade_all(samples: Sequence[Sample]) -> list[GradedSample]:
    """With what is seen of each sample while others generate; grading itself is measured by
    ``benchmarks/grading.py``."""
    return [
        GradedSample(
            sample,
            float(i % 2),
            bool(i % 2),
            "correct" if i % 2 else "wrong",
            rewards={"math": float(i % 2)},
            repetition=repetition(sample.text, sample.token_ids),
        )
        for i, sample in enumerate(samples)
    ]


def size_of(value: Any) -> int:
    """Bytes of a value in the object store."""
    buffers: list[Any] = []
    body = ray.cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(body) + sum(one.raw().nbytes for one in buffers)


if __name__ == "__main__":
    main()
