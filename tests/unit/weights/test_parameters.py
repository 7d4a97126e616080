"""Parameters by name, on modules that have the names of Megatron's layers and nothing else."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rlmath.errors import WeightsError
from rlmath.model.families import family_of
from rlmath.model.rank_layout import ParallelRank
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.megatron import hf_tensors, load_from_hf
from tests.unit.weights.model_ranks import modules_like
from tests.unit.weights.shapes import ALL, QWEN2, QWEN3, random_weights


@pytest.fixture(params=ALL.values(), ids=ALL)
def spec(request):
    result = request.param
    return result


def save(folder, weights):
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({}))
    return folder


@pytest.mark.parametrize("implementation", [0, 1], ids=["local", "transformer_engine"])
def test_both_implementations_load_and_export(spec, implementation, tmp_path):
    parallel = ParallelRank()
    model = modules_like(spec, implementation, parallel)
    weights = random_weights(spec)
    load_from_hf([model], save(tmp_path, weights), spec, parallel)
    exported = dict(p for b in hf_tensors([model], spec, parallel, 0.01) for p in b)
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
    buckets = hf_tensors([wrapped], QWEN2, ParallelRank(), dtype=torch.bfloat16)
    for name, tensor in (pair for bucket in buckets for pair in bucket):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, weights[name].bfloat16())


def test_exported_tensors_are_no_views_of_parameters(tmp_path):
    model = modules_like(QWEN2, 0, ParallelRank())
    load_from_hf([model], save(tmp_path, random_weights(QWEN2)), QWEN2, ParallelRank())
    before = {name: p.clone() for name, p in model.named_parameters()}
    for bucket in hf_tensors([model], QWEN2, ParallelRank()):
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
