"""The output layer in chunks of rows: its values and gradients are those of whole logits, and
nothing nearly as large as whole logits is ever there."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.dry_run.meter import META, Meter
from rlmath.actor import head_rows
from rlmath.actor.head import Head, HeadLinear, defer_logits
from rlmath.actor.logprobs import Distribution, vocab_parallel_log_probs
from rlmath.actor.rounding_noise import rounding_noise
from rlmath.actor.value import ValueHead
from rlmath.commands.plan.activations import logits_bytes
from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.memory import GIB
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

TOKENS, ROWS, HIDDEN, VOCAB, PADDED = 40, 25, 12, 50, 56
TEMPERATURE = 0.7
KEYS = {"temperature": TEMPERATURE, "vocab_size": VOCAB}


@pytest.fixture
def several_chunks(monkeypatch):
    """9 rows at once, softmax of 4 of them, the weight in blocks of 10."""
    monkeypatch.setattr(head_rows, "LOGITS_BYTES", 9 * 4 * PADDED)
    monkeypatch.setattr(head_rows, "TABLE_BYTES", 4 * 4 * PADDED)
    monkeypatch.setattr(head_rows, "BLOCK_BYTES", 10 * 4 * HIDDEN)


def make_inputs(dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=random).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=random).to(dtype)
    rows = torch.randperm(TOKENS, generator=random)[:ROWS].sort().values
    return hidden, weight, rows, torch.randint(VOCAB, (ROWS,), generator=random)


def run_chunked(in_float32=False, **more):
    def run(hidden, weight, rows, targets):
        head = Head(weight, HeadLinear(in_float32), sequence_parallel=False)
        return head.log_probs(hidden, rows, targets, Distribution(**(KEYS | more)))

    return run


def whole(in_float32=False, **more):
    def run(hidden, weight, rows, targets):
        if in_float32:
            hidden, weight = hidden.float(), weight.float()
        return vocab_parallel_log_probs(
            hidden @ weight.t(), rows, targets, Distribution(**(KEYS | more))
        )

    return run


def values_and_gradients(run, made, with_entropy=True):
    hidden, weight = made[0].clone().requires_grad_(), made[1].clone().requires_grad_()
    log_probs, entropy = run(hidden, weight, *made[2:])
    used = log_probs + 0.5 * entropy if with_entropy else log_probs
    (used * torch.linspace(-1, 1, ROWS)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return [log_probs.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize(
    ("more", "with_entropy"),
    [({}, True), ({}, False), ({"batch_invariant": True}, True), ({"in_float32": True}, True)],
)
@pytest.mark.usefixtures("several_chunks")
def test_equal_to_whole_logits(more, with_entropy):
    found = values_and_gradients(run_chunked(**more), make_inputs(), with_entropy)
    expected = values_and_gradients(whole(**more), make_inputs(), with_entropy)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))
    # Rows that nobody asked for, and the vocabulary's padding.
    untouched = torch.ones(TOKENS, dtype=torch.bool)
    untouched[make_inputs()[2]] = False
    assert not found[2][untouched].any() and not found[3][VOCAB:].any()


@pytest.mark.usefixtures("several_chunks")
def test_a_product_in_float32_of_a_bfloat16_model():
    """The same log-probs as whole logits in float32, gradients but for their last rounding."""
    found = values_and_gradients(run_chunked(in_float32=True), make_inputs(torch.bfloat16))
    expected = values_and_gradients(whole(in_float32=True), make_inputs(torch.bfloat16))
    assert [one.dtype for one in found] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for mine, other, limit in zip(found, expected, (1e-6, 1e-6, 1e-2, 1e-2), strict=True):
        torch.testing.assert_close(
            mine.float(), other.float(), rtol=limit, atol=limit * float(other.abs().max())
        )


@pytest.mark.usefixtures("several_chunks")
def test_chunked_head_passes_gradcheck():
    hidden, weight, rows, targets = make_inputs(torch.float64)
    inputs = [hidden[:12, :4].clone().requires_grad_(), weight[:, :4].clone().requires_grad_()]
    chosen = rows[rows < 12]

    def run(hidden, weight):
        return run_chunked()(hidden, weight, chosen, targets[: len(chosen)])

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.usefixtures("several_chunks")
def test_the_weights_gradient_goes_to_main_grad_beside_that_of_the_embedding():
    """As Megatron's hook has it, which adds what is in ``grad``: that of the tied embedding."""
    hidden, weight, rows, targets = make_inputs(torch.bfloat16)
    expected = values_and_gradients(run_chunked(), make_inputs(torch.bfloat16))[3].float()
    weight.requires_grad_()
    weight.main_grad = torch.ones(weight.shape)
    tokens = torch.arange(TOKENS)
    log_probs, entropy = run_chunked()(hidden.requires_grad_(), weight, rows, targets)
    ((log_probs + 0.5 * entropy) * torch.linspace(-1, 1, ROWS)).sum().backward()
    weight[tokens].sum().backward()
    torch.testing.assert_close(weight.main_grad - 1, expected, rtol=1e-2, atol=1e-2)
    assert weight.grad is not None and weight.grad.sum() == TOKENS * HIDDEN


