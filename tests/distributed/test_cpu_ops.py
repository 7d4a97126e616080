"""Operators that replace Megatron's on a CPU give what those give."""

from types import SimpleNamespace

import torch

from rlmath.actor.packing import SequenceRows
from rlmath.device.cpu_ops import PackedRotary
from rlmath.model.parallel import Layout

SIZES = [5, 1, 9, 7, 2]
# The first of 5 tokens; two that have its first 3; one of 2; one of 6, and one that has 4 of those.
SHARING = [
    SequenceRows(5),
    SequenceRows(6, 3, 0),
    SequenceRows(1, 3, 0),
    SequenceRows(2),
    SequenceRows(6),
    SequenceRows(2, 4, 14),
]


def compare_rotary(layout, platform):
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    ours = PackedRotary(apply_rotary_pos_emb)
    group = parallel_state.get_context_parallel_group()
    config = SimpleNamespace(
        rotary_interleaved=False,
        multi_latent_attention=False,
        context_parallel_size=1,
        apply_rope_fusion=False,
    )
    ends = torch.tensor([0, *SIZES]).cumsum(0)
    differences = []
    # The second set of angles and ends has to replace what is remembered of the first.
    for longest, width, mscale in ((max(SIZES), 8, 1.0), (max(SIZES) + 3, 6, 1.3)):
        angles = torch.rand(longest, 1, 1, width // 2, dtype=torch.float64)
        freqs = torch.cat([angles, angles], -1)
        ends = ends.clone()
        for _ in range(2):
            x = torch.randn(sum(SIZES), 3, 8, dtype=torch.float64)
            grad = torch.randn_like(x)
            results = []
            for rotary in (ours, apply_rotary_pos_emb):
                leaf = x.clone().requires_grad_()
                out = rotary(leaf, freqs, config, ends, mscale, group)
                out.backward(grad)
                results.append((out.detach(), leaf.grad))
            differences += [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
    return differences


def test_rotary_embeddings_of_packed_sequences(ranks):
    (differences,) = ranks.run(Layout(1, 1, 1), compare_rotary)
    assert len(differences) == 8
    assert max(differences) < 1e-14


def test_rotary_embeddings_continue_from_shared_rows():
    config = SimpleNamespace(
        rotary_interleaved=False, multi_latent_attention=False, context_parallel_size=1
    )
    angles = torch.rand(9, 1, 1, 4, dtype=torch.float64)
    freqs, x = torch.cat([angles, angles], -1), torch.randn(11, 2, 8, dtype=torch.float64)
    found = PackedRotary(None)(x, freqs, config, torch.tensor([[0, 5, 7, 11], [0, 3, 0, 0]]))
    whole = PackedRotary(None)
    for rows, first in (([0, 1, 2, 3, 4], 0), ([5, 6], 3), ([7, 8, 9, 10], 0)):
        before = torch.randn(first, 2, 8, dtype=torch.float64)
        sequence = torch.cat([before, x[rows]])
        expected = whole(sequence, freqs, config, torch.tensor([0, len(sequence)]))
        assert torch.equal(found[rows], expected[first:])


def compare_attention(layout, platform):
    from rlmath.actor.attention import PackedAttention, rectangles

    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = 0.4
    cpu = torch.device("cpu")
    differences = []
    for rows, window in (
        ([SequenceRows(n) for n in SIZES], None),
        ([SequenceRows(4)] * 3, None),
        ([SequenceRows(n) for n in SIZES], 3),
        ([SequenceRows(4)] * 3, 1),
        ([SequenceRows(4)], 4),
        (SHARING, None),
        (SHARING, 2),
        # All of one length, and yet no rectangle.
        ([SequenceRows(4), SequenceRows(1, 3, 0), SequenceRows(2, 2, 0)], None),
    ):
        attention.window = window
        total = sum(one.own for one in rows)
        shapes = ((total, 4, 8), (total, 2, 8), (total, 2, 8))
        inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        grad = torch.randn(shapes[0], dtype=torch.float64)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attention._rectangles(*leaves, rectangles(rows, cpu))
        out.backward(grad)
        # The reference: one sequence after the other, softmax written out.
        plain = [x.clone().requires_grad_() for x in inputs]
        found, begin = [], 0
        for one in rows:
            places = torch.arange(begin, begin + one.own)
            shared = torch.arange(one.shared_start, one.shared_start + one.shared)
            begin += one.own
            q, k, v = (x[torch.cat([shared, places])] for x in plain)
            k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * attention.softmax_scale
            place = torch.arange(scores.size(-1))
            behind = place[:, None] - place[None, :]
            hidden = (behind < 0) | (behind >= (window or len(place)))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            found.append(torch.einsum("hqk,khd->qhd", weights, v)[one.shared :])
        expected = torch.cat(found)
        expected.backward(grad)
        differences.append(float((out - expected).detach().abs().max()))
        differences += [
            float((a.grad - b.grad).abs().max()) for a, b in zip(leaves, plain, strict=True)
        ]
    return differences


def test_attention_of_packed_sequences(ranks):
    (differences,) = ranks.run(Layout(1, 1, 1), compare_attention)
    assert len(differences) == 32
    assert max(differences) < 1e-12
