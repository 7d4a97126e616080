"""Two hundred healthy updates of one family on one rank: no step check of the ranks may say a word.

    python -m tests.distributed.healthy_steps qwen3 bfloat16 [--lora] [--steps 200]

Prints what was said, and exits with 1 if anything was.
"""

import argparse
import dataclasses
import math
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from rlmath.actor.parallel import destroy, initialize
from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_step import RankStep
from rlmath.actor.settings import ModelSettings, ReferenceSettings
from rlmath.algorithms.advantages import SequenceAdvantages
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.commands.drill.shrink import smaller_model
from rlmath.config.load import load
from rlmath.config.optimizer import OptimizerConfig, Schedule
from rlmath.config.schema import DType
from rlmath.device import CPU
from rlmath.model.lora import TARGETS, Lora
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.tiny_tokenizer import VOCABULARY_SIZE
from rlmath.training.checks.invariants import violations
from rlmath.training.checks.loss_parts import wrong_loss
from rlmath.training.checks.optimizer_steps import wrong_rates, wrong_steps
from rlmath.training.checks.sequences import (
    Expected,
    wrong_advantages,
    wrong_gradients,
    wrong_places,
    wrong_tokens,
)
from rlmath.training.checks.still_weights import begin, drifted, look_again, moved
from rlmath.training.checks.unchanged import unchanged_parts
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.sequence_fingerprints import token_digests
from tests.distributed.rank_pool import _free_port
from tests.support.actors import build, make_batch

SEQUENCES, MINIBATCHES = 12, 2
# The smallest published model of each architecture.
FAMILIES = {config["architectures"][0]: name for name, config in reversed(KNOWN.items())}


def write_model(folder, name):
    """A model of a family with random weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = smaller_model(dict(KNOWN[name]))
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    kind = next(kind for kind, one in names if one == fields["architectures"][0])
    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields | ends))
    model.save_pretrained(folder)


def run(model, dtype, steps, *, lora, terms, plant=None, more_plan=None):
    """What the checks said, with the steps.

    Args:
        plant: Called with the worker after the first step.
        more_plan: Further fields of the plan.
    """
    torch_dtype = {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16}[dtype]
    schedule = {"schedule": Schedule.cosine, "decay_steps": 2 * steps + 10}
    more = {"lora": Lora(rank=4, alpha=8.0, targets=TARGETS)} if lora else {}
    actor = build(
        Layout(1, 1, 1),
        CPU,
        model,
        model=ModelSettings(torch_dtype, sequence_parallel=False),
        reference=ReferenceSettings("frozen"),
        optimizer={"lr": 1e-4, **schedule},
        **more,
    )
    worker = SimpleNamespace(actor=actor)
    begin(worker)
    gatherer = BucketGatherer(actor.chunks, actor.spec, actor.parallel, merge=actor.merger())
    kl, entropy = (0.1, 0.01) if terms else (0.0, 0.0)
    plan = StepPlan(
        ObjectiveSettings(kl_coef=kl, entropy_coef=entropy),
        passes=("old", "reference") if terms else ("old",),
        minibatches=MINIBATCHES,
        **(more_plan or {}),
    )
    settings = OptimizerConfig(lr=1e-4, **schedule)
    config = load(
        [
            "experiment=quickstart",
            f"algorithm.kl_coef={kl}",
            f"algorithm.entropy_coef={entropy}",
            f"model.dtype={dtype.value}",
        ]
    )
    said = []
    taken = 0
    for step in range(steps):
        batch = make_batch(SEQUENCES, seed=step)
        draw = torch.Generator().manual_seed(step)
        if plant is not None and step == 1:
            plant(worker)
        ids = torch.randint(0, VOCABULARY_SIZE, batch.tokens.shape, generator=draw).int()
        batch = dataclasses.replace(batch, tokens=ids, advantages=None)
        advantages = torch.randn(SEQUENCES, generator=draw)
        advantages[: 3 * (step % 3)] = 0.0  # Groups whose rewards are equal.
        work = RankStep(actor, None, actor.shard_of(batch, plan, step))
        work.run_passes(plan)
        work.add_advantages(plan, SequenceAdvantages(advantages).select(work.shard.places))
        result = work.update(plan)
        assert result is not None and result.sequences is not None
        report, first = result.sequences, result.minibatches[0]
        expected = Expected(
            [f"sequence {i}" for i in range(SEQUENCES)],
            [i // 3 for i in range(SEQUENCES)],
            token_digests(batch.tokens, batch.prompt_lengths, batch.sequence_lengths),
            batch.loss_token_counts.double(),
            advantages.double(),
        )
        noise = math.sqrt(2.0 * max(first["approx_kl"], 0.0))
        changes = gatherer.changes()
        found = [
            *wrong_places(report, expected.names, complete=True),
            *wrong_tokens(report, expected),
            *wrong_advantages(report, expected),
            *wrong_gradients(report, noise, alone=not terms),
            *(one for figures in result.minibatches for one in wrong_loss(figures, kl, entropy)),
            *wrong_rates(settings, taken, result.minibatches),
            *wrong_steps(result.step_findings),
            *violations(
                config, bool(advantages.any()), result, first_step=step == 0, has_moved=step > 0
            ),
            *moved([look_again(worker)]),
            *drifted([changes]),
            *(() if lora else unchanged_parts(dtype, [changes.unchanged])),
        ]
        taken += sum(not one["discarded"] for one in result.minibatches)
        said += [f"step {step + 1}: {one}" for one in found]
    return said


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture", choices=FAMILIES)
    parser.add_argument("dtype", choices=[one.value for one in DType])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--terms", action="store_true", help="with KL and entropy in the loss")
    given = parser.parse_args()
    CPU.prepare_megatron_process(0, num_threads=1)
    initialize(Layout(1, 1, 1), CPU, 0, "127.0.0.1", _free_port(), seed=0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), FAMILIES[given.architecture])
            dtype = DType(given.dtype)
            said = run(folder, dtype, given.steps, lora=given.lora, terms=given.terms)
    finally:
        destroy()
    print(f"{given.architecture} {given.dtype}: {given.steps} steps, {len(said)} alarms")
    print("\n".join(said[:5]))
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
