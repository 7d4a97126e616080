"""Between the first micro-batch and the last nothing makes the host wait for the GPU.

On meta tensors there is no data to wait for, so what asks for some fails: ``item``, ``nonzero``,
a boolean index, a copy to the host. Copies to the device, for which the host waits as well when
their memory is not pinned, are looked for by name.
"""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlmath.actor.head import Head, HeadLinear
from rlmath.actor.logprobs import Distribution, vocab_parallel_log_probs
from rlmath.actor.loss_fields import LossFields
from rlmath.actor.packing import PackedMicroBatch, SequenceRows, _packed_seq_params
from rlmath.actor.policy_loss import policy_loss
from rlmath.actor.value import value_loss
from rlmath.algorithms.losses import LOSSES
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.device import Platform

META = torch.device("meta")
TOKENS, VOCAB = 12, 32


class Operators(TorchDispatchMode):
    """Names of all operators, and those whose arguments come from another device."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()
        self.moves: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.names.add(name)
        devices = {x.device for x in (*args, out) if isinstance(x, Tensor) and x.dim()}
        if len(devices) > 1:
            self.moves.add(name)
        return out


def meta(*shape, dtype=torch.float32, grad=False):
    return torch.empty(shape, dtype=dtype, device=META, requires_grad=grad)


@pytest.fixture
def pack():
    integers = meta(TOKENS, dtype=torch.int64)
    return PackedMicroBatch(
        tokens=meta(1, 2 * TOKENS, dtype=torch.int64),
        position_ids=meta(1, 2 * TOKENS, dtype=torch.int64),
        packed_seq_params=None,
        rows=integers,
        targets=integers,
        sequence_ids=integers,
        response_rows=torch.arange(TOKENS),
        num_sequences=3,
    )


def test_meta_tensors_show_what_waits():
    mask, rows = meta(TOKENS, dtype=torch.bool), meta(TOKENS)
    waits = [mask.nonzero, mask.any().item, rows.cpu, lambda: rows[mask]]
    for wait in waits:
        with pytest.raises((NotImplementedError, RuntimeError)):
            wait()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rank", [0, 1], ids=["whole vocabulary", "its padding alone"])
def test_log_probs_and_their_gradient(rank, batch_invariant, pack):
    logits = meta(2 * TOKENS, VOCAB, grad=True)
    with Operators() as seen:
        log_probs, entropy = vocab_parallel_log_probs(
            logits,
            pack.rows,
            pack.targets,
            Distribution(
                temperature=0.7, vocab_size=VOCAB, rank=rank, batch_invariant=batch_invariant
            ),
        )
        gradients = [torch.empty_like(log_probs), torch.empty_like(entropy)]
        torch.autograd.backward([log_probs, entropy], gradients)
    assert {"amax", "index_put_"} <= seen.names or rank
    # Megatron has a batch-invariant kernel for the mean and none for the sum.
    if not rank:
        assert ("sum" in seen.names, "mean" in seen.names) == (not batch_invariant, batch_invariant)
    assert not seen.names & {"nonzero", "_local_scalar_dense", "masked_select", "item"}
    assert not seen.moves


@pytest.mark.parametrize("in_float32", [False, True])
def test_the_output_layer_in_chunks(in_float32, pack):
    hidden, weight = meta(2 * TOKENS, 4, grad=True), meta(VOCAB, 4, grad=True)
    head = Head(weight, HeadLinear(in_float32), sequence_parallel=False)
    with Operators() as seen:
        log_probs, entropy = head.log_probs(
            hidden, pack.rows, pack.targets, Distribution(temperature=0.7, vocab_size=VOCAB - 1)
        )
        torch.autograd.backward(
            [log_probs, entropy], [torch.empty_like(log_probs), torch.empty_like(entropy)]
        )
    assert {"amax", "mm", "index_put_"} <= seen.names
    assert not seen.names & {"nonzero", "_local_scalar_dense", "masked_select", "item"}
    assert not seen.moves


@pytest.mark.parametrize("loss", LOSSES.names())
def test_the_objective_of_a_micro_batch(loss, pack):
    names = (
        "old_log_probs",
        "engine_log_probs",
        "advantages",
        "weights",
        "ref_log_probs",
        "policy_factors",
    )
    values = {name: torch.zeros(TOKENS) for name in names}
    values["mask"] = torch.ones(TOKENS, dtype=torch.bool)
    fields = LossFields([pack], META, values)
    settings = dataclasses.replace(
        ObjectiveSettings(), loss=loss, kl_coef=0.1, entropy_coef=0.1, off_policy_mask_kl=0.1
    )
    log_probs, entropy = meta(TOKENS, grad=True), meta(TOKENS, grad=True)
    with Operators() as seen:
        total, (output, kept) = policy_loss(fields, settings)(pack, log_probs, entropy)
        total.backward()
    assert not seen.moves
    # The output is fetched when the schedule is done.
    assert output.loss.device == kept.log_probs.device == META
    assert kept.response_rows.device.type == "cpu"


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_models_loss(clip, pack):
    values = {name: torch.zeros(TOKENS) for name in ("old", "returns", "weights")}
    values["mask"] = torch.ones(TOKENS, dtype=torch.bool)
    fields = LossFields([pack], META, values)
    output = meta(2 * TOKENS, 1, grad=True)
    with Operators() as seen:
        total, kept = value_loss(fields, clip)(pack, output)
        total.backward()
    assert kept.device == META and not seen.moves


def test_attention_gets_lengths_as_numbers(monkeypatch):
    """Transformer Engine fetches from the GPU, in every layer, the longest length when it is not
    given, and whether two tensors of ends differ when both are."""
    monkeypatch.setattr(Platform, "torch_device", META)
    for contexts in (1, 2):
        params = _packed_seq_params(
            [SequenceRows(8), SequenceRows(4)],
            Platform("cuda", "nccl", "transformer_engine"),
            contexts,
            0,
        )
        assert type(params).__name__ == "PackedSeqParams" and params.qkv_format == "thd"
        assert (params.max_seqlen_q, params.max_seqlen_kv) == (8, 8)
        assert params.cu_seqlens_q.device == META
        assert params.cu_seqlens_q_padded is None and params.cu_seqlens_kv_padded is None
