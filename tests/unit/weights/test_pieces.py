"""Pieces of matrices on ranks, and the parameters that they make."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from rlmath.checks.layout import divided_layout
from rlmath.checks.weight_headers import tensors_in
from rlmath.cli import main
from rlmath.config.load import load
from rlmath.errors import ConfigError, ModelError, WeightsError
from rlmath.model.families import FAMILIES, Rule, family_of
from rlmath.model.parallel import Layout
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import padded_vocab_size
from rlmath.weights.buckets import TensorMeta, cut_into_buckets
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.megatron import load_from_hf
from rlmath.weights.pieces import hf_shapes, local_tensor, walk
from tests.contracts.fake_cuda import LiveBytes
from tests.support.planned_gathers import planned_gathers
from tests.unit.weights.model_ranks import gatherer_of, modules_like
from tests.unit.weights.shapes import ALL, LLAMA, QWEN2, QWEN3, QWEN3_5, QWEN3_MOE, random_weights


def shard(entry, spec, weights, tp_size, layer, expert):
    """Each rank's parameter by the pieces; what no piece fills is NaN."""
    padded = padded_vocab_size(spec.vocab, tp_size)
    result = []
    for rank in range(tp_size):
        local = local_tensor(entry, spec, rank, tp_size, padded, layer, expert)
        parameter = torch.full(local.shape, torch.nan)
        for p in local.pieces:
            source = weights[p.hf_name].narrow(p.dim, p.hf_start, p.length)
            parameter.narrow(p.dim, p.local_start, p.length).copy_(source)
        result.append(parameter)
    return result


def expected_shards(entry, spec, parts, tp_size):
    """Megatron's layout from its definition, with reshapes and chunks instead of intervals."""
    if entry.rule is Rule.replicated:
        return [parts[0]] * tp_size
    if entry.rule is Rule.column:
        return list(parts[0].chunk(tp_size, 0))
    if entry.rule is Rule.row:
        return list(parts[0].chunk(tp_size, 1))
    if entry.rule is Rule.gate_up:
        chunks = [part.chunk(tp_size, 0) for part in parts]
        return [torch.cat(of_rank) for of_rank in zip(*chunks, strict=True)]
    if entry.rule is Rule.vocabulary:
        rows = padded_vocab_size(spec.vocab, tp_size) - spec.vocab
        padding = torch.full((rows, spec.hidden), torch.nan)
        return list(torch.cat([parts[0], padding]).chunk(tp_size, 0))
    rest = parts[0].shape[1:]
    if entry.rule.name.startswith("delta"):
        chunks = [part.chunk(tp_size, 0) for part in delta_sections(entry, spec.linear, parts)]
        return [torch.cat(of_rank) for of_rank in zip(*chunks, strict=True)]
    if spec.family.gated_attention:
        heads = parts[0].reshape(spec.kv_heads, -1, 2, spec.head_dim, *rest)
        parts = [heads.transpose(1, 2).reshape(parts[0].shape), *parts[1:]]
    by_group = [part.reshape(spec.kv_heads, -1, spec.head_dim, *rest) for part in parts]
    fused = torch.cat(by_group, dim=1).reshape(-1, *rest)
    return list(fused.chunk(tp_size, 0))


def delta_sections(entry, linear, parts):
    """Queries, keys, values, and what else the matrix has, of all heads."""
    if entry.rule is not Rule.delta_in_by_head:
        width = linear.key_width
        return [*parts[0].tensor_split([width, 2 * width]), *parts[1:]]
    sharing = linear.value_heads // linear.key_heads
    key, value = linear.key_head_dim, sharing * linear.value_head_dim
    by_head = [part.reshape(linear.key_heads, -1, part.shape[1]) for part in parts]
    sections = (*by_head[0].split([key, key, value, value], 1), *by_head[1].chunk(2, 1))
    return [section.flatten(0, 1) for section in sections]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_shards_are_megatrons_layout_and_merge_back(spec, tp_size):
    # TP 4 is more than the 2 key-value heads; 53 tokens divide over neither 2 nor 4.
    weights = random_weights(spec)
    merged = {name: torch.full_like(t, torch.nan) for name, t in weights.items()}
    for entry, layer, expert in walk(spec):
        shards = shard(entry, spec, weights, tp_size, layer, expert)
        parts = [weights[t.name.format(layer=layer, expert=expert)] for t in entry.hf]
        expected = expected_shards(entry, spec, parts, tp_size)
        for rank, (got, wanted) in enumerate(zip(shards, expected, strict=True)):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
            local = local_tensor(
                entry, spec, rank, tp_size, padded_vocab_size(spec.vocab, tp_size), layer, expert
            )
            for p in local.pieces:
                part = got.narrow(p.dim, p.local_start, p.length)
                merged[p.hf_name].narrow(p.dim, p.hf_start, p.length).copy_(part)
    for name, tensor in weights.items():
        assert torch.equal(merged[name], tensor), name


