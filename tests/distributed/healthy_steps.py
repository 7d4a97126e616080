"""Hundreds of healthy updates on real ranks, without engines: no step check may say a word.

    python -m tests.distributed.healthy_steps [CASE ...] [--steps 200] [--list]

Each case is a family, type, layout and recipe; its samples are random. Prints a row for each, and
exits with 1 if anything was said. docs/records/step_checks.md has the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlmath.actor.policy import MegatronActor
from rlmath.actor.rank_step import RankStep, StepResult
from rlmath.actor.value import ValueModel
from rlmath.commands.drill.material import model_config
from rlmath.commands.drill.shrink import shrink
from rlmath.config.arithmetic import resolve_layout
from rlmath.config.groups import options
from rlmath.config.schema import Device
from rlmath.engines.requests import prompt_digest
from rlmath.model.published import KNOWN
from rlmath.model.tiny_tokenizer import VOCABULARY_SIZE
from rlmath.training.algorithm_settings import reference_share
from rlmath.training.checks.base import AfterUpdate, BeforeUpdate, InvariantError
from rlmath.training.checks.independent import IndependentSamples
from rlmath.training.checks.invariants import Invariants
from rlmath.training.checks.loss_parts import LossParts
from rlmath.training.checks.optimizer_steps import OptimizerSteps
from rlmath.training.checks.second_gradient import SecondGradient
from rlmath.training.checks.sequences import TrainedSequences
from rlmath.training.checks.still_weights import (
    StillWeights,
    begin,
    compare_again,
    has_frozen_weights,
)
from rlmath.training.checks.unchanged import ChangedWeights
from rlmath.training.metrics import update_metrics, value_metrics
from rlmath.training.plan import plan_step
from rlmath.training.rank_settings import training_ranks
from rlmath.training.step_batch import StepBatch
from rlmath.types import ONE_TURN, GradedSample, Group, Problem, Sample
from rlmath.weights.gather import WeightChanges
from tests.distributed.rank_pool import RankPool

# Standard deviations between the log-probs of engine and actor, in nats, by the lag.
NOISE = (0.01, 0.05, 0.1)
PROMPTS, SAMPLES = 4, 4
TOOL_CALL = (("model", 0), ("glue", 2), ("observation", 3), ("glue", 4), ("model", 5))


PLAIN = ("quickstart", "actor.tensor_parallel=1")


@dataclass(frozen=True)
class Case:
    """A case of training.

    Attributes:
        model: A published model, shrunk.
        words: Recipe or experiment, and settings.
        lag: Policy lag of the oldest tokens, in steps.
        layers: Most layers of the model.
        after: Fields of ``algorithm`` that shrinking changes, as they were.
    """

    model: str = "Qwen2.5-0.5B"
    words: tuple[str, ...] = PLAIN
    lag: int = 0
    layers: int = 2
    after: tuple[tuple[str, Any], ...] = ()


def of(*settings, lag=0, model="Qwen2.5-0.5B"):
    return Case(model, (*PLAIN, *settings), lag)


def on(*layout, model="Qwen2.5-0.5B", layers=2):
    sizes = [f"actor.{one}" for one in layout]
    if not any(one.startswith("tensor_parallel") for one in layout):
        sizes.append("actor.tensor_parallel=1")
    return Case(model, ("quickstart", *sizes, *TERMS), layers=layers)


TERMS = ("algorithm.kl_coef=0.05", "algorithm.entropy_coef=0.001")
# The smallest published model of each architecture.
FAMILIES = {config["architectures"][0]: name for name, config in reversed(KNOWN.items())}
LORA = ("lora.rank=4", "lora.alpha=8")
# As on GPUs.
OVERLAPPED = ("overlap_gradients=true", "overlap_param_gather=true", "logits=chunked")
OFFLOADED = ("offload=all", "offload_in_backward=true")
MOE = "Qwen3-30B-A3B"
TRUNCATED = "algorithm.correction.kind=token_truncate"
RECIPES = [*options("recipe"), *options("experiment")]
CASES = {
    **{
        f"{name} {dtype}": Case(name, (*PLAIN, f"model.dtype={dtype}"), layers=4)
        for name in FAMILIES.values()
        for dtype in ("float32", "bfloat16")
    },
    "TP 2": on("tensor_parallel=2"),
    "DP 2": on("data_parallel=2"),
    "PP 2": on("pipeline_parallel=2"),
    "CP 2": on("context_parallel=2"),
    "TP 2, PP 2": on("tensor_parallel=2", "pipeline_parallel=2"),
    "TP 2, DP 2": on("tensor_parallel=2", "data_parallel=2"),
    "DP 2, overlapped and offloaded": on("data_parallel=2", *OVERLAPPED, *OFFLOADED),
    "PP 2, virtual stages, overlapped": on(
        "pipeline_parallel=2", "virtual_stages=2", "data_parallel=2", *OVERLAPPED, layers=4
    ),
    "value model, offloaded": of("algorithm.advantage=gae", *(f"actor.{x}" for x in OFFLOADED)),
    "LoRA": on(*LORA),
    "LoRA TP 2": on("tensor_parallel=2", *LORA),
    "LoRA DP 2": on("data_parallel=2", *LORA),
    "LoRA PP 2": on("pipeline_parallel=2", *LORA),
    "MoE EP 2": on("data_parallel=2", "expert_parallel=2", model=MOE),
    "MoE TP 2": on("tensor_parallel=2", "sequence_parallel=true", model=MOE),
    "MoE, sigmoid, EP 2": on("data_parallel=2", "expert_parallel=2", model="GLM-4.5-Air"),
    "MoE, replayed routes": on("routing_replay=old_log_probs", model=MOE),
    "value model": of("algorithm.advantage=gae"),
    "value model TP 2": Case(words=("quickstart", "algorithm.advantage=gae")),
    "lagged": Case(words=("quickstart", TRUNCATED, *TERMS), lag=2),
    "lagged, old log-probs of engines": of("algorithm.old_log_probs=engine", lag=2),
    "pipelined": of("rollout.schedule=pipelined", TRUNCATED, lag=1),
    "continuous": of("rollout.schedule=continuous", TRUNCATED, *TERMS, lag=2),
    "continuous, off-policy mask": of(
        "rollout.schedule=continuous",
        TRUNCATED,
        "algorithm.correction.off_policy_mask_kl=0.01",
        lag=2,
    ),
    "tools": Case(words=("quickstart_tools", *TERMS)),
    "tools, value model": Case(words=("quickstart_tools", "algorithm.advantage=gae")),
    "prompts not shared": of("actor.share_prompts=never"),
    "KL in the reward": of("algorithm.kl_coef=0.05", "algorithm.kl_in=reward"),
    "averaged reference": of("algorithm.kl_coef=0.05", "algorithm.reference.kind=averaged"),
    "tokens of high entropy": of("algorithm.entropy_top_share=0.2"),
    "cosine": of("actor.optimizer.schedule=cosine", "actor.optimizer.weight_decay=0.1"),
    **{name: Case(words=(name,)) for name in RECIPES if name != "distill"},
    # Shrinking removes the teacher.
    "distill": Case(
        words=("distill", "teacher.path=none"),
        after=(
            *(("advantage", "teacher"), ("advantage_options", {})),
            *(("distill_coef", 1.0), ("distill_clip", 5.0)),
        ),
    ),
}


def write_model(folder, fields):
    """A model of a family with random weights."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = AutoModelForCausalLM.from_config(model_config(fields | ends))
    model.save_pretrained(folder)


