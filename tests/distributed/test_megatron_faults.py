"""Silent gradient faults of megatron-core 0.16.1: each is shown in the installed version, and that
it does not reach a model here. ``docs/correctness.md`` lists them.
"""

import contextlib
import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from rlmath.model.parallel import Layout
from tests.distributed import test_gradients
from tests.distributed.test_gradients import PLAN, Setup, complete, wrong
from tests.support.actors import build, make_batch

# Fixture.
models = test_gradients.models

TP2, DP2 = Layout(2, 1, 1), Layout(1, 1, 2)


# Each fault removes one of rlmath's remedies, or something that it relies on.


def finalizing():
    """Megatron's module; its package has a function of that name."""
    return importlib.import_module("megatron.core.distributed.finalize_model_grads")


def without_summed_rotary_keys():
    return mock.patch("rlmath.actor.model.sum_rotary_key_gradients")


@contextlib.contextmanager
def without_marks_of_experts():
    """Nothing says that tensor ranks have other experts, or other parts of them."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    init = SequentialMLP.__init__

    def remove_mark(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.tensor_model_parallel = False

    with mock.patch.object(SequentialMLP, "__init__", remove_mark):
        yield


def without_marks_of_norms():
    """Nothing says that tensor ranks see other tokens."""
    return mock.patch.object(finalizing(), "_allreduce_non_tensor_model_parallel_grads")


class WholeExperts(Layout):
    """Each tensor rank has whole experts, and all have the same."""

    @property
    def expert_tensor_parallel(self):
        return 1


def run_with(layout, platform, fault, *given):
    with fault():
        return test_gradients.run(layout, platform, *given)


@pytest.mark.parametrize(
    ("family", "layout", "fault", "found"),
    [
        # Megatron-LM#6839: tensor ranks' heads share the rotated part of the keys.
        (
            "deepseek_v3",
            TP2,
            without_summed_rotary_keys,
            "layers.3.self_attn.kv_a_proj_with_mqa.weight is off",
        ),
        # Megatron-LM#5916: the norm leaves out experts of all tensor ranks but the first.
        (
            "qwen3_moe",
            Layout(2, 1, 1, expert_parallel=2),
            without_marks_of_experts,
            "the norm is 0.",
        ),
        # Megatron-LM#1628, #5916, #6080: with EP 1, each copy of an expert on tensor ranks gets the
        # gradient of that rank's tokens alone.
        ("qwen3_moe", WholeExperts(2, 1, 1), contextlib.nullcontext, "experts.0.up_proj.weight"),
        # Megatron-LM#599, #1446.
        ("qwen3_moe", TP2, without_marks_of_norms, "mlp.gate.weight"),
    ],
    ids=("rotary keys", "norm of experts", "whole experts", "norms and routers"),
)
def test_the_fault_is_found_once_the_remedy_is_undone(ranks, models, family, layout, fault, found):
    folder, expected = models[family]
    given = ({family: folder}, make_batch(), Setup(layout))
    of_ranks = ranks.run(layout, run_with, fault, *given)
    problems = [one for rank in of_ranks for one in wrong(rank[family], expected)]
    assert any(found in one for one in problems), problems


def test_experts_are_shared_out_as_other_matrices_or_whole():
    """With EP 1 no other layout exists, so Megatron's wrong sum has no way in."""
    for tensor in (1, 2, 4):
        assert Layout(tensor, 1, 4).expert_tensor_parallel == tensor
        assert Layout(tensor, 1, 4, expert_parallel=2).expert_tensor_parallel == 1


def run_dropped_sum(layout, platform):
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region as copy

    own = 1.0 + dist.get_rank()
    found = []
    for transposed in (False, True):
        x = torch.zeros(2, 3, requires_grad=True)
        gradient = torch.full((3, 2) if transposed else (2, 3), own)
        copy(x).backward(gradient.t() if transposed else gradient)
        found.append(float(x.grad[0, 0]))
    return found


def test_a_sum_of_what_is_not_contiguous_is_dropped(ranks):
    """Megatron-LM#5337. ``contiguous_sums`` asserts on each layout that none is asked for."""
    assert ranks.run(TP2, run_dropped_sum) == [[3.0, 1.0], [3.0, 2.0]]


def run_whole_logits(layout, platform):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits, label = torch.arange(4.0).view(1, 1, 4), torch.tensor([[3]])
    whole = float(vocab_parallel_cross_entropy(logits.clone(), label))
    part = logits[..., 2 * dist.get_rank() :][..., :2].clone()
    return whole, float(vocab_parallel_cross_entropy(part, label))


def test_megatrons_loss_takes_whole_logits_for_a_part(ranks):
    """Megatron-LM#7452. Here no labels are given to the model, so Megatron computes no loss."""
    right = float(F.cross_entropy(torch.arange(4.0).view(1, 4), torch.tensor([3])))
    for whole, part in ranks.run(TP2, run_whole_logits):
        assert part == pytest.approx(right, rel=1e-5)
        assert whole != pytest.approx(right, rel=0.1)


def run_finalized(layout, platform, sequence_parallel):
    """Gradients after Megatron's sums over tensor ranks, of 1 on each."""
    model = nn.ModuleDict({"out_norm": nn.Linear(1, 1), "q_layernorm": nn.Linear(1, 1)})
    for parameter in model.parameters():
        parameter.main_grad, parameter.sequence_parallel = torch.ones_like(parameter), True
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    config = SimpleNamespace(sequence_parallel=sequence_parallel, qk_layernorm=True)
    finalizing()._allreduce_non_tensor_model_parallel_grads([model], config)
    return {name: float(model[name].weight.main_grad) for name in model}


