"""Linear attention on real gloo ranks: packs of uneven sequences, and checkpoints across layouts.

Weights, gradients, adapters and recomputed activations of these models are in the tests of all
families.
"""

import dataclasses
import itertools
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from rlmath.actor.model import ModelSettings
from rlmath.device.delta_rule import causal_convolution, gated_delta_rule
from rlmath.model.parallel import Layout
from tests.support.actors import build, gather, hugging_face, make_batch
from tests.support.models import build as build_model
from tests.support.models import perturb
from tests.support.resumed_runs import assert_close, changes_of, commit, run_load, run_save

ONE, TP2 = Layout(1, 1, 1), Layout(2, 1, 1)
# A chunk of the recurrence, one more, several, and fewer than the convolution sees.
LENGTHS = [64, 2, 65, 150, 3, 29, 128]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of each family."""
    found = {}
    for family in ("qwen3_5", "qwen3_next"):
        model = build_model(family, max_position_embeddings=256)
        perturb(model, 0.1)
        found[family] = str(tmp_path_factory.mktemp(family))
        model.save_pretrained(found[family])
    return found


def uneven_batch():
    """Sequences of ``LENGTHS`` tokens with prompts of one."""
    lengths = torch.tensor(LENGTHS)
    responses = int((lengths - 1).sum())
    return dataclasses.replace(
        make_batch(len(LENGTHS)),
        tokens=torch.randint(0, 101, (int(lengths.sum()),), generator=torch.manual_seed(0)),
        prompt_lengths=torch.ones_like(lengths),
        response_lengths=lengths - 1,
        engine_log_probs=torch.zeros(responses),
        advantages=torch.zeros(responses),
        loss_mask=torch.ones(responses, dtype=torch.bool),
    )


def run_packed(layout, platform, folder, batch, budgets):
    """Log-probs with micro-batches of up to as many tokens."""
    limits = {"max_sequence_length": 256}
    return [
        build(layout, platform, folder, max_tokens_per_microbatch=budget, **limits).log_probs(batch)
        for budget in budgets
    ]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_packed_sequences_have_the_log_probs_that_each_has_alone_in_transformers(
    ranks, models, family
):
    batch = uneven_batch()
    right = hugging_face(models[family], batch, 0.7).log_probs
    of_ranks = ranks.run(TP2, run_packed, models[family], batch, (512, 150))
    packed, alone = (gather(batch, values).log_probs for values in zip(*of_ranks, strict=True))
    torch.testing.assert_close(packed, alone, atol=2e-6, rtol=0)
    torch.testing.assert_close(packed.double(), right.double(), atol=1e-5, rtol=0)


def run_with_kernels(layout, platform, folder, batch):
    """Log-probs by flash-linear-attention's functions, here those of torch for each sequence."""

    def of_each(function, ends, *inputs):
        between = itertools.pairwise(ends.tolist())
        return torch.cat([function(*(x[:, a:b] for x in inputs)) for a, b in between], 1), None

    def convolve(x, weight, *, activation, cu_seqlens):
        assert activation == "silu"
        return of_each(lambda one: causal_convolution(one, weight[:, None]), cu_seqlens, x)

    def rule(q, k, v, g, beta, *, use_qk_l2norm_in_kernel, cu_seqlens):
        assert use_qk_l2norm_in_kernel
        return of_each(gated_delta_rule, cu_seqlens, q, k, v, g, beta)

    modules = {
        "fla.modules.causal_conv1d": SimpleNamespace(causal_conv1d=convolve),
        "fla.ops.gated_delta_rule": SimpleNamespace(chunk_gated_delta_rule=rule),
    }
    on_gpu = mock.patch("rlmath.actor.delta_net.takes_packs", lambda _: True)
    with mock.patch.dict(sys.modules, modules), on_gpu:
        return run_packed(layout, platform, folder, batch, (512,))


def test_kernels_of_gpus_get_whole_packs(ranks, models):
    batch = uneven_batch()
    right = hugging_face(models["qwen3_5"], batch, 0.7).log_probs
    ((values,),) = ranks.run(ONE, run_with_kernels, models["qwen3_5"], batch)
    found = gather(batch, [values]).log_probs
    torch.testing.assert_close(found.double(), right.double(), atol=1e-5, rtol=0)


def run_in_bfloat16(layout, platform, folder, batch):
    actor = build(layout, platform, folder, model=ModelSettings(torch.bfloat16))
    types = {parameter.dtype for parameter in actor.module.parameters()}
    return actor.log_probs(batch), types


def test_bfloat16_rounds_the_weights_and_not_the_decay(ranks, models):
    """As in transformers, which has no weights in float32 beside, and computes the decay so."""
    batch, folder = make_batch(), models["qwen3_5"]
    ((shares, types),) = ranks.run(ONE, run_in_bfloat16, folder, batch)
    assert types == {torch.bfloat16}
    values = gather(batch, [shares])
    right = hugging_face(folder, batch, 0.7).log_probs
    assert float((values.log_probs.double() - right.double()).abs().max()) < 0.05


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_a_checkpoint_of_two_tensor_ranks_resumes_with_one(ranks, models, tmp_path, family):
    changes = changes_of(True)
    straight, folder = commit(
        tmp_path, lambda partial: ranks.run(TP2, run_save, models[family], changes, partial, 2, 2)
    )
    (resumed,) = ranks.run(ONE, run_load, models[family], changes, folder, 2)
    assert_close(resumed, straight[0], rel=1e-4)