def settings_of(case, folder, steps):
    """The settings of a case, shrunk; its model is written."""
    sizes = (f"algorithm.prompts_per_step={PROMPTS}", f"algorithm.group_size={SAMPLES}")
    words = (*case.words, f"model.path={case.model}", *sizes)
    shrunk = shrink(words, folder, None, steps)
    layers = min(case.layers, shrunk.model["num_hidden_layers"])
    write_model(Path(shrunk.config.model.path), shrunk.model | {"num_hidden_layers": layers})
    algorithm = dataclasses.replace(shrunk.config.algorithm, **dict(case.after))
    return dataclasses.replace(shrunk.config, algorithm=algorithm)


def groups_of(config, step, lag):
    """Random samples of a step, with random rewards."""
    draw = np.random.default_rng(step)
    groups = []
    for place in range(PROMPTS):
        name = f"p{step}-{place}"
        prompt = tuple(draw.integers(0, VOCABULARY_SIZE, int(draw.integers(3, 20))).tolist())
        scored = []
        for index in range(SAMPLES):
            length = int(draw.integers(6, config.rollout.max_response_tokens + 1))
            tokens = draw.integers(0, VOCABULARY_SIZE, length).astype(np.int32)
            # The weights changed in the middle of a response.
            version = max(0, step - 1 - int(draw.integers(0, lag + 1)))
            spans = (
                ((version, 0),) if version == step - 1 else ((version, 0), (step - 1, length // 2))
            )
            ended = "stop" if length < config.rollout.max_response_tokens else "length"
            log_probs = np.full(length, -5.0, np.float32)
            sample = Sample(
                problem_id=name,
                index=index,
                token_ids=tokens,
                log_probs=log_probs,
                text="",
                finish_reason=ended,
                spans=spans,
                seed=(step * PROMPTS + place) * SAMPLES + index,
                engine=0,
                prompt_digest=prompt_digest(prompt),
                segments=TOOL_CALL if config.rollout.tools else ONE_TURN,
            )
            # Groups of equal rewards as well.
            right = bool(draw.integers(0, 2)) if place else False
            status = "correct" if right else "wrong"
            reward = float(right)
            scored.append(GradedSample(sample, reward, right, status, rewards={"math": reward}))
        groups.append(Group(Problem(name, "", prompt, ("1",)), tuple(scored)))
    return groups


def run_of(config, step):
    """Fields of a run that checks and batches read."""
    sampling = SimpleNamespace(
        rewards=SimpleNamespace(items=[SimpleNamespace(label="math", weight=1.0)]),
        pool=SimpleNamespace(weights_version=step - 1),
    )
    return SimpleNamespace(config=config, sampling=sampling)


def batch_of(config, step, lag):
    rewards = run_of(config, step).sampling.rewards
    groups, teacher = groups_of(config, step, lag), None
    if config.algorithm.distill_coef:
        draw = np.random.default_rng(step)
        samples = [one.sample for group in groups for one in group.samples]
        teacher = [draw.normal(-5, 1, len(one.token_ids)).astype(np.float32) for one in samples]
    return StepBatch.of(config.algorithm, groups, rewards, step - 1, teacher)


def plan_of(config, step):
    plan = plan_step(config, step)
    if plan.correction is not None and plan.correction.kind == "auto":
        correction = dataclasses.replace(plan.correction, kind="token_truncate")
        plan = dataclasses.replace(plan, correction=correction)
    return plan


@dataclass(frozen=True)
class Seen:
    """Report of a rank on a step."""

    report: StepResult
    changes: WeightChanges
    moved: list[str]


def on_rank(layout, platform, config, steps, lag, plant=None):
    """Train on this rank; ``plant`` is called with the worker after the first step."""
    settings = training_ranks(config, resolve_layout(config, Device.cpu))
    actor = MegatronActor(settings, layout, platform)
    of_values = settings.value
    value_model = None if of_values is None else ValueModel(of_values, layout, platform)
    worker = SimpleNamespace(actor=actor, value_model=value_model)
    frozen = has_frozen_weights(config)
    if frozen:
        begin(worker)
    gatherer = actor.gatherer(merge=actor.merger(), read=actor.device_state.read)
    seen = []
    for step in range(1, steps + 1):
        if plant is not None and step == 2:
            plant(worker)
            # Code with a fault has it from a run's first update.
            actor.forget_steps()
        batch = batch_of(config, step, lag)
        plan = plan_of(config, step)
        sequences = batch.sequences
        shard = actor.shard_of(sequences, plan, plan.seed)
        work = RankStep(actor, value_model, shard)
        work.run_passes(plan)
        own = work.shard.batch.old_log_probs
        if own is None and (found := actor.shard_log_probs(shard)) is not None:
            own = found.log_probs
        if own is not None:
            draw = torch.Generator().manual_seed(step)
            noise = torch.randn(own.shape, generator=draw) * NOISE[lag]
            work.shard = work.shard.with_values(engine_log_probs=own + noise)
        advantages = None
        if not plan.values:
            advantages = batch.advantages(config).select(shard.places)
        tokens = work.add_advantages(plan, advantages)
        values = work.update_values(plan) if plan.values else None
        policy = work.update(plan) if plan.policy else None
        if share := reference_share(config.algorithm, step):
            actor.renew_reference(share)
        moved = compare_again(worker) if frozen else []
        seen.append(Seen(StepResult(tokens, values, policy), gatherer.changes(), moved))
        for model in (actor, value_model):
            if model is not None:
                model.release()
    # Plain bytes: a pipe gives each tensor a file descriptor.
    return pickle.dumps(seen)


def judge(config, of_ranks, lag):
    """Findings of the driver's step checks."""
    checks = [
        *(IndependentSamples(), Invariants(), TrainedSequences(), LossParts(), SecondGradient()),
        *(ChangedWeights(), OptimizerSteps(), StillWeights()),
    ]
    said = []
    for number, ranks in enumerate(zip(*of_ranks, strict=True)):
        step = number + 1
        groups, plan = groups_of(config, step, lag), plan_of(config, step)
        session = run_of(config, step)
        session.actor = SimpleNamespace(call=lambda one, found=ranks: [x.moved for x in found])
        batch, monitor = batch_of(config, step, lag), SimpleNamespace(warn=said.append)
        sampled = BeforeUpdate(session, monitor, step, plan, groups, groups, batch)
        report = StepResult.join([one.report for one in ranks])
        metrics = {
            "train/kl_coef": config.algorithm.kl_coef,
            "train/entropy_coef": plan.objective.entropy_coef,
            **({} if report.policy is None else update_metrics(report.policy)),
            **({} if report.values is None else value_metrics(report.values)),
        }
        changes = [one.changes for one in ranks]
        updated = AfterUpdate(session, monitor, step, plan, batch, report, changes, metrics)
        for check in checks:
            try:
                check.before_update(sampled)
                check.after_update(updated)
            except InvariantError as error:
                said.append(str(error))
    return said


def run(pool, case, steps, plant=None):
    """Findings of the checks on a case."""
    with tempfile.TemporaryDirectory() as folder:
        config = settings_of(case, Path(folder), steps)
        layout = resolve_layout(config, Device.cpu).actor
        of_ranks = pool.run(layout, on_rank, config, steps, case.lag, plant)
        return judge(config, [pickle.loads(one) for one in of_ranks], case.lag)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all without")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    given = parser.parse_args()
    if given.list:
        print("\n".join(CASES))
        return 0
    pool, alarms = RankPool(timeout_s=3600.0), 0
    print("| case | steps | sentences | seconds |\n|---|---|---|---|", flush=True)
    for name in given.cases or CASES:
        began_s = time.monotonic()
        try:
            said = run(pool, CASES[name], given.steps)
        except RuntimeError as error:
            said = [str(error)[-300:]]
        alarms += len(said)
        seconds = time.monotonic() - began_s
        print(f"| {name} | {given.steps} | {len(said)} | {seconds:.0f} |", flush=True)
        print("\n".join(said[:3]), end="\n" * bool(said), flush=True)
    pool.close()
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
