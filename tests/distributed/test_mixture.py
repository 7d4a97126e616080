"""A mixture of experts on real gloo ranks: right against Hugging Face, and the same on any number
of expert-parallel ranks, which get packs of different lengths."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint import FileSystemReader

from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.model.parallel import Layout
from rlmath.model.precision import Precision
from tests.support.actors import build, gather, hugging_face, make_batch, run_log_probs
from tests.support.models import make_mixture
from tests.support.resumed_runs import (
    assert_close,
    assert_equal,
    changes_of,
    commit,
    run_load,
    run_save,
)

ONE = Layout(1, 1, 1)
EP2 = Layout(1, 1, 2, expert_parallel=2)


def test_log_probs_over_all_experts_are_those_of_hugging_face(ranks, tmp_path):
    model, batch = make_mixture(tmp_path, norm_topk_prob=False), make_batch()
    ours = gather(batch, ranks.run(EP2, run_log_probs, model, batch))
    theirs = hugging_face(model, batch, temperature=0.7)
    torch.testing.assert_close(ours.log_probs.double(), theirs.log_probs, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours.entropy.double(), theirs.entropy, atol=2e-5, rtol=0)


def test_a_checkpoint_resumes_with_another_expert_layout(ranks, mixture, tmp_path):
    changes = changes_of(True)
    straight, folder = commit(
        tmp_path, lambda partial: ranks.run(EP2, run_save, mixture, changes, partial, 2, 2)
    )
    for one, other in zip(
        straight, ranks.run(EP2, run_load, mixture, changes, folder, 2), strict=True
    ):
        assert_equal(one, other)
    names = FileSystemReader(Path(folder) / "actor").read_metadata().state_dict_metadata
    # As Transformer Engine's layers are saved, so that GPUs load it: layer 1 is dense, and there
    # the norm is part of the first product.
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in names
    assert "decoder.layers.0.mlp.experts.experts.linear_fc1.weight" in names
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in names
    (resumed,) = ranks.run(ONE, run_load, mixture, changes, folder, 2)
    assert_close(resumed, straight[0])


def run_precision(layout, platform, model, batch, precision):
    """Largest difference of logits from the product in float32, types of logits and of routing
    scores, and the norm of a gradient."""
    settings = ModelSettings(torch.bfloat16, precision=precision)
    actor = build(layout, platform, model, model=settings)
    seen = {}

    def keep(module, inputs, output):
        seen["hidden"], seen["logits"] = inputs[0].detach(), output[0].detach()

    def keep_scores(module, inputs, output):
        seen["scores"] = output[0].dtype

    hook = actor.module.output_layer.register_forward_hook(keep)
    layers = actor.module.decoder.layers
    other = layers[0].mlp.router.register_forward_hook(keep_scores)
    actor.log_probs(batch)
    hook.remove()
    other.remove()
    weight = actor.module.output_layer.weight
    exact = F.linear(seen["hidden"].float(), weight.detach().float())
    norm = actor.update(batch, StepPlan(), seed=0).minibatches[0]["grad_norm"]
    difference = float((seen["logits"].float() - exact).abs().max())
    return difference, seen["logits"].dtype, seen["scores"], norm


def test_the_precision_asked_for_is_that_of_the_products(ranks, mixture):
    batch = make_batch()
    asked = Precision("float32", "float32")
    ((exact, logits, scores, norm),) = ranks.run(ONE, run_precision, mixture, batch, asked)
    assert (logits, scores) == (torch.float32, torch.float32)
    assert exact < 1e-5
    ((rounded, logits, scores, plain),) = ranks.run(
        ONE, run_precision, mixture, batch, Precision("model", "model")
    )
    assert (logits, scores) == (torch.bfloat16, torch.bfloat16)
    assert rounded > 1e-3
    assert norm == pytest.approx(plain, rel=0.05) and norm > 0
