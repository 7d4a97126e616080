"""LoRA on real gloo ranks: right against a dense float64 model, and the same on every layout."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.actor.step_probe import FINDINGS
from rlmath.actor.worker import ActorWorker
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.checkpoint.state import begin_saves, load_model, save_model
from rlmath.errors import UserError
from rlmath.model.lora import (
    ALL_TARGETS,
    ATTENTION_TARGETS,
    DELTA_TARGETS,
    LATENT_TARGETS,
    MLP_TARGETS,
    TARGETS,
    Lora,
    adapter_shapes,
)
from rlmath.model.parallel import Layout
from rlmath.model.spec import read_model_spec
from rlmath.validation.convert import to_hf
from rlmath.weights.adapters import local_adapters
from rlmath.weights.fingerprint import fingerprints
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.slices import fingerprint_in
from tests.support.actors import LAYOUTS, build, gather, make_batch
from tests.support.models import (
    TINY_SIZES,
    make_glm,
    make_hybrid,
    make_latent,
    make_mixture,
    make_olmo2,
)
from tests.support.models import build as model_build

TEMPERATURE = 0.7
ALL = Lora(rank=4, alpha=6.0, targets=TARGETS)
SOME = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "up_proj"), layers=(0, 2))
EXPERTS = Lora(rank=4, alpha=6.0, targets=MLP_TARGETS)
EVERY = Lora(rank=4, alpha=6.0, targets=ALL_TARGETS)
PLAIN = StepPlan(objective=ObjectiveSettings())


class Dense(nn.Module):
    """A linear layer with an adapter, as in arXiv:2106.09685, section 4.1."""

    def __init__(self, base, a, b, scale):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.a, self.b = nn.Parameter(a.double()), nn.Parameter(b.double())

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.t() @ self.b.t())


def write_peft(folder, model, lora):
    """A folder in PEFT's format with random adapters; the result begins with them."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in load_file(f"{model}/model.safetensors").items():
        parts = name.split(".")
        if parts[-2] not in lora.targets or parts[-1] != "weight":
            continue
        if lora.layers is not None and int(parts[2]) not in lora.layers:
            continue
        rows, columns = weight.shape
        for kind, shape in (("A", (lora.rank, columns)), ("B", (rows, lora.rank))):
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_{kind}.weight"
            tensors[key] = 0.2 * torch.randn(shape, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return dataclasses.replace(lora, init_from=str(folder))


def dense(model, lora):
    from transformers import AutoModelForCausalLM

    # Its products of all experts at once know no float64.
    found = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, experts_implementation="eager"
    ).requires_grad_(False)
    tensors = load_file(f"{lora.init_from}/adapter_model.safetensors")
    of_experts = [key for key in tensors if ".experts." in key]
    adapt_experts(found, {key: tensors.pop(key) for key in of_experts}, lora)
    for key in [key for key in tensors if key.endswith("lora_A.weight")]:
        stem = key.removesuffix(".lora_A.weight")
        name = stem.removeprefix("base_model.model.")
        parent, _, last = name.rpartition(".")
        adapted = Dense(
            found.get_submodule(name),
            tensors[key],
            tensors[stem + ".lora_B.weight"],
            lora.alpha / lora.rank,
        )
        setattr(found.get_submodule(parent), last, adapted)
    return found


def adapt_experts(model, tensors, lora):
    """Add the product of each expert's ``B`` and ``A`` to its rows of transformers' matrices of all
    experts; they are kept by PEFT's names for a matrix each."""
    model.of_experts = {
        key.removeprefix("base_model.model."): one.double().requires_grad_()
        for key, one in tensors.items()
    }
    by_module = {}
    for key, a in model.of_experts.items():
        if key.endswith(".lora_A.weight"):
            stem = key.removesuffix(".lora_A.weight")
            module, _, expert, last = stem.rsplit(".", 3)
            delta = lora.alpha / lora.rank * model.of_experts[f"{stem}.lora_B.weight"] @ a
            by_module.setdefault(module + ".experts", {})[int(expert), last] = delta
    for module, deltas in by_module.items():
        experts = model.get_submodule(module)
        width = experts.down_proj.size(2)
        rows = {
            "gate_proj": ("gate_up_proj", slice(width)),
            "up_proj": ("gate_up_proj", slice(width, None)),
            "down_proj": ("down_proj", slice(None)),
        }
        whole = {name: experts._parameters.pop(name) for name in ("gate_up_proj", "down_proj")}
        added = {name: torch.zeros_like(one) for name, one in whole.items()}
        for (expert, last), delta in deltas.items():
            name, where = rows[last]
            added[name][expert, where] += delta
        for name, one in whole.items():
            setattr(experts, name, one + added[name])


