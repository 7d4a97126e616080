"""Ranks and engines for the checks: a run's own parts, started from a run's own settings."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from rlmath.actor.group import ActorGroup
from rlmath.actor.plan import StepPlan
from rlmath.algorithms.mismatch import measure
from rlmath.checks import run as checks
from rlmath.commands.selfcheck.material import random_tokens, with_advantages
from rlmath.commands.selfcheck.node import ENGINE_SHARE, Node
from rlmath.commands.selfcheck.record import Record
from rlmath.config.load import load
from rlmath.config.quoting import path_override
from rlmath.config.schema import Config
from rlmath.engines.requests import Request
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.seeds import request_seed
from rlmath.training.gate import limits, measure_noise
from rlmath.training.opening import open_engines, open_training
from rlmath.types import Sample, TrainingBatch
from rlmath.validation.probe import batch_of

T = TypeVar("T")

PROMPT_TOKENS = 48
RESPONSE_TOKENS = 80
# So large that an update changes nearly every weight, also in bfloat16.
LEARNING_RATE = 1e-3


def settings(node: Node, folder: str, gpus: int, overrides: Sequence[str] = ()) -> Config:
    """Checked settings of a run on this node, small in all but the model. ``folder``: name of the
    run's folder in that of the check. ``gpus``: GPUs of the run; ignored on CPU."""
    problems = Path(node.folder) / "problems.jsonl"
    problems.write_text('{"prompt": "1 + 1?", "solutions": ["2"]}\n', encoding="utf-8")
    config = load(
        [
            f"data.train_paths=[{problems}]",
            path_override("model.path", node.model),
            f"model.dtype={node.dtype}",
            path_override("runner.run_dir", f"{node.folder}/{folder}"),
            f"cluster.device={node.device}",
            f"cluster.gpus_per_node={max(1, gpus)}",
            f"data.max_prompt_tokens={PROMPT_TOKENS}",
            f"rollout.max_response_tokens={RESPONSE_TOKENS}",
            "rollout.max_running_sequences=32",
            "rollout.cpu_kv_cache_gib=0.125",
            f"rollout.gpu_memory_utilization={ENGINE_SHARE:g}",
            # Graphs take a minute to capture and matter to throughput alone.
            "rollout.enforce_eager=true",
            "algorithm.prompts_per_step=8",
            "algorithm.group_size=4",
            "algorithm.minibatches_per_step=1",
            "runner.steps=1",
            f"actor.optimizer.lr={LEARNING_RATE:g}",
            "actor.optimizer.adam_eps=1e-8",
            "actor.max_tokens_per_microbatch=4096",
            "reward.num_workers=1",
            # No run is saved here, and one check saves its own, so one checkpoint's room on disk is
            # enough.
            "runner.save_every=0",
            # An engine that fails is the finding; starting it again would take minutes.
            "rollout.max_engine_restarts=0",
            *overrides,
        ]
    )
    checks.check(config, "train")
    return config


@contextlib.contextmanager
def start(
    config: Config, record: Record, name: str = "ranks and engines"
) -> Iterator[tuple[ActorGroup, RolloutPool]]:
    """Ranks and engines of these settings, connected. ``name``: in the names of the record's
    phases."""
    with _record(open_training(config), record, name) as run:
        yield run.actor, run.sampling.pool


@contextlib.contextmanager
def started_engines(config: Config, record: Record, name: str) -> Iterator[RolloutPool]:
    """Engines of these settings alone; see :func:`start`."""
    with _record(open_engines(config), record, name) as sampling:
        yield sampling.pool


@contextlib.contextmanager
def _record(opened: contextlib.AbstractContextManager[T], record: Record, name: str) -> Iterator[T]:
    with contextlib.ExitStack() as stack:
        with record.phase(f"start of {name}"):
            found = stack.enter_context(opened)
        yield found
        with record.phase(f"end of {name}"):
            stack.close()


def requests(
    node: Node, count: int, *, prompts: int = 8, max_tokens: int = RESPONSE_TOKENS, step: int = 0
) -> list[Request]:
    """Requests on random prompts of uneven length, sampled at temperature 1. ``count``: number of
    requests, spread over the prompts. ``step``: gives other prompts and random streams."""
    lengths = [PROMPT_TOKENS - 3 * number for number in range(prompts)]
    tokens = random_tokens(node.model, lengths, seed=step)
    return [
        Request(
            problem_id=f"{step}-{number % prompts}",
            index=number // prompts,
            prompt_token_ids=tuple(tokens[number % prompts]),
            max_tokens=max_tokens,
            temperature=1.0,
            top_p=1.0,
            seed=request_seed(0, step, f"{step}-{number % prompts}", number // prompts),
            ignore_eos=True,
        )
        for number in range(count)
    ]


def sample(pool: RolloutPool, wanted: Sequence[Request]) -> list[Sample]:
    found = {(one.problem_id, one.index): one for one in pool.generate(wanted)}
    return [found[request.key] for request in wanted]


def as_batch(wanted: Sequence[Request], samples: Sequence[Sample]) -> TrainingBatch:
    """A batch of samples with the rollout log-probs, and advantages of both signs."""
    pairs = zip(wanted, samples, strict=True)
    batch = batch_of([(list(r.prompt_token_ids), s.token_ids.tolist()) for r, s in pairs])
    log_probs = torch.from_numpy(np.concatenate([one.log_probs for one in samples]))
    versions = torch.tensor([one.weights_version for one in samples])
    batch = dataclasses.replace(batch, engine_log_probs=log_probs, weights_versions=versions)
    return with_advantages(batch)


def mismatch(actor: ActorGroup, batch: TrainingBatch) -> dict[str, float]:
    """How far the rollout log-probs are from the actor's; see ``Mismatch.metrics``."""
    log_probs, _ = actor.log_probs(batch)
    return measure(log_probs, batch.engine_log_probs).metrics()


def hold_to_gate(
    record: Record, name: str, config: Config, actor: ActorGroup, batch: TrainingBatch, seed: int
) -> None:
    """Report rollout log-probs that are further from the actor's than rounding explains."""
    mean = mismatch(actor, batch)["mean_exp_abs_diff"]
    limit = limits(config, measure_noise(actor, batch, seed)).mean_exp_abs
    record.figure(f"{name} mean exp|Δ|", mean, limit=f"<= {limit:g}", key=True)
    record.require(
        mean <= limit,
        f"{name}: mean exp|Δ| of rollout and actor log-probs is {mean:.6f}, above {limit:g}: the "
        "engine computes with other weights, though their fingerprints agree",
    )


def update(actor: ActorGroup, batch: TrainingBatch, seed: int = 0) -> dict[str, float]:
    """One optimizer step; its metrics."""
    plan = StepPlan(seed=seed)
    actor.run_part(batch, plan)
    result = actor.finish_step(plan).policy
    assert result is not None
    return result.minibatches[0]
