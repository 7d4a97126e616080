import json

import pytest
import torch

from rlmath.checks.layout import divided_layout
from rlmath.cli import main
from rlmath.config.load import load
from rlmath.errors import ConfigError
from rlmath.model.parallel import Layout
from rlmath.weights.buckets import TensorMeta, cut_into_buckets
from rlmath.weights.pieces import hf_shapes
from tests.support.planned_gathers import planned_gathers
from tests.unit.weights.shapes import ALL, QWEN2, QWEN3, QWEN3_MOE

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
