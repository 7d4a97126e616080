import json
import math

import pytest

from rlmath.cli import main
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.engine_memory import engine_weights_bytes, kv_bytes
from rlmath.commands.plan.memory import largest_tensor_bytes
from rlmath.commands.plan.models import attention_matrices, parameters_of_rank
from rlmath.commands.plan.time import _decoding_flops, forward_flops
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec
from rlmath.weights.pieces import hf_shapes
from tests.support.planned_gathers import SourceRank, planned_gathers

# Too slow to run after each change.
pytestmark = pytest.mark.process

SPEC = model_spec(KNOWN["DeepSeek-V3"])
HEADS, LAYERS, HIDDEN = 128, 61, 7168


def test_a_layers_matrices_are_those_of_the_weight_table():
    shapes = hf_shapes(SPEC)
    of_layer = [s for n, s in shapes.items() if n.startswith("model.layers.9.self_attn.")]
    matrices = sum(math.prod(size) for size in of_layer if len(size) == 2)
    assert attention_matrices(SPEC) == matrices
    assert largest_tensor_bytes(SPEC) == 2 * max(map(math.prod, shapes.values()))


def test_engines_keep_one_vector_of_a_token_on_every_rank():
    """576 numbers a layer: the paper's 70 KB a token, whatever the number of ranks."""
    assert kv_bytes(SPEC, 1) == kv_bytes(SPEC, 8) == LAYERS * 576 * 2 == 70_272


@pytest.mark.parametrize("ranks", [1, 8])
def test_an_engines_rank_has_down_matrices_whole_and_decodes_with_copies(ranks):
    down = HIDDEN * (1536 + 512 + 64)
    twice = 512 * HEADS * (128 + 128) / ranks
    dense = parameters_of_rank(SPEC, Layout(ranks), 0) + LAYERS * (down - down / ranks + twice)
    experts = 58 * 256 * 3 * HIDDEN * 2048 / ranks
    assert engine_weights_bytes(SPEC, ranks) == pytest.approx(2 * (dense + experts))


def test_reading_and_decoding_have_the_operations_of_their_widths():
    context = 8192
    per_layer = 2 * HEADS * ((128 + 64) + 128) * context / 2
    without = forward_flops(SPEC, 0)
    assert forward_flops(SPEC, context) - without == pytest.approx(LAYERS * per_layer)
    # Scores over 512 + 64 numbers and sums of 512, of each head.
    absorbed = 2 * HEADS * (512 + 64 + 512) * context / 2
    assert _decoding_flops(SPEC, context) - without == pytest.approx(LAYERS * absorbed)


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 8), (8, 2, 8)])
def test_a_rank_holds_what_it_sends(tp, pp, ep):
    """A model of as few layers as show all."""
    few = model_spec(
        KNOWN["DeepSeek-V3"] | {"num_hidden_layers": 4, "n_routed_experts": 8, "n_group": 4}
    )
    layout = Layout(tp, pp, expert_parallel=ep)
    gathers = list(planned_gathers(few, layout))
    experts = {name for name in hf_shapes(few) if ".experts." in name}
    for stage in range(pp):
        rank = SourceRank(pp=stage, tp=0, ep=0)
        given = sum(op.numel for op in gathers if op.rank == rank and op.tensor not in experts)
        # And in float32 what its routers choose by, which are no parameters.
        assert given == parameters_of_rank(few, layout, stage) + 8 * _moe(few, layout, stage)


def _moe(spec, layout, stage):
    return sum(layer >= 3 for layer in layout.stage_layers(4, stage))


def test_the_command_plans_it_and_says_that_it_cannot_be_trained_there(capsys):
    """An engine of 16 GPUs, as 1.3 TB do not fit on eight."""
    cluster = ["cluster.nodes=16", "cluster.gpus_per_node=16"]
    layout = ["actor.tensor_parallel=8", "actor.pipeline_parallel=16", "actor.expert_parallel=16"]
    words = ["plan", "layout", "model.path=deepseek-ai/DeepSeek-R1-0528", *cluster, *layout]
    assert main([*words, "--gpu", "b200", "actor.recompute=full", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 671_026_419_200
    assert any("trains only on CPU" in warning for warning in found["warnings"])
    assert found["plans"][0]["engine_tensor_parallel"] == 16


def test_plan_of_weights_warns_that_latent_attention_trains_on_cpu_only(capsys):
    assert main(["plan", "weights", "model.path=deepseek-ai/DeepSeek-R1"]) == 0
    assert "warning: multi-head latent attention trains only on CPU" in capsys.readouterr().out


def test_so_does_the_message_that_nothing_fits(capsys):
    words = ["plan", "layout", "model.path=deepseek-ai/DeepSeek-R1", "actor.tensor_parallel=8"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "no layout of this model fits 8 GPUs" in said
    assert "warning: multi-head latent attention trains only on CPU" in said


def test_latent_attention_activations_by_stage():
    """The first of eight stages has three dense layers, which keep less than those with experts."""
    from rlmath.commands.plan.activations import layer_bytes

    actor = ActorShape(Layout(8, 8, expert_parallel=8), 0, 8192)
    first, second, mean = (layer_bytes(SPEC, actor, stage) for stage in (0, 1, None))
    assert first < mean < second
    widths = 1536 + 512 + 2 * HEADS * 192 + 2 * HEADS * 128
    experts = 8 * (HIDDEN + 3 * 2048) * 2 + 8 * 256 + 2 * 3 * 2048
    by_hand = 2 * (4 * HIDDEN + widths) + 4 * HEADS + experts
    assert second == pytest.approx(by_hand / 8 + 2 * (1536 + 512 + 64))