def test_sums_over_tensor_ranks_are_chosen_by_name_and_by_sequence_parallelism(ranks):
    """Megatron-LM#7452: the norm of a gated delta net is not summed without sequence parallelism.
    Ours sums its gradient itself (``rlmath/actor/delta_net.py``). And the norm of latent queries,
    which each rank has whole, is summed without it: an MoE needs sequence parallelism
    (``rlmath/checks/layout.py``)."""
    for found in ranks.run(TP2, run_finalized, False):
        assert found == {"out_norm": 1.0, "q_layernorm": 2.0}
    for found in ranks.run(TP2, run_finalized, True):
        assert found == {"out_norm": 2.0, "q_layernorm": 2.0}


def run_routed(layout, platform):
    from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count

    group = dist.group.WORLD
    found = get_tokens_per_expert_and_token_count(
        torch.ones(3, 2, dtype=torch.int64), group, topk=2, with_padding_mask=True
    )
    return float(found[1])


def test_the_routers_own_count_is_overwritten_by_that_of_all_ranks(ranks):
    """Megatron-LM#7452: an auxiliary loss would be scaled by it; there is none here."""
    assert ranks.run(TP2, run_routed) == [6.0, 6.0]


def run_sinks(layout, platform):
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        softmax_type="learnable",
        perform_initialization=False,
    )
    with mock.patch("torch.cuda.current_device", lambda: "cpu"):
        one = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    return one.softmax_offset.numel(), param_is_not_tensor_parallel_duplicate(one.softmax_offset)


def test_attention_sinks_of_other_ranks_are_left_out_of_the_norm(ranks):
    """Megatron-LM#7452, #7530: one of the reasons why GPT-OSS is refused."""
    assert ranks.run(TP2, run_sinks) == [(2, True), (2, False)]


# Fields of Megatron's configuration without which a fault has no way in.
OFF = {
    # Megatron-LM#7452: its loss is scaled by each rank's own number of tokens.
    "mtp_num_layers": None,
    # Megatron-LM#7452, #3672: the scale of auxiliary losses depends on the layout.
    "moe_router_load_balancing_type": "none",
    "moe_z_loss_coeff": None,
    # Megatron-LM#7452: attention sinks, Megatron's own gated delta net.
    "softmax_type": "vanilla",
    "experimental_attention_variant": None,
    # Megatron-Bridge#5634.
    "moe_shared_expert_overlap": False,
}


def run_off(layout, platform, folder):
    actor = build(layout, platform, folder)
    (model,) = actor.chunks
    lossless = mock.Mock(side_effect=AssertionError("Megatron computes a loss"))
    model.compute_language_model_loss = lossless
    actor.update(make_batch(), PLAN, seed=0)
    found = {name: getattr(model.config, name) for name in OFF}
    (wrapped,) = actor.models
    buffers = (*wrapped.buffers, *wrapped.expert_parallel_buffers)
    # Megatron-LM#7165: what gradients are multiplied by.
    factors = {one.gradient_scaling_factor for buffer in buffers for one in buffer.buckets}
    return found, factors, model.parallel_output, wrapped.ddp_config.use_megatron_fsdp


def test_megatron_options_of_faults_are_off(ranks, models):
    layout = Layout(1, 1, 2, expert_parallel=2)
    for found, factors, parallel_output, fsdp in ranks.run(layout, run_off, models["glm4_moe"][0]):
        assert found == OFF
        assert factors == {1.0}
        assert parallel_output and not fsdp


def run_windows(layout, platform):
    """Megatron's overlapped sum, of windows of two, one and three backward passes of gradient 1 on
    each of two ranks: what the last step sums, or how it fails."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=True
    )
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    found = []
    for passes in ((2, 1), (2, 3)):
        linear = nn.Linear(1, 1, bias=False)
        model = DistributedDataParallel(config, ddp, linear)
        for count in passes:
            model.zero_grad_buffer()
            for _ in range(count):
                model(torch.ones(1, 1)).sum().backward()
            try:
                model.finish_grad_sync()
                found.append(float(linear.weight.main_grad))
            except AssertionError as error:
                found.append(str(error).partition(" for")[0])
    return found


def run_micro_batches(layout, platform, folder, batches, overlap):
    """Number of micro-batches and gradients of each batch in turn, from one actor."""
    actor = build(layout, platform, folder, overlap_gradients=overlap, optimizer={"lr": 0.0})
    norm_of, gradients = actor.gradient_norm, []

    def look():
        norm = norm_of()
        complete(actor.models[0])
        gradients.append([p.main_grad.clone() for p in actor.module.parameters()])
        return norm

    actor.gradient_norm = look
    counts = []
    for batch in batches:
        counts.append(len(actor.shard_of(batch, PLAN).counts[0]))
        actor.update(batch, PLAN, seed=0)
    return counts, gradients


def test_overlapped_sums_where_the_number_of_micro_batches_changes(ranks, models):
    """SkyRL#2008, #2146: Megatron learns in the first step how many backward passes there are, if
    the schedule does not say which is the last. Here one schedule has all of a step's."""
    for found in ranks.run(DP2, run_windows):
        # Two ranks: 2 passes are 4. Of 3 the last one's sum begins before it, so chance decides
        # whether it is in.
        assert found[0] == found[2] == 4.0
        assert "Communication call has not been issued" in found[1]
    batches = [make_batch(num, seed=num) for num in (12, 3, 24, 6)]
    folder = models["qwen2"][0]
    overlapped = ranks.run(DP2, run_micro_batches, folder, batches, True)
    for (counts, found), (_, right) in zip(
        overlapped, ranks.run(DP2, run_micro_batches, folder, batches, False), strict=True
    ):
        assert len(set(counts)) > 2
        for one, other in zip(found, right, strict=True):
            assert all(map(torch.equal, one, other))
