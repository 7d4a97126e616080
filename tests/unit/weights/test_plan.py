"""The plan: each byte is gathered once, each engine rank has its share, errors show why."""

import json

import pytest
import torch

from rlmath.cli import main
from rlmath.errors import UserError, WeightsError
from rlmath.model.parallel import Layout
from rlmath.weights.pieces import hf_shapes
from rlmath.weights.plan import plan_weights
from tests.unit.weights.shapes import ALL, LLAMA, QWEN2, QWEN3, QWEN3_5, QWEN3_MOE

SOURCES = [Layout(), Layout(2), Layout(4), Layout(2, 3), Layout(1, 2, pipeline_layers=(1, 2))]


def elements(plan, operation):
    """1 where the operation's run lies in its tensor, which is counted from its shape."""
    mask = torch.zeros(hf_shapes(plan.spec)[operation.tensor], dtype=torch.int32)
    mask.narrow(operation.dim, operation.start, operation.length).fill_(1)
    assert operation.num_bytes == int(mask.sum()) * plan.dtype.itemsize
    return mask


@pytest.mark.parametrize("engine_tp", [1, 2, 4])
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("spec", ALL.values(), ids=ALL)
def test_every_element_is_gathered_once_and_kept_by_some_engine_rank(spec, source, engine_tp):
    plan = plan_weights(spec, source, Layout(engine_tp), 0.005)
    gathered = {
        name: torch.zeros(size, dtype=torch.int32) for name, size in hf_shapes(spec).items()
    }
    kept = {name: torch.zeros_like(count) for name, count in gathered.items()}
    for planned in plan.buckets:
        names = {t.meta.name for t in planned.bucket.tensors}
        for operation in planned.gathers:
            assert operation.tensor in names
            gathered[operation.tensor] += elements(plan, operation)
        for operation in planned.loads:
            assert operation.tensor in names
            kept[operation.tensor] += elements(plan, operation)
    for name in gathered:
        assert (gathered[name] == 1).all(), name
        assert (kept[name] >= 1).all(), name
    # 2 key-value heads on 4 engine ranks: each head is kept twice.
    layer = next(n for n in range(spec.layers) if not spec.is_linear_layer(n))
    copies = kept[f"model.layers.{layer}.self_attn.k_proj.weight"]
    assert (copies == max(1, engine_tp // spec.kv_heads)).all()
    assert (kept[f"model.layers.{layer}.self_attn.q_proj.weight"] == 1).all()
    assert (kept["model.norm.weight"] == engine_tp).all()


def test_buckets_hold_whole_tensors_up_to_their_size():
    plan = plan_weights(QWEN2, Layout(), Layout(), bucket_size_mib=0.004)
    limit_bytes = int(0.004 * 2**20)
    for planned in plan.buckets:
        assert planned.bucket.num_bytes <= limit_bytes or len(planned.bucket.tensors) == 1
    names = [t.meta.name for p in plan.buckets for t in p.bucket.tensors]
    assert names == list(hf_shapes(QWEN2))
    assert plan.num_bytes == sum(2 * torch.Size(size).numel() for size in hf_shapes(QWEN2).values())


def test_a_tied_embedding_travels_once_and_from_the_first_stage():
    plan = plan_weights(QWEN3, Layout(2, 3), Layout())
    ranks = [op.rank for p in plan.buckets for op in p.gathers if "embed" in op.tensor]
    assert [(r.pp, r.tp) for r in ranks if not isinstance(r, int)] == [(0, 0), (0, 1)]
    assert not any("lm_head" in op.tensor for p in plan.buckets for op in p.gathers)


def test_experts_come_from_their_expert_rank_and_may_stay_whole():
    plan = plan_weights(QWEN3_MOE, Layout(expert_parallel=2), Layout(2, expert_parallel=2))
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    gathers = [op for p in plan.buckets for op in p.gathers if op.tensor == name]
    loads = [op for p in plan.buckets for op in p.loads if op.tensor == name]
    assert [op.rank.ep for op in gathers if not isinstance(op.rank, int)] == [1]
    assert [(op.rank, op.length) for op in loads] == [(1, QWEN3_MOE.moe_ffn)]


def test_an_engine_rank_keeps_its_heads_of_linear_attention():
    """As vLLM: of 4 key heads of 3 and 8 value heads of 5 half, in queries, keys and values."""
    plan = plan_weights(QWEN3_5, Layout(), Layout(2))
    kept = {}
    for op in (op for planned in plan.buckets for op in planned.loads if op.rank == 1):
        kept.setdefault(op.tensor, []).append((op.dim, op.start, op.length))
    stem = "model.layers.0.linear_attn."
    channels = [(0, 6, 6), (0, 18, 6), (0, 44, 20)]
    assert kept[f"{stem}conv1d.weight"] == kept[f"{stem}in_proj_qkv.weight"] == channels
    assert kept[f"{stem}A_log"] == kept[f"{stem}in_proj_b.weight"] == [(0, 4, 4)]
    assert kept[f"{stem}out_proj.weight"] == [(1, 20, 20)]


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
    ("layout", "words"),
    [
        (Layout(1, 4), "has 3 layers, and every stage needs one; use at most 3"),
        (Layout(1, 3, virtual_stages=2), r"actor.virtual_stages=2.*1\+1\+1 layers.*=1 or less"),
        (Layout(1, 2, pipeline_layers=(4, 1)), r"5 layers.* add up to 3; works: \[2,1\]"),
        (Layout(3), "3 ranks|over TP 3"),
        (Layout(expert_parallel=2), "no experts"),
    ],
    ids=str,
)
def test_impossible_layout_shows_the_arithmetic(layout, words):
    with pytest.raises(UserError, match=words):
        plan_weights(QWEN2, layout, Layout())


def test_engine_layouts_that_do_not_fit():
    with pytest.raises(WeightsError, match=r"query heads of 8 does not divide over 3 ranks"):
        plan_weights(LLAMA, Layout(), Layout(3))
    with pytest.raises(WeightsError, match="4 experts do not divide over 3"):
        plan_weights(QWEN3_MOE, Layout(expert_parallel=3), Layout())


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
    assert "stage 1: layers 1-1, 3-3" in table
    assert "pp 1 tp 1" in table
    assert main(["plan", "weights", *options, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["padded_vocab"] == 54
    assert sum(op["num_bytes"] for b in plan["buckets"] for op in b["gathers"]) == plan["num_bytes"]


LAYOUT = ("actor.tensor_parallel=2", "actor.pipeline_parallel=2", "rollout.tensor_parallel=2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("model.path=Qwen3-8B actor.tensor_parallel=0", "has to be at least 1"),
        ("model.path=Qwen3-8B weights.bucket_size_mib=0", "weights.bucket_size_mib=0: has to be"),
        ("model.path=Qwen3-8B --engine-expert-parallel", "Qwen3-8B has no experts"),
        ("Qwen3-8B", "give model.path=Qwen3-8B"),
        ("--json", "give model.path"),
        ("model.path=Qwen3-9B", "no model that is known by name; did you mean Qwen3.5-9B?"),
    ],
)
def test_options_that_cannot_be_are_named(options, words, capsys):
    assert main(["plan", "weights", *options.split()]) == 2
    assert words in capsys.readouterr().err