def test_a_rank_can_hold_padding_alone():
    spec = replace(QWEN2, vocab=5)
    entry = next(e for e in family_of(spec.architecture).entries if e.rule is Rule.vocabulary)
    local = local_tensor(entry, spec, 3, 4, padded_vocab=8)
    assert local.shape == (2, spec.hidden)
    assert local.pieces == ()


@pytest.mark.parametrize(
    ("spec", "tp_size", "words"),
    [
        (replace(QWEN2, ffn=25), 2, "ffn of 25 does not divide over 2 ranks: 25 / 2 = 12.50"),
        (replace(QWEN2, heads=6, kv_heads=6), 4, "6 key-value heads over TP 4"),
        (replace(QWEN2, heads=2, kv_heads=2), 4, "query heads of 2 does not divide over 4"),
    ],
)
def test_indivisible_tensors_are_refused(spec, tp_size, words):
    with pytest.raises(WeightsError, match=words):
        for entry, layer, _ in walk(spec):
            local_tensor(entry, spec, 0, tp_size, padded_vocab_size(spec.vocab, tp_size), layer)


def test_names_are_those_of_the_published_models():
    assert "model.layers.2.self_attn.q_proj.bias" in hf_shapes(QWEN2)
    assert "lm_head.weight" in hf_shapes(QWEN2)
    assert hf_shapes(QWEN3)["model.layers.0.self_attn.q_norm.weight"] == (6,)
    assert "lm_head.weight" not in hf_shapes(QWEN3)
    assert not any("bias" in name for name in hf_shapes(LLAMA))
    moe = hf_shapes(QWEN3_MOE)
    assert moe["model.layers.2.mlp.experts.3.up_proj.weight"] == (12, 32)
    assert moe["model.layers.0.mlp.gate.weight"] == (4, 32)
    assert moe["model.layers.1.mlp.gate_proj.weight"] == (24, 32)
    assert "model.layers.1.mlp.gate.weight" not in moe


def test_an_architecture_has_one_table():
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))
    with pytest.raises(ModelError, match=r"architecture Gpt2 is not supported.*Qwen2ForC"):
        family_of("Gpt2")


@pytest.fixture(params=ALL.values(), ids=ALL)
def spec(request):
    result = request.param
    return result


def save(folder, weights):
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    return folder


@pytest.mark.parametrize("implementation", [0, 1], ids=["local", "transformer_engine"])
def test_local_and_te_layers_load_and_export(spec, implementation, tmp_path):
    parallel = ParallelRank()
    model = modules_like(spec, implementation, parallel)
    weights = random_weights(spec)
    load_from_hf([model], save(tmp_path, weights), spec, parallel)
    exported = dict(p for b in BucketGatherer([model], spec, parallel, 0.01).gather(0) for p in b)
    assert list(exported) == list(weights)
    for name, tensor in weights.items():
        assert torch.equal(exported[name], tensor), name


def test_wrapped_chunks_and_another_type(tmp_path):
    model = modules_like(QWEN2, 0, ParallelRank())
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module.module = model
    weights = random_weights(QWEN2)
    load_from_hf([wrapped], save(tmp_path, weights), QWEN2, ParallelRank())
    buckets = BucketGatherer([wrapped], QWEN2, ParallelRank(), dtype=torch.bfloat16).gather(0)
    for name, tensor in (pair for bucket in buckets for pair in bucket):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, weights[name].bfloat16())


def test_exported_tensors_are_no_views_of_parameters(tmp_path):
    model = modules_like(QWEN2, 0, ParallelRank())
    load_from_hf([model], save(tmp_path, random_weights(QWEN2)), QWEN2, ParallelRank())
    before = {name: p.clone() for name, p in model.named_parameters()}
    for bucket in BucketGatherer([model], QWEN2, ParallelRank()).gather(0):
        for _, tensor in bucket:
            tensor.zero_()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_gatherer_sends_the_values_of_the_moment(tmp_path):
    model = modules_like(QWEN2, 0, ParallelRank())
    load_from_hf([model], save(tmp_path, random_weights(QWEN2)), QWEN2, ParallelRank())
    gatherer = BucketGatherer([model], QWEN2, ParallelRank())
    # Megatron's distributed optimizer gives parameters other memory like this.
    norm = model.get_parameter("decoder.final_layernorm.weight")
    norm.data = torch.full_like(norm, 5.0)
    tensors = dict(p for b in gatherer.gather(0) for p in b)
    assert torch.equal(tensors["model.norm.weight"], torch.full((QWEN2.hidden,), 5.0))