def dense_log_probs(model, batch):
    """``[R]`` float64, differentiable."""
    found, start = [], 0
    for prompt, size in zip(batch.prompt_lengths, batch.sequence_lengths, strict=True):
        tokens = batch.tokens[start : start + int(size)]
        start += int(size)
        logits = model(tokens[None]).logits[0, int(prompt) - 1 : -1] / TEMPERATURE
        found.append(logits.log_softmax(-1).gather(1, tokens[int(prompt) :, None]).squeeze(1))
    return torch.cat(found)


def gradients(actor, batch):
    """Metrics of an update, and the gradients that it had, by PEFT's names; of this rank's parts
    those that are whole."""
    kept = {}
    finish = actor.finish_minibatch

    def keep(discard):
        assert not discard
        lora = actor.settings.lora
        assert lora is not None
        for one in local_adapters(actor.chunks, actor.spec, actor.parallel, lora):
            for piece in one.layout.pieces:
                part = one.tensor.main_grad.narrow(piece.dim, piece.local_start, piece.length)
                corner = f"{piece.hf_name} {piece.dim} {piece.hf_start}"
                kept[corner] = part.clone()
        return finish(discard)

    actor.finish_minibatch = keep
    result = actor.update(batch, PLAIN, seed=0)
    actor.finish_minibatch = finish
    return result.minibatches[0], kept


def run(layout, platform, model, batch, lora, changes):
    """Log-probs, metrics and gradients of an update, frozen weights that moved, what is trained."""
    actor = build(layout, platform, model, lora=lora, **changes)
    before = {n: p.detach().clone() for n, p in actor.module.named_parameters()}
    values = actor.log_probs(batch)
    metrics, grads = gradients(actor, batch)
    trained = [n for n, p in actor.module.named_parameters() if p.requires_grad]
    moved = [n for n, p in actor.module.named_parameters() if not p.equal(before[n])]
    held = sum(len(group["params"]) for group in actor.optimizer.param_groups)
    second = actor.update(batch, PLAIN, seed=1).minibatches[0]
    return values, [metrics, second], grads, trained, moved, held, actor.log_probs(batch)


