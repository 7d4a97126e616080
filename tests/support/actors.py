"""Actors on real gloo ranks: layouts, batches, updates, and what transformers says of them."""

import dataclasses
import math
from functools import reduce

import pytest
import torch
import torch.distributed as dist

from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.actor.policy import MegatronActor
from rlmath.actor.settings import ActorSettings
from rlmath.actor.token_values import TokenValues
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.algorithms.totals import add
from rlmath.config.optimizer import OptimizerConfig
from rlmath.model.parallel import Layout
from rlmath.types import TrainingBatch
from tests.support.models import VOCAB

# Every kind of parallelism beside another one; a fault of one alone shows in these too.
LAYOUTS = [
    Layout(1, 1, 1),
    Layout(2, 1, 2),
    Layout(1, 2, 1, context_parallel=2, pipeline_layers=(1, 3)),
]


def on_layouts(first=0):
    return pytest.mark.parametrize("layout", LAYOUTS[first:], ids=str)


def make_batch(num_sequences=12, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, size):
        return torch.randint(low, high, (size,), generator=generator)

    prompts, responses = integers(3, 9, num_sequences), integers(1, 30, num_sequences)
    tokens, r = int((prompts + responses).sum()), int(responses.sum())
    mask = torch.rand(r, generator=generator) > 0.1
    return TrainingBatch(
        tokens=integers(0, VOCAB, tokens),
        prompt_lengths=prompts,
        response_lengths=responses,
        group_ids=torch.arange(num_sequences) // 3,
        weights_versions=torch.zeros(num_sequences, dtype=torch.int64),
        rewards=torch.zeros(num_sequences),
        engine_log_probs=torch.full((r,), -math.log(VOCAB)),
        advantages=torch.randn(r, generator=generator),
        loss_mask=mask,
    )


def with_log_probs(batch):
    """Old log-probs near the policy's own, and a reference a little further off."""
    generator = torch.Generator().manual_seed(1)
    noise = 0.1 * torch.randn(batch.loss_mask.numel(), generator=generator)
    old = batch.engine_log_probs
    return dataclasses.replace(batch, old_log_probs=old + noise, ref_log_probs=old - noise)


def build(layout, platform, model_path, **changes):
    optimizer = {
        "lr": 1e-3,
        "adam_eps": 1e-5,
        "clip_grad_norm": 1.0,
        **changes.pop("optimizer", {}),
    }
    settings = {
        "model": ModelSettings(torch.float32, sequence_parallel=True),
        "distributed_optimizer": optimizer.pop("distributed", True),
        "optimizer": OptimizerConfig(**optimizer),
        "temperature": 0.7,
        "max_tokens_per_microbatch": 64,
        "max_sequence_length": 64,
        **changes,
    }
    return MegatronActor(ActorSettings(model_path=model_path, **settings), layout, platform)


UPDATE = StepPlan(
    objective=ObjectiveSettings(kl_coef=0.1, entropy_coef=0.01), minibatches=2, early_stop_ratio=5.0
)


def run_log_probs(layout, platform, model, batch):
    return build(layout, platform, model).log_probs(batch)


def run_updates(layout, platform, model, batch, update, steps, changes):
    """Metrics of each minibatch of ``steps`` updates, and the log-probs after them."""
    actor = build(layout, platform, model, **changes)
    metrics = []
    discarded = {}
    for step in range(steps):
        result = actor.update(batch, update, seed=step)
        metrics += result.minibatches
        for version, left_out in of_all_ranks(actor, result).items():
            metrics[-1][f"masked_of_{version}"] = left_out.masked
            metrics[-1][f"tokens_of_{version}"] = left_out.tokens
        discarded |= result.early_stopped
    return metrics, discarded, actor.log_probs(batch)


def of_all_ranks(actor, result):
    """Fields that the mask left out, as the driver adds them up."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, result.off_policy if actor.reports else {})
    return reduce(add, of_ranks)


def gather(batch, values):
    """Put the shares of the ranks that report together; each token must come exactly once."""
    shares = [v for v in values if v is not None]
    rows = torch.cat([v.response_rows for v in shares])
    assert sorted(rows.tolist()) == list(range(batch.loss_mask.numel()))
    order = rows.argsort()
    return TokenValues(
        rows[order],
        torch.cat([v.log_probs for v in shares])[order],
        torch.cat([v.entropy for v in shares])[order],
    )


def hugging_face(model, batch, temperature):
    """The same values from ``transformers``, sequence by sequence, in float64 after the logits."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    log_probs, entropy, start = [], [], 0
    for prompt, size in zip(batch.prompt_lengths, batch.sequence_lengths, strict=True):
        tokens = batch.tokens[start : start + int(size)]
        start += int(size)
        with torch.no_grad():
            logits = hf(tokens[None]).logits[0, int(prompt) - 1 : -1].double() / temperature
        log_p = logits.log_softmax(-1)
        log_probs.append(log_p.gather(1, tokens[int(prompt) :, None]).squeeze(1))
        entropy.append(-(log_p.exp() * log_p).sum(-1))
    return TokenValues(torch.arange(0), torch.cat(log_probs), torch.cat(entropy))


def in_float64(model, batch):
    """Hugging Face's model, and its log-probs and entropies ``[R]``, with their graph."""
    from transformers import AutoModelForCausalLM

    # Grouped products of experts, which transformers takes otherwise, know no float64.
    hf = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, experts_implementation="eager"
    )
    log_probs, entropies, start = [], [], 0
    for prompt, size in zip(batch.prompt_lengths, batch.sequence_lengths, strict=True):
        tokens = batch.tokens[start : start + int(size)].long()
        start += int(size)
        log_p = (hf(tokens[None]).logits[0, int(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        log_probs.append(log_p.gather(1, tokens[int(prompt) :, None]).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return hf, torch.cat(log_probs), torch.cat(entropies)