def test_a_rank_that_keeps_no_tensors_has_memory_for_messages_only(monkeypatch):
    """Its GPU may be full of keys and values when an engine on other GPUs starts again."""
    gatherer, _ = gatherer_of(monkeypatch, replace(QWEN2, vocab=64), 2, 0.01)
    message = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: message)
    peaks = {}
    for keeps in (True, False):
        with LiveBytes("cpu") as memory:
            found = [len(bucket) for bucket in gatherer.gather(None, keeps=keeps)]
        assert sum(found) == keeps * len(gatherer.tensors)
        peaks[keeps] = memory.peak
    assert 0 < peaks[False] < 0.6 * peaks[True]


def test_files_with_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
    model = modules_like(QWEN2, 0, ParallelRank())

    def load(changes):
        weights = {**random_weights(QWEN2), **changes}
        whole = {name: tensor for name, tensor in weights.items() if tensor is not None}
        load_from_hf([model], save(tmp_path, whole), QWEN2, ParallelRank())

    with pytest.raises(WeightsError, match=r"lm_head\.weight \(53, 32\) is missing"):
        load({"lm_head.weight": None})
    with pytest.raises(WeightsError, match=r"model\.surprise \(4,\) is unknown"):
        load({"model.surprise": torch.zeros(4)})
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(
        WeightsError, match=r"down_proj\.weight is \(24, 32\), config\.json says \(32, 24\)"
    ):
        load({name: torch.zeros(24, 32)})
    load({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})


def test_a_text_model_taken_out_of_one_with_images_keeps_its_names(tmp_path):
    weights = random_weights(QWEN3_5)
    names = {name: name.replace("model.", "model.language_model.", 1) for name in weights}
    given = {names[name]: tensor for name, tensor in weights.items()}
    model = modules_like(QWEN3_5, 0, ParallelRank())
    load_from_hf([model], save(tmp_path, given), QWEN3_5, ParallelRank())
    buckets = BucketGatherer([model], QWEN3_5, ParallelRank()).gather(0)
    for name, tensor in itertools.chain.from_iterable(buckets):
        assert torch.equal(tensor, weights[name])
    folder = tmp_path / "model.safetensors"
    assert {name: one.shape for name, one in tensors_in(folder).items()} == hf_shapes(QWEN3_5)


def test_a_tied_model_may_hold_its_output_layer_twice(tmp_path):
    model = modules_like(QWEN3, 0, ParallelRank())
    weights = random_weights(QWEN3)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    load_from_hf([model], save(tmp_path, weights), QWEN3, ParallelRank())
    weights["lm_head.weight"][-1, -1] += 1
    with pytest.raises(WeightsError, match="tie_word_embeddings to false"):
        load_from_hf([model], save(tmp_path, weights), QWEN3, ParallelRank())


def test_megatron_parameters_without_a_place_are_named(tmp_path):
    folder = save(tmp_path, random_weights(QWEN2))
    model = modules_like(QWEN2, 0, ParallelRank())
    model.get_submodule("decoder.layers.1").register_parameter("gate", nn.Parameter(torch.ones(1)))
    with pytest.raises(WeightsError, match=r"decoder\.layers\.1\.gate is in no table"):
        load_from_hf([model], folder, QWEN2, ParallelRank())
    model = modules_like(QWEN2, 0, ParallelRank())
    del model.get_submodule("decoder.layers.2.self_attention.linear_qkv").bias
    with pytest.raises(WeightsError, match=r"layer 2 has no .*linear_qkv\.bias.*q_proj\.bias"):
        load_from_hf([model], folder, QWEN2, ParallelRank())
    model = modules_like(replace(QWEN2, ffn=26), 0, ParallelRank())
    with pytest.raises(WeightsError, match=r"linear_fc1\.weight .*\(52, 32\).*needs \(48, 32\)"):
        load_from_hf([model], folder, QWEN2, ParallelRank())


def test_a_part_that_no_rank_holds_is_named():
    model = modules_like(QWEN2, 0, ParallelRank())
    del model.get_submodule("decoder.layers")[2]
    with pytest.raises(WeightsError, match=r"no Megatron rank holds any of model\.layers\.2\."):
        BucketGatherer([model], QWEN2, ParallelRank())
    half = replace(QWEN2, vocab=20)
    shard = modules_like(half, 0, ParallelRank())
    with pytest.raises(WeightsError, match=r"20 rows do not fit|embed_tokens"):
        BucketGatherer([shard], QWEN2, ParallelRank())


def test_every_entry_has_a_name_for_each_implementation():
    for family in (family_of(name) for name in ALL):
        for entry in family.entries:
            assert all(("{layer}" in m) == entry.per_layer for m in entry.megatron)
            assert all(("{expert}" in m) == entry.per_expert for m in entry.megatron)