# With the distributed optimizer each data-parallel rank has a part of the summed gradient.
PLAIN_OPTIMIZER = {"optimizer": {"distributed": False}}
CASES = [
    ("all", LAYOUTS[1], PLAIN_OPTIMIZER),
    ("all", LAYOUTS[2], PLAIN_OPTIMIZER),
    ("all", Layout(2, 1, 1), {"model": ModelSettings(torch.float32, recompute="full")}),
    ("some", Layout(1, 2, 1), {"model": ModelSettings(torch.float32, logits="chunked")}),
    # More ranks than key-value heads: a rank has rows of the queries alone.
    ("some", Layout(4, 1, 1), {}),
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("peft")
    return {
        "all": write_peft(folder / "all", tiny_model, ALL),
        "some": write_peft(folder / "some", tiny_model, SOME),
    }


def expectation(model, lora):
    """The dense model in float64: a batch, log-probs, gradients by PEFT's names, their norm."""
    batch, found = make_batch(), dense(model, lora)
    log_probs, mask = dense_log_probs(found, batch), batch.loss_mask
    # With the policy as its own old policy the ratio is 1, and its gradient that of log p.
    (-(batch.advantages.double() * log_probs)[mask].sum() / mask.sum()).backward()
    grads = {
        f"{name}.lora_{kind.upper()}.weight": getattr(one, kind).grad
        for name, one in found.named_modules()
        if isinstance(one, Dense)
        for kind in "ab"
    }
    grads |= {name: one.grad for name, one in found.of_experts.items()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    return batch, log_probs.detach(), grads, norm


@pytest.fixture(scope="module")
def expectations(tiny_model, adapters):
    return {which: expectation(tiny_model, lora) for which, lora in adapters.items()}


@pytest.mark.parametrize(("which", "layout", "changes"), CASES, ids=str)
def test_log_probs_and_gradients_are_those_of_a_dense_model(
    ranks, tiny_model, adapters, expectations, which, layout, changes
):
    check(ranks, tiny_model, adapters[which], expectations[which], layout, changes)


def check(ranks, model, lora, expected, layout, changes):
    batch, log_probs, grads, norm = expected
    results = ranks.run(layout, run, model, batch, lora, changes)
    ours = gather(batch, [values for values, *_ in results])
    torch.testing.assert_close(ours.log_probs.double(), log_probs, atol=3e-5, rtol=0)
    seen = set()
    for _, metrics, own, trained, moved, held, _ in results:
        assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=2e-5)
        assert all(".adapter." in name for name in trained) and len(trained) == held > 0
        assert set(moved) <= set(trained) and moved
        for corner, value in own.items():
            name, dim, start = corner.split()
            whole = grads[name].narrow(int(dim), int(start), value.shape[int(dim)])
            torch.testing.assert_close(value.double(), whole, atol=2e-6, rtol=2e-4)
            seen.add(name)
    assert seen == set(grads)


def make_experts(folder):
    """A Qwen3-MoE without dense layers."""
    return make_mixture(folder, mlp_only_layers=[])


def run_strides(layout, platform, model, batch, lora):
    """Whether torch can multiply each gradient with its frozen weight as one matrix."""
    from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight as Frozen

    whole, backward = [], Frozen.backward

    def record(ctx, grad):
        rows = range(grad.dim() - 2)
        whole.append(all(grad.stride(i) == grad.stride(i + 1) * grad.size(i + 1) for i in rows))
        return backward(ctx, grad)

    Frozen.backward = staticmethod(record)
    try:
        build(layout, platform, model, lora=lora).update(batch, PLAIN, seed=0)
    finally:
        Frozen.backward = staticmethod(backward)
    return whole


def test_frozen_weights_are_multiplied_by_whole_gradients(ranks, tiny_model, adapters):
    """Row by row an update of a real vocabulary took ten times as long."""
    batch = make_batch()
    (whole,) = ranks.run(Layout(1, 1, 1), run_strides, tiny_model, batch, adapters["all"])
    assert len(whole) > 20 and all(whole), whole.count(False)


def run_findings(layout, platform, model, batch, lora):
    return build(layout, platform, model, lora=lora).update(batch, PLAIN, seed=0).step_findings


def test_rows_of_a_matrix_without_an_adapter_are_no_missing_gradient(ranks, tmp_path):
    """Keys alone are adapted: of elements that are spread over queries, keys and values none is
    theirs, as with GLM-4.5."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 4}
    model_build("qwen3", **TINY_SIZES | heads).save_pretrained(tmp_path)
    keys = Lora(rank=8, alpha=8.0, targets=("k_proj",))
    (found,) = ranks.run(Layout(1, 1, 1), run_findings, str(tmp_path), make_batch(), keys)
    assert [FINDINGS[int(one.kind)] for _, one in found] == [""]


@pytest.mark.parametrize(
    ("make", "targets", "layout"),
    [
        # The output is normalized with the adapter in it.
        (make_olmo2, TARGETS, Layout(2, 1, 1)),
        # Each expert has its own, beside the dense layer's.
        (make_mixture, TARGETS, Layout(2, 1, 2, expert_parallel=2)),
        # Shared by two ranks, beside experts that every token goes to.
        pytest.param(
            make_glm,
            ("o_proj", "gate_proj", "down_proj"),
            Layout(2, 1, 1),
            marks=pytest.mark.long,
        ),
        # Latent vectors, which tensor ranks gather, with sequence parallelism.
        (make_latent, ALL_TARGETS, Layout(2, 1, 2, expert_parallel=2)),
        # Query with gate in one; of linear attention queries, keys, values and gate of each head.
        (make_hybrid, (*ATTENTION_TARGETS, *DELTA_TARGETS), Layout(2, 1, 1)),
    ],
    ids=str,
)
def test_lora_families_match_a_dense_model(ranks, tmp_path, make, targets, layout):
    model = make(tmp_path / "model")
    # Large changes of a gated delta net amplify rounding.
    alpha = 0.5 if make is make_hybrid else ALL.alpha
    lora = dataclasses.replace(ALL, targets=targets, alpha=alpha)
    lora = write_peft(tmp_path / "peft", model, lora)
    check(ranks, model, lora, expectation(model, lora), layout, PLAIN_OPTIMIZER)


def run_new(layout, platform, model, batch, steps):
    """With new adapters: log-probs of policy and reference, metrics of updates, and log-probs of
    both after them; at last the bytes of host memory that the reference takes."""
    actor = build(layout, platform, model, lora=ALL, reference="frozen")
    before = actor.log_probs(batch), actor.log_probs(batch, "reference")
    metrics = [actor.update(batch, PLAIN, seed=step).minibatches[0] for step in range(steps)]
    after = actor.log_probs(batch), actor.log_probs(batch, "reference")
    return before, metrics, after, actor.reference


@pytest.fixture(scope="module")
def alone(ranks, tiny_model):
    batch = make_batch()
    (found,) = ranks.run(Layout(1, 1, 1), run_new, tiny_model, batch, 3)
    return batch, found


def test_new_adapters_change_nothing_and_the_reference_is_the_base_model(alone):
    _, (before, metrics, after, kept) = alone
    assert kept is None
    assert torch.equal(before[0].log_probs, before[1].log_probs)
    assert torch.equal(before[1].log_probs, after[1].log_probs)
    assert (after[0].log_probs - after[1].log_probs).abs().max() > 1e-2
    assert all(one["grad_norm"] > 0 for one in metrics)


def run_merged(layout, platform, model, folder, lora):
    """Tensors sent from the device and from host memory; a folder of each kind is written."""
    worker = ActorWorker.__new__(ActorWorker)
    worker.platform, worker.rank = platform, dist.get_rank()
    actor = build(layout, platform, model, lora=lora, offload="all")
    worker.actor, worker.value_model = actor, None
    arguments = {"read": actor.device_state.read, "merge": actor.merger()}
    worker.gatherer = BucketGatherer(actor.chunks, actor.spec, actor.parallel, 0.02, **arguments)
    here = worker.weights_fingerprints()
    part = {
        "model.layers.0.self_attn.o_proj.weight": ((0, 16), (16, 32)),
        "model.norm.weight": None,
    }
    in_slice = worker.weights_fingerprints(part)
    actor.release()
    assert "parameters" in actor.device_state._released
    assert worker.weights_fingerprints() == here
    assert worker.weights_fingerprints(part) == in_slice
    assert in_slice["model.norm.weight"] == here["model.norm.weight"]
    sent = {name: one for bucket in worker.gatherer.gather(None) for name, one in bucket}
    assert not worker.gatherer.find_drift()
    worker.save_hf(f"{folder}/hf", model, f"{folder}/hf_adapter")
    assert fingerprints(sent.items()) == here
    assert in_slice == {name: fingerprint_in(part, name, sent[name], 0, 0) for name in part}
    # And where engines compute adapters themselves.
    worker.adapter_source = worker._adapter_source(SimpleNamespace(bucket_size_mib=0.002))
    unmerged = worker.adapter_source.gatherer
    assert len(unmerged.buckets) > 2
    alone = {name: one for bucket in unmerged.gather(None) for name, one in bucket}
    wanted = worker.weights_fingerprints()
    assert fingerprints(alone.items()).items() <= wanted.items()
    actor.load_parameters()
    assert worker.weights_fingerprints() == wanted
    base = fingerprints(load_file(f"{model}/model.safetensors").items())
    assert {name: wanted[name] for name in base} == base
    assert len(wanted) == len(base) + len(alone)
    norm = "model.norm.weight"
    in_slice = {name: wanted[name] for name in (norm, *alone)}
    assert worker.weights_fingerprints({norm: None}) == in_slice
    # Fingerprints that checkpoints and replays know stay those of the merged model, once.
    assert worker.weights_changes().fingerprints == ({} if worker.rank else here)
    return sent, alone


@pytest.mark.parametrize(
    ("which", "layout"), [("all", Layout(2, 2, 1)), ("some", Layout(4, 1, 1))], ids=str
)
def test_lora_sync_sends_the_merged_model(ranks, tiny_model, adapters, tmp_path, which, layout):
    check_sent(ranks, tiny_model, adapters[which], layout, tmp_path)


def test_experts_are_sent_merged_and_written_for_peft(ranks, tmp_path):
    """Each expert from the rank that has it, by the names of single matrices."""
    model = make_mixture(tmp_path / "model")
    lora = write_peft(tmp_path / "peft", model, EXPERTS)
    assert ".mlp.experts.3.down_proj.lora_A.weight" in " ".join(adapters_of(lora))
    check_sent(ranks, model, lora, Layout(2, 1, 2, expert_parallel=2), tmp_path)


def test_adapters_of_latent_attention_are_sent_merged_and_written_for_peft(ranks, tmp_path):
    model = make_latent(tmp_path / "model")
    lora = write_peft(tmp_path / "peft", model, EVERY)
    names = " ".join(adapters_of(lora))
    for target in (*LATENT_TARGETS, "o_proj", "mlp.shared_experts.up_proj"):
        assert f"{target}.lora_A.weight" in names
    check_sent(ranks, model, lora, Layout(2, 1, 2, expert_parallel=2), tmp_path)


def check_sent(ranks, model, lora, layout, tmp_path):
    results = ranks.run(layout, run_merged, model, str(tmp_path), lora)
    base, tensors = load_file(f"{model}/model.safetensors"), adapters_of(lora)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(exported) == set(base)
    for name, weight in base.items():
        a, b = (tensors.get(f"{name.removesuffix('.weight')}.lora_{kind}.weight") for kind in "AB")
        whole = weight.double()
        if a is not None and b is not None:
            whole = whole + lora.alpha / lora.rank * b.double() @ a.double()
            assert not torch.equal(exported[name], weight)
        torch.testing.assert_close(exported[name].double(), whole, atol=1e-6, rtol=1e-6)
        for sent, _ in results:
            assert torch.equal(sent[name], exported[name])
    written = adapters_of(dataclasses.replace(lora, init_from=str(tmp_path / "hf_adapter")))
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(written[name], tensor), name
        scaled = tensor * (lora.alpha / lora.rank) if ".lora_B." in name else tensor
        for _, alone in results:
            assert torch.equal(alone[name], scaled), name
    assert all(alone.keys() == tensors.keys() for _, alone in results)


def adapters_of(lora):
    tensors = load_file(f"{lora.init_from}/adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): one for name, one in tensors.items()}


def run_resumed(layout, platform, model, batch, folder, lora, steps, changes):
    """Metrics of updates up to a checkpoint (none are made: it is loaded) and after it."""
    actor = build(layout, platform, model, lora=lora, **changes)
    actor.release()
    before, after = steps
    for step in range(before):
        actor.update(batch, PLAIN, seed=step)
        actor.release()
    if before:
        actor.load_parameters()
        with actor.device_state.optimizer_readable():
            pending = begin_saves({"actor": actor}, folder)
        # The checkpoint has the state of this moment, whatever happens meanwhile.
        result = [actor.update(batch, PLAIN, seed=before + s).minibatches[0] for s in range(after)]
        pending.result()
    else:
        actor.device_state.load("parameters", "gradients", "optimizer")
        load_model(actor, folder)
        result = [actor.update(batch, PLAIN, seed=2 + s).minibatches[0] for s in range(after)]
    return result, actor.log_probs(batch)


@pytest.mark.parametrize(
    ("layout", "changes", "make", "lora"),
    [
        (Layout(1, 1, 2), {"offload": "optimizer"}, None, ALL),
        # Other kinds of matrices, and another optimizer.
        pytest.param(
            Layout(2, 1, 1),
            {"optimizer": {"distributed": False}, "model": ModelSettings(torch.bfloat16)},
            None,
            ALL,
            marks=pytest.mark.long,
        ),
        pytest.param(
            Layout(1, 1, 2, expert_parallel=2), {}, make_latent, EVERY, marks=pytest.mark.long
        ),
        # Nothing but experts is trained.
        (Layout(1, 1, 2, expert_parallel=2), {}, make_experts, EXPERTS),
    ],
    ids=str,
)
def test_a_run_resumes_bit_by_bit_and_in_other_layouts(
    ranks, tiny_model, tmp_path, layout, changes, make, lora
):
    batch = make_batch()
    model = tiny_model if make is None else make(tmp_path / "model")
    given = (model, batch, str(tmp_path), lora)
    through = ranks.run(layout, run_resumed, *given, (2, 2), changes)
    resumed = ranks.run(layout, run_resumed, *given, (0, 2), changes)
    for one, other in zip(through, resumed, strict=True):
        assert one[0] == other[0]
        if one[1] is not None:
            assert torch.equal(one[1].log_probs, other[1].log_probs)
    # Adapters, and up to three float32 tensors of each, with headers.
    shapes = adapter_shapes(read_model_spec(model), lora).values()
    trained = sum(map(math.prod, shapes))
    held = sum(p.stat().st_size for p in (tmp_path / "actor").glob("*.distcp"))
    assert 12 * trained <= held < 16 * trained + 9_000 * len(shapes)
    if layout.tensor_parallel == 1:
        other = Layout(2, 2, 1)
        for metrics, _ in ranks.run(other, run_resumed, *given, (0, 2), {}):
            for one, reference in zip(metrics, through[0][0], strict=True):
                assert one == pytest.approx(reference, rel=3e-5, abs=3e-6)


def run_refused(layout, platform, model, folder, lora):
    actor = build(layout, platform, model, lora=lora)
    try:
        load_model(actor, folder)
    except UserError as error:
        return str(error)
    return ""


def run_save(layout, platform, model, folder, lora):
    save_model(build(layout, platform, model, lora=lora), folder)


def another(model, folder):
    """A copy of a model of which one number is another."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_lora_resume_refuses_another_adapter_or_base(ranks, tiny_model, tmp_path):
    layout, folder = Layout(1, 1, 1), str(tmp_path / "saved")
    ranks.run(layout, run_save, tiny_model, folder, ALL)
    (said,) = ranks.run(layout, run_refused, tiny_model, folder, ALL)
    assert said == ""
    (said,) = ranks.run(layout, run_refused, tiny_model, folder, None)
    assert "actor.lora" in said
    (said,) = ranks.run(layout, run_refused, tiny_model, folder, SOME)
    assert "actor.lora" in said
    other = another(tiny_model, tmp_path / "other")
    (said,) = ranks.run(layout, run_refused, other, folder, ALL)
    assert "model.path" in said and "base" in said


def run_reset(layout, platform, model, batch, folder, lora):
    """Log-probs of the reference at first, of the policy when it is reset, of the reference after
    one more update, and of that from a checkpoint."""
    kind = "reset"
    actor = build(layout, platform, model, lora=lora, reference=kind)
    assert actor.reference is not None
    assert len(actor.reference) == len(actor.adapters) * 2
    first = actor.log_probs(batch, "reference")
    actor.update(batch, PLAIN, seed=0)
    at_reset = actor.log_probs(batch)
    actor.renew_reference(1.0, clear_optimizer=True)
    actor.update(batch, PLAIN, seed=1)
    save_model(actor, folder)
    after = actor.log_probs(batch, "reference")
    loaded = build(layout, platform, model, lora=lora, reference=kind)
    load_model(loaded, folder)
    return first, at_reset, after, loaded.log_probs(batch, "reference")


def test_a_reset_reference_and_one_to_begin_with_are_adapters(
    ranks, tiny_model, adapters, expectations, tmp_path
):
    batch, log_probs, _, _ = expectations["all"]
    given = (tiny_model, batch, str(tmp_path), adapters["all"])
    results = ranks.run(Layout(1, 2, 1), run_reset, *given)
    first, at_reset, after, loaded = (
        gather(batch, list(values)).log_probs for values in zip(*results, strict=True)
    )
    # With adapters to begin with, these are part of the reference.
    torch.testing.assert_close(first.double(), log_probs, atol=3e-5, rtol=0)
    assert torch.equal(after, at_reset) and torch.equal(loaded, at_reset)
    assert not torch.equal(first, at_reset)


def run_export(layout, platform, model, batch, folder, other):
    """Export a trained run and its checkpoint; what is said of another base model."""
    actor = build(layout, platform, model, lora=ALL)
    actor.update(batch, PLAIN, seed=0)
    worker = ActorWorker.__new__(ActorWorker)
    worker.actor = actor
    worker.save_hf(f"{folder}/hf", model, None)
    save_model(actor, f"{folder}/saved")
    to_hf(platform, f"{folder}/saved", f"{folder}/of_checkpoint", model)
    try:
        to_hf(platform, f"{folder}/saved", f"{folder}/wrong", other)
    except UserError as error:
        return str(error)
    return ""


def test_a_checkpoint_is_exported_merged(ranks, tiny_model, tmp_path):
    given = (tiny_model, make_batch(), str(tmp_path), another(tiny_model, tmp_path / "other"))
    (said,) = ranks.run(Layout(1, 1, 1), run_export, *given)
    assert "adapters of another model" in said
    ours, of_checkpoint, base = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (tmp_path / "hf", tmp_path / "of_checkpoint", tiny_model)
    )
    assert all(torch.equal(ours[name], of_checkpoint[name]) for name in base)
    assert not torch.equal(
        ours["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"]
    )
