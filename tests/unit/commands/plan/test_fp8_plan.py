import dataclasses

import pytest

from rlmath.cli import main
from rlmath.commands.plan.activations import kept_bytes, layer_bytes
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.fp8 import gradient_copy_bytes, rank_elements, weight_copy_bytes
from rlmath.commands.plan.gpus import GPUS, Efficiency
from rlmath.commands.plan.memory import GIB, Step, stage_phases
from rlmath.commands.plan.time import Work, actor_time_s
from rlmath.model.fp8_training import Fp8Training
from rlmath.model.lora import Lora
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

QWEN, MOE = (model_spec(KNOWN[name]) for name in ("Qwen2.5-7B", "Qwen3-30B-A3B"))
TENSORWISE = Fp8Training("hybrid", "tensorwise")
PLAIN = ActorShape(Layout(4, 1, 2), 0, 16384)
FP8 = dataclasses.replace(PLAIN, fp8=TENSORWISE)
ASKED = ["plan", "layout", "model.path=Qwen/Qwen2.5-7B", "cluster.gpus_per_node=8"]


def test_copies_of_weights_are_a_byte_each_way():
    elements = QWEN.layers * rank_elements(QWEN, FP8, moe=False)
    assert weight_copy_bytes(QWEN, FP8, 0, backward=False) == elements
    assert weight_copy_bytes(QWEN, FP8, 0, backward=True) == 2 * elements
    assert weight_copy_bytes(QWEN, PLAIN, 0, backward=True) == 0
    # Nearly all of a rank's weights, and in two stages a half each.
    assert elements == pytest.approx(6.5e9 / 4, rel=0.02)
    halves = dataclasses.replace(FP8, layout=Layout(4, 2, 1))
    assert weight_copy_bytes(QWEN, halves, 1, backward=False) == elements / 2


def test_inputs_that_are_kept_are_a_byte_each():
    """The outputs of both norms and the product of gate and up; of an MoE the norm before attention
    and the experts' inputs."""
    saved = layer_bytes(QWEN, PLAIN) - layer_bytes(QWEN, FP8)
    assert saved == pytest.approx((2 * QWEN.hidden + QWEN.ffn) / 4)
    plain = ActorShape(Layout(2, 1, 4, expert_parallel=8), 0, 16384)
    fp8 = dataclasses.replace(plain, fp8=TENSORWISE)
    experts = MOE.experts_per_token * (MOE.hidden + MOE.moe_ffn)
    assert layer_bytes(MOE, plain) - layer_bytes(MOE, fp8) == pytest.approx(
        (MOE.hidden + experts) / 2
    )


def test_frozen_matrices_keep_nothing_and_have_one_copy_of_a_gradient():
    lora = Lora(16, 32.0, ("q_proj", "v_proj"))
    plain, fp8 = (dataclasses.replace(one, lora=lora) for one in (PLAIN, FP8))
    assert kept_bytes(QWEN, plain, 1, 0) == kept_bytes(QWEN, fp8, 1, 0)
    assert gradient_copy_bytes(fp8, 1000) == gradient_copy_bytes(FP8, 1000) / 2
    assert gradient_copy_bytes(PLAIN, 1000) == 0


def test_plan_pads_tokens_for_fp8():
    odd = dataclasses.replace(PLAIN, max_tokens=16001)
    assert odd.tokens == 16001
    assert dataclasses.replace(odd, fp8=TENSORWISE).tokens == 16064
    blockwise = Fp8Training("hybrid", "blockwise")
    assert dataclasses.replace(odd, fp8=blockwise).tokens == 16384


def test_phases_that_multiply_have_the_copies():
    step = Step(microbatches=4, longest_tokens=4096, reference=True, value_model=True)
    phases = {one.name: one.terms for one in stage_phases(QWEN, FP8, step, 0)}
    with_copies = {name for name, terms in phases.items() if "copies in FP8" in terms}
    assert with_copies == {"log-probs", "reference", "logits", "training", "value training"}
    one, both = (phases[name]["copies in FP8"] / GIB for name in ("log-probs", "training"))
    assert both == 2 * one and one == pytest.approx(1.52, rel=0.01)
    plain = stage_phases(QWEN, PLAIN, step, 0)
    assert not any("copies in FP8" in one.terms for one in plain)


def test_matrices_take_half_the_time_and_the_rest_its_own():
    work = Work(512, 8, 1, 1024, 3072, 1536)
    gpu = GPUS["h100"]
    (_, plain), (_, fp8) = (
        actor_time_s(QWEN, one, work, gpu, Efficiency(), 8) for one in (PLAIN, FP8)
    )
    assert 0.5 * plain < fp8 < 0.75 * plain
    # Cards that are no faster in FP8 gain nothing, and quantize.
    same = dataclasses.replace(gpu, fp8_tflops=gpu.peak_tflops)
    _, slower = actor_time_s(QWEN, FP8, work, same, Efficiency(), 8)
    assert slower > plain


def test_old_log_probs_in_fp8_join_no_micro_batches():
    work, launches = Work(512, 8, 2, 1024, 3072, 1536), Efficiency(layer_launch_s=0.1)

    def seconds(actor, times):
        one = dataclasses.replace(actor, max_forward_tokens=times * actor.max_tokens)
        return actor_time_s(QWEN, one, work, GPUS["h100"], launches, 8)[0]

    assert seconds(PLAIN, 4) < seconds(PLAIN, 1)
    assert seconds(FP8, 4) == seconds(FP8, 1)


def test_plan_command_with_fp8(capsys):
    def run_plan(*more):
        code = main([*ASKED, *more])
        out = capsys.readouterr()
        return code, out.out + out.err

    code, text = run_plan("actor.fp8=e4m3")
    assert code == 0
    assert "actor.fp8=e4m3" in text and "actor.fp8_recipe=blockwise" in text
    assert "algorithm.correction.kind=token_truncate" in text
    assert "copies in FP8" in text and "arithmetic alone, it has never run" in text
    code, text = run_plan("actor.fp8=e4m3", "--gpu", "a100-80")
    assert code == 2 and "this one has 8.0" in text
    code, text = run_plan("actor.fp8=e4m3", "--gpu", "mi300x")
    assert code == 2 and "CUDA alone" in text
    code, text = run_plan("actor.fp8=e4m3", "actor.fp8_recipe=mxfp8")
    assert code == 2 and "use blockwise" in text
    code, text = run_plan("actor.fp8=e4m3", "actor.layers=local")
    assert code == 2 and "actor.layers=local" in text