def test_a_frozen_head_passes_the_gradient_on():
    hidden, weight, rows, targets = make_inputs()
    expected = values_and_gradients(whole(), make_inputs())[2]
    log_probs, entropy = run_chunked()(hidden.requires_grad_(), weight, rows, targets)
    ((log_probs + 0.5 * entropy) * torch.linspace(-1, 1, ROWS)).sum().backward()
    assert hidden.grad is not None and weight.grad is None
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-5)


def test_no_rows_and_a_slice_of_nothing_but_padding():
    hidden, weight, rows, targets = make_inputs()
    for chosen, rank in ((0, 0), (ROWS, 20)):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_probs, _ = run_chunked(rank=rank)(x, w, rows[:chosen], targets[:chosen])
        log_probs.sum().backward()
        assert len(log_probs) == chosen
        assert x.grad is not None and not x.grad.any()
        assert w.grad is not None and not w.grad.any()


class _ColumnParallelLinear(torch.nn.Linear):
    """By its name a layer whose output is rounded."""


def test_rounding_noise_reaches_the_logits():
    """It moves what linear layers give; this one gives its input."""
    layer = _ColumnParallelLinear(HIDDEN, PADDED)
    defer_logits(layer, in_float32=False)
    hidden, weight, rows, targets = make_inputs()
    assert layer(hidden)[0] is hidden
    with torch.no_grad():
        usual = Head(weight, layer.chunk, False).log_probs(
            hidden, rows, targets, Distribution(**KEYS)
        )[0]
        with rounding_noise(layer, seed=1):
            assert torch.equal(layer(hidden)[0], make_inputs()[0])
            noisy = Head(weight, layer.chunk, False).log_probs(
                hidden, rows, targets, Distribution(**KEYS)
            )[0]
    assert 0 < float((noisy - usual).abs().max()) < 1e-5


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "in_float32"), [("Qwen2.5-1.5B", False), ("DeepSeek-R1-Distill-Qwen-7B", True)]
)
def test_memory_of_32_768_tokens(name, in_float32):
    """At TP 1 at most 1 GiB over the weights, as the plan says; whole logits are 9 GiB."""
    spec, tokens = model_spec(KNOWN[name]), 32768
    meter = Meter()
    with meter:
        hidden = torch.empty(tokens, spec.hidden, dtype=torch.bfloat16, device=META)
        weight = torch.empty(spec.vocab, spec.hidden, dtype=torch.bfloat16, device=META)
        weight.requires_grad_()
        weight.main_grad = torch.empty(weight.shape, device=META)
        rows = torch.empty(tokens, dtype=torch.int64, device=META)
        before = meter.live["gpu"]
        with meter.phase() as peaks:
            log_probs, entropy = run_chunked(in_float32, vocab_size=spec.vocab)(
                hidden.requires_grad_(), weight, rows, rows
            )
            (log_probs.sum() + entropy.sum()).backward()
    peak = peaks["gpu"].num_bytes - before
    actor = ActorShape(Layout(), recompute_layers=0, max_tokens=tokens)
    planned = logits_bytes(spec, actor, backward=True, in_float32=in_float32)
    assert peak <= GIB
    assert planned == pytest.approx(peak, rel=0.1)


WIDTH = 64


def head(dtype):
    config = SimpleNamespace(sequence_parallel=False, hidden_size=WIDTH, params_dtype=dtype)
    made = ValueHead(config, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        made.weight.normal_(std=0.3)
        made.bias.fill_(5.0)
    return made


@pytest.mark.parametrize("positions", [3, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_those_of_float64(positions, dtype):
    made = head(dtype)
    hidden = torch.randn(positions, 1, WIDTH, dtype=dtype, requires_grad=True)
    values, bias = made(hidden)
    assert bias is None and values.shape == (positions, 1, 1) and values.dtype == torch.float32
    exact = [one.detach().double().requires_grad_() for one in (hidden, made.weight, made.bias)]
    expected = torch.nn.functional.linear(*exact)
    # Rounded to bfloat16 they would be up to 0.03 off.
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-5)
    wanted = torch.randn(positions, 1, 1)
    (values * wanted).sum().backward()
    (expected * wanted.double()).sum().backward()
    one_rounding = 2**-8 if dtype is torch.bfloat16 else 1e-5
    for found, reference in zip((hidden, made.weight, made.bias), exact, strict=True):
        assert found.grad is not None and found.grad.dtype == dtype and reference.grad is not None
        torch.testing.assert_close(
            found.grad.double(), reference.grad, rtol=one_rounding, atol=1e-3
        )


def test_no_gradient_is_kept_for_values_alone():
    with torch.no_grad():
        values, _ = head(torch.bfloat16)(torch.randn(5, 1, WIDTH, dtype=torch.bfloat16))
    assert values.grad_fn is None