SOURCES = [Layout(), Layout(2), Layout(4), Layout(2, 3), Layout(1, 2, pipeline_layers=(1, 2))]


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_every_element_is_gathered_once(spec, source):
    gathered = {
        name: torch.zeros(size, dtype=torch.int32) for name, size in hf_shapes(spec).items()
    }
    for op in planned_gathers(spec, source):
        gathered[op.tensor].narrow(op.dim, op.start, op.length).add_(1)
    for name, count in gathered.items():
        assert (count == 1).all(), name


def test_buckets_hold_whole_tensors_up_to_their_size():
    metas = [TensorMeta(name, size, torch.bfloat16) for name, size in hf_shapes(QWEN2).items()]
    buckets = cut_into_buckets(metas, 0.004)
    for bucket in buckets:
        assert bucket.num_bytes <= int(0.004 * 2**20) or len(bucket.tensors) == 1
    assert [t.meta.name for bucket in buckets for t in bucket.tensors] == list(hf_shapes(QWEN2))


def test_a_tied_embedding_travels_once_and_from_the_first_stage():
    gathers = list(planned_gathers(QWEN3, Layout(2, 3)))
    ranks = [op.rank for op in gathers if "embed" in op.tensor]
    assert [(rank.pp, rank.tp) for rank in ranks] == [(0, 0), (0, 1)]
    assert not any("lm_head" in op.tensor for op in gathers)


def test_experts_come_from_their_expert_rank():
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    gathers = planned_gathers(QWEN3_MOE, Layout(expert_parallel=2))
    assert [op.rank.ep for op in gathers if op.tensor == name] == [1]


def chunks_of(layers, layout):
    return tuple(tuple(map(tuple, stage)) for stage in layout.stage_chunks(layers))


def test_layers_of_virtual_and_uneven_stages():
    assert chunks_of(8, Layout(1, 2, virtual_stages=2)) == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert chunks_of(7, Layout(1, 3, pipeline_layers=(1, 4, 2))) == (
        ((0,),),
        ((1, 2, 3, 4),),
        ((5, 6),),
    )
    assert chunks_of(7, Layout(1, 2, virtual_stages=2)) == (((0, 1), (4, 5)), ((2, 3), (6,)))
    assert chunks_of(7, Layout(1, 3, virtual_stages=2)) == (
        ((0,), (4,)),
        ((1, 2), (5,)),
        ((3,), (6,)),
    )
    assert chunks_of(5, Layout()) == (((0, 1, 2, 3, 4),),)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (QWEN2, ["actor.pipeline_parallel=4"], "has 3 layers, and every stage needs one"),
        (QWEN2, ["actor.tensor_parallel=3"], "leaves"),
        (QWEN2, ["rollout.tensor_parallel=3"], "rollout.tensor_parallel=3"),
        (QWEN2, ["actor.expert_parallel=2"], "no experts"),
        (QWEN3_MOE, ["actor.expert_parallel=3"], "4 experts / 3 leaves 1"),
    ],
    ids=str,
)
def test_impossible_layout_shows_the_arithmetic(model, settings, words):
    config = load(["model.path=tiny", "runner.run_dir=runs/none", *settings])
    with pytest.raises(ConfigError, match=words):
        divided_layout(config, model)


def test_prints_a_table_and_json(tmp_path, capsys):
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 32,
        "max_position_embeddings": 128,
        "intermediate_size": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "vocab_size": 53,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = [f"model.path={tmp_path}", *LAYOUT, "actor.virtual_stages=2"]
    assert main(["plan", "weights", *options]) == 0
    table = capsys.readouterr().out
    assert "actor TP 2 x PP 2 -> engine TP 2" in table
    assert "vocabulary 53, padded to 54" in table
    assert "stage 1: layers 1-1, 3-3; each rank has" in table
    assert main(["plan", "weights", *options, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["padded_vocab"] == 54
    assert sum(bucket["num_bytes"] for bucket in plan["buckets"]) == plan["num_bytes"]
    assert plan["stages"] == [[[0], [2]], [[1], [3]]]


LAYOUT = ("actor.tensor_parallel=2", "actor.pipeline_parallel=2", "rollout.tensor_parallel=2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("model.path=Qwen3-8B actor.tensor_parallel=0", "has to be at least 1"),
        ("model.path=Qwen3-8B weights.bucket_size_mib=0", "weights.bucket_size_mib=0: has to be"),
        ("Qwen3-8B", "give model.path=Qwen3-8B"),
        ("--json", "give model.path"),
        ("model.path=Qwen3-9B", "no model that is known by name; did you mean Qwen3.5-9B?"),
    ],
)
def test_options_that_cannot_be_are_named(options, words, capsys):
    assert main(["plan", "weights", *options.split()]) == 2
    assert words in capsys.readouterr().err
