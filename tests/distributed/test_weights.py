"""Hugging Face folder to Megatron on real gloo ranks and back, for every family and layout."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.model.parallel import Layout
from rlmath.model.spec import read_model_spec
from rlmath.validation.convert import read_checkpoint
from rlmath.weights.expert_shares import NOTHING, ExpertShare
from rlmath.weights.fingerprint import fingerprints
from rlmath.weights.hf_files import HfFolderReader
from rlmath.weights.megatron import check_folder
from rlmath.weights.pieces import expert_tensors
from tests.distributed.weights_ranks import Case, Ranks
from tests.support import models
from tests.support.planned_gathers import planned_gathers

LAYOUTS = [Case(2, 2), Case(4, 1)]
COPIED = ("qwen2_tied", "qwen3", "llama3", "mistral", "olmo3", "yarn")
SEQUENCES = [[5, 17, 100, 3, 3, 64, 9], [1, 2, 99, 50, 7, 80, 33, 12, 45, 6, 6], [42, 0]]


def _name(value):
    return value.name() if isinstance(value, Case) else value


FAMILIES = [family for family in models.FAMILIES if family != "deepseek_v3_in_vllm"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each family as transformers saves it."""
    result = {}
    for name in FAMILIES:
        model = models.build(name)
        models.perturb(model, 0.2)
        result[name] = tmp_path_factory.mktemp(name) / "hf"
        model.save_pretrained(result[name])
    return result


@pytest.fixture(scope="module")
def ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = Ranks(port)
    yield ranks
    ranks.close()


def _read(folder):
    with HfFolderReader(folder, read_model_spec(folder)) as reader:
        return {name: reader.read(name) for name in reader.names()}


def _same(got, expected):
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def _check_round_trip(ranks, folder, case):
    expected = _read(folder)
    results = ranks.call("round_trip", str(folder), case, 0.01)
    _same(results[0]["to_rank_0"], expected)
    assert all(result["to_rank_0"] == {} for result in results[1:])
    for result in results:
        _same(result["to_all"], expected)
        _same(result["written"], expected)
        assert result["fingerprints"] == fingerprints(expected.items())
        assert result["changes"]
        assert result["buckets"] > 5
        assert result["padding"] is None or not result["padding"].any()
    if case.ep == 1 and case.etp is None:
        assert results[0]["sends"] == _planned_sends(folder, case)


def _planned_sends(folder, case):
    """Tensors that each rank of the first copy of the model sends by the plan."""
    chunks = case.vp or 1
    layout = Layout(case.tp, case.pp, pipeline_layers=case.stages, virtual_stages=chunks)
    spec = read_model_spec(folder)
    # Megatron numbers ranks by tensor, then data, then pipeline.
    return {
        (op.tensor, op.dim, op.start, op.length): op.rank.tp + op.rank.pp * (4 // case.pp)
        for op in planned_gathers(spec, layout)
    }


@pytest.fixture(scope="module")
def reference(folders):
    """transformers' logits, ``[tokens, vocab]``."""
    import transformers

    result = {}
    for name, folder in folders.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            rows = [model(torch.tensor([tokens])).logits[0] for tokens in SEQUENCES]
        result[name] = torch.cat(rows)
    return result


# By layout first: changing it costs the ranks seconds, changing the model nothing.
# On four tensor ranks two of them share a head of keys and values; the plain command has that of
# biases, fused files and linear attention.
@pytest.mark.parametrize(
    ("case", "family"),
    [
        pytest.param(case, name, marks=[pytest.mark.long] * (case.tp == 4 and name in COPIED))
        for case in LAYOUTS
        for name in ("qwen2", "phi3", "qwen3_5", *COPIED)
    ],
    ids=_name,
)
def test_weights_round_trip_and_log_probs_match_transformers(
    ranks, folders, reference, case, family
):
    _check_round_trip(ranks, folders[family], case)
    _check_log_probs(ranks, folders[family], reference[family], case)


def test_virtual_stages_there_and_back(ranks, folders):
    _check_round_trip(ranks, folders["qwen2_tied"], Case(tp=2, pp=2, vp=2))


def test_uneven_stages_there_and_back(ranks, folders, reference):
    family, case = "qwen2_tied", Case(pp=2, stages=(1, 3))
    _check_round_trip(ranks, folders[family], case)
    _check_log_probs(ranks, folders[family], reference[family], case)


# The plain command has each family, and each layout with one of them.
@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen3_moe", Case(pp=2, ep=2)),
        ("qwen3_moe", Case(tp=2, ep=4, etp=1)),
        ("qwen3_moe", Case(tp=4, etp=1)),
        ("qwen3_235b", Case(pp=4)),
        ("glm4_moe", Case(pp=2, ep=2, stages=(1, 3))),
        pytest.param("glm4_moe", Case(tp=2, ep=2), marks=pytest.mark.long),
        ("deepseek_v3", Case(tp=2, ep=2)),
        pytest.param("deepseek_v3", Case(pp=2, ep=2, stages=(1, 3)), marks=pytest.mark.long),
        ("qwen3_next", Case(tp=2, ep=2)),
        ("qwen3_5_moe", Case(pp=2, ep=2, stages=(1, 3))),
        ("qwen3_next", Case(tp=4)),
    ],
    ids=_name,
)
def test_experts_there_and_back_and_log_probs_are_those_of_transformers(
    ranks, folders, reference, case, family
):
    _check_round_trip(ranks, folders[family], case)
    _check_log_probs(ranks, folders[family], reference[family], case)


HALVES = [ExpertShare(None, part, 2) for part in (0, 1)]
QUARTERS = [ExpertShare(None, part, 4) for part in range(4)]


def _owned_indices(runs, name):
    """Rows or columns of a tensor that a rank holds."""
    return {
        at for run in runs if run.name == name for at in range(run.start, run.start + run.length)
    }


@pytest.mark.parametrize(
    ("family", "case", "shares"),
    [
        # Two stages, and an engine of four workers.
        ("qwen3_moe", Case(pp=2, ep=2), QUARTERS),
        # The actor's ranks have slices of experts too, and not those of the worker on their GPU.
        ("glm4_moe", Case(tp=4), [QUARTERS[part] for part in (1, 0, 3, 2)]),
        # An engine whose workers have whole experts, and ranks without an engine.
        (
            "qwen3_moe",
            Case(tp=2, ep=4, etp=1),
            [ExpertShare(frozenset({0, 3})), NOTHING, ExpertShare(frozenset({1, 2})), NOTHING],
        ),
        # Two engines of two workers, each with half of every expert.
        ("glm4_moe", Case(tp=2, ep=2), HALVES * 2),
    ],
    ids=_name,
)
def test_a_rank_gets_its_share_of_the_experts_alone(ranks, folders, family, case, shares):
    """Bit by bit what it gets otherwise, twice and after meeting again; and bytes are counted."""
    bucket_mib = 0.001  # Smaller than an expert's matrix.
    experts = expert_tensors(read_model_spec(folders[family]))
    results = ranks.call("expert_exchange", str(folders[family]), case, bucket_mib, shares)
    for update in range(3):
        sent_bytes = 0
        for rank, share in enumerate(shares):
            got = results[rank][update]
            assert got["routed"] and list(got["shared"]) == list(got["whole"])
            lacks_bytes = 0
            for name, whole in got["whole"].items():
                expected = whole
                if name in experts:
                    expected = torch.full_like(whole, torch.nan)
                    if share.experts is None or experts[name] in share.experts:
                        dim = 1 if "down_proj" in name else 0
                        size = whole.shape[dim] // share.parts
                        part = range(share.part * size, (share.part + 1) * size)
                        expected.narrow(dim, part.start, size).copy_(
                            whole.narrow(dim, part.start, size)
                        )
                        lacks = set(part) - _owned_indices(got["holds"], name)
                        lacks_bytes += len(lacks) * whole.nbytes // whole.shape[dim]
                assert torch.equal(got["shared"][name].isnan(), expected.isnan()), name
                assert torch.equal(got["shared"][name].nan_to_num(), expected.nan_to_num()), name
            # It receives the experts that it lacks, and no others.
            of_all, none, nothing = got["whole_bytes"]
            dense, received, given = got["shared_bytes"]
            assert (none, nothing) == (0, 0)
            assert received == lacks_bytes
            # A broadcast brings it all experts that it does not hold.
            assert received <= 0.7 * (of_all - dense)
            sent_bytes += given - received
        assert sent_bytes == 0
        # Every update sends other weights.
        name = next(iter(experts))
        if update:
            before = results[0][update - 1]["whole"][name]
            assert torch.equal(results[0][update]["whole"][name], -1.5 * before)


@pytest.mark.parametrize("shares", [HALVES * 2, [ExpertShare()] * 4], ids=["halves", "whole"])
def test_experts_go_to_all_where_shares_would_be_more_to_send(ranks, folders, shares):
    """Two stages, and engines of two workers or one: each of two ranks would send both engines a
    layer's experts."""
    case, folder = Case(pp=2, ep=2), str(folders["qwen3_moe"])
    for rank in ranks.call("expert_exchange", folder, case, 0.001, shares):
        for update in rank:
            assert not update["routed"]
            assert update["shared_bytes"] == update["whole_bytes"]


# By name: family, layout, what each worker of an engine keeps, and how many engines.
OVER_NCCL = {
    "stages": ("qwen3_moe", {"pp": 2, "ep": 2}, [[None, part, 4] for part in range(4)], 1),
    # The actor's ranks have slices of experts too, and ranks send for both workers.
    "engines": ("glm4_moe", {"tp": 4}, [[None, 1, 2], [None, 0, 2]], 2),
    "whole experts": (
        "qwen3_moe",
        {"tp": 2, "ep": 4, "etp": 1},
        [[[0, 3], 0, 1], [[1, 2], 0, 1]],
        2,
    ),
    # Another copy of the model sends nothing.
    "uneven": ("qwen3_moe", {"pp": 2, "stages": [1, 3]}, [[None, 0, 2], [None, 1, 2]], 2),
    # Where two ranks have a copy of the model, rank 0 sends all to all four workers.
    "few": ("qwen3_moe", {"pp": 2}, [[None, part, 4] for part in range(4)], 1),
}
SENDERS = {"stages": 4, "engines": 2, "whole experts": 2, "uneven": 2, "few": 1}


def test_each_worker_gets_its_share_of_the_experts_over_nccl(folders):
    """Bit by bit, in two updates and after meeting again, with vLLM's own trainer and receiver over
    gloo; with matrices shorter and longer than a message."""
    cases = [
        (name, str(folders[family]), case, shares, engines)
        for name, (family, case, shares, engines) in OVER_NCCL.items()
    ]
    program = [sys.executable, "-m", "tests.distributed.nccl_ranks", json.dumps(cases)]
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert not done.returncode, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (_, _, shares, engines) in OVER_NCCL.items():
        first = found[name][0]
        workers = len(shares)
        assert first["wrong"] == []
        assert first["updates"] == [3] * engines * workers
        experts, *part = shares[-1]
        last = ExpertShare(None if experts is None else frozenset(experts), *part)
        # Before they met, before each update, and before they met again.
        said = (
            f"weights.transport=nccl: worker {workers - 1} of engine {engines - 1} keeps "
            f"{ExpertShare(None, 5, 7)} of the experts, and the actor would send it "
            f"{last}"
        )
        told = [["WeightsError", said]] * 5 if name != "few" else []
        assert all(one["refused"] == told for one in found[name])
        assert first["largest_bytes"] > 2048
        senders = [one["sent"] for one in found[name] if any(one["sent"])]
        assert len(senders) == SENDERS[name]
        # Each of an engine's workers gets its part of the experts, and all else.
        whole, experts = first["whole_bytes"], first["expert_bytes"]
        of_worker = whole if name == "few" else whole - experts + experts // workers
        assert senders == [[of_worker] * 3] * len(senders)
        # A sender and a worker of each engine have a communicator; a worker is in one.
        joined = engines * workers if name == "few" else engines
        groups = sorted(tuple(group) for one in found[name] for group in one["groups"])
        assert groups == sorted(
            (place, 1 + joined) for place in range(1 + joined) for _ in range(len(senders))
        )


def _check_log_probs(ranks, folder, expected, case):
    results = ranks.call("logits", str(folder), case, SEQUENCES)
    last_stages = [result for result in results if result is not None]
    assert len(last_stages) == 4 // case.pp
    for result in last_stages:
        difference = (result.log_softmax(-1) - expected.log_softmax(-1)).abs().max()
        assert difference < 2e-5
    # The model is no constant: the comparison would see a wrong weight.
    assert expected.std() > 0.1


@pytest.mark.parametrize(
    ("case", "parameter", "tensor"),
    [
        (Case(tp=4), "decoder.layers.3.input_layernorm.weight", "layers.3.input_layernorm.weight"),
        (Case(tp=2, pp=2), "decoder.final_layernorm.weight", "model.norm.weight"),
        (Case(tp=2, pp=2), "output_layer.weight", "model.embed_tokens.weight"),
    ],
)
def test_ranks_that_should_hold_the_same_and_do_not_are_named(
    ranks, folders, case, parameter, tensor
):
    messages = ranks.call("planted_difference", str(folders["qwen2_tied"]), case, parameter)
    assert len(set(messages)) == 1
    assert tensor in messages[0]
    assert "and 3 should hold the same" in messages[0]


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen3", Case(tp=2, pp=2)),
        ("olmo2", Case(tp=2)),
        ("phi3", Case(tp=2)),
        ("qwen3_moe", Case(tp=2, ep=2)),
        ("qwen2", Case()),
    ],
    ids=_name,
)
def test_a_right_model_is_aligned(ranks, folders, family, case):
    found = ranks.call("alignment_with_fault", str(folders[family]), case, None)
    mean, difference, message = found[0]
    assert mean < 1.00002
    assert difference is None
    assert message == "good"
    assert found[1:] == [None] * 3


@pytest.mark.parametrize("damage", ["nan", "inf", "untied"])
def test_weights_that_no_model_has_are_named(ranks, folders, tmp_path, damage):
    """By the ranks that read them: here those of one stage, and one tensor rank of two."""
    folder = tmp_path / damage
    shutil.copytree(folders["qwen2_tied"], folder)
    tensors = _read(folder)
    if damage == "untied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert ranks.call("refusal", str(folder), Case(tp=2, pp=2)) == [None] * 4
        # Last row: the second tensor rank's, on the first stage and on the last.
        tensors["lm_head.weight"][-1, 3] += 1.0
        said, by = "tie_word_embeddings to false", [1, 3]
    else:
        tensors["model.layers.3.mlp.down_proj.weight"][0, -1] = float(damage)
        said, by = "model.layers.3.mlp.down_proj.weight in .* holds NaN or infinity", [3]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    messages = ranks.call("refusal", str(folder), Case(tp=2, pp=2))
    assert [rank for rank, message in enumerate(messages) if message is not None] == by
    assert all(re.search(said, messages[rank]) for rank in by)


FAULTS = {
    "a router's bias left out": "layer 2, mlp.down_proj (linear_fc2), or the experts",
    "a latent vector's norm left out": "layer 2, rotary embedding, q_norm, k_norm or the attention",
    "k and v swapped": "layer 2, self_attn.k_proj",
    "wrong rope theta": "layer 0, rotary embedding",
    "gate and up swapped": "layer 1, mlp.gate_proj",
    "one layer shifted": "layer 1, input_layernorm",
    "one flipped bit": "layer 3, mlp.down_proj",
}
OF_OTHER_MODELS = (
    "one layer shifted",
    "a router's bias left out",
    "a latent vector's norm left out",
)
OF_A_DENSE_MODEL = [fault for fault in FAULTS if fault not in OF_OTHER_MODELS]


@pytest.mark.parametrize(
    ("fault", "case", "family"),
    [
        ("one layer shifted", Case(), "qwen2"),
        # Each rank has a part of what is damaged, or none of it.
        *[(fault, Case(tp=2, pp=2), "qwen2") for fault in OF_A_DENSE_MODEL],
        # Phi-3's files have the matrices as one.
        ("k and v swapped", Case(tp=2, pp=2), "phi3"),
        ("gate and up swapped", Case(tp=2, pp=2), "phi3"),
        ("a router's bias left out", Case(pp=2, ep=2), "glm4_moe"),
        ("a latent vector's norm left out", Case(tp=2, ep=2), "deepseek_v3"),
    ],
    ids=_name,
)
def test_a_planted_fault_is_caught_and_named(ranks, folders, fault, case, family):
    found = ranks.call("alignment_with_fault", str(folders[family]), case, fault)
    _, difference, message = found[0]
    assert difference.startswith(FAULTS[fault])
    assert "mean exp|difference| of log-probs is" in message
    assert FAULTS[fault] in message


def test_rounding_in_bfloat16_does_not_hide_the_fault(ranks, folders):
    arguments = (str(folders["qwen2"]), Case(), "k and v swapped", torch.bfloat16)
    _, difference, _ = ranks.call("alignment_with_fault", *arguments)[0]
    assert difference is not None and difference.startswith(FAULTS["k and v swapped"])


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *(("qwen2_tied", Case(tp=2, pp=2)), ("phi3", Case(tp=2, pp=2)), ("qwen2_tied", Case())),
        ("qwen3_5", Case(tp=2, pp=2)),
    ],
    ids=_name,
)
def test_a_saved_folder_is_the_same_model(ranks, folders, tmp_path, family, case):
    import transformers

    target = tmp_path / "saved"
    waits = ranks.call("save", str(folders[family]), case, str(target))
    written, given = (
        load_file(folder / "model.safetensors") for folder in (target, folders[family])
    )
    _same(written, given)
    with HfFolderReader(target) as reader:
        check_folder(reader, read_model_spec(target))
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert model.config.tie_word_embeddings == (family == "qwen2_tied")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    # No rank runs ahead of the one that writes: NCCL would end it after 600 s.
    buckets = waits[0][0]
    assert buckets > 2 and waits == [(buckets, [True] * (buckets + 1))] * 4


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen2_tied", Case(tp=2, pp=2)),
        # With what its routers choose by, and experts of all tokens.
        ("glm4_moe", Case(tp=2, ep=2)),
        ("qwen3_next", Case(tp=2, ep=2)),
    ],
    ids=_name,
)
def test_a_checkpoint_of_any_layout_becomes_a_folder(ranks, folders, tmp_path, family, case):
    source, checkpoint, target = folders[family], tmp_path / "step_000001", tmp_path / "hf"
    ranks.call("save_checkpoint", str(source), case, str(checkpoint))
    saved = read_checkpoint(checkpoint)
    assert saved.layout == {
        "tensor_parallel": 2,
        "pipeline_parallel": case.pp,
        "data_parallel": 2 // case.pp,
        "context_parallel": 1,
        "expert_parallel": case.ep,
        "pipeline_layers": [],
        "virtual_stages": 1,
    }
    counts = ranks.call("convert", "to_hf", str(checkpoint), str(target), str(source))
    assert counts == [len(_read(source))] * 4
    _same(_read(target), _read(source))
    messages = ranks.call("convert", "to_hf", str(checkpoint), str(target), str(folders["qwen2"]))
    assert "has architecture=" in messages[0] or "has tied=True" in messages[0]
    assert "config.json says" in messages[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "phi3"])
def test_a_folder_becomes_a_checkpoint_and_a_folder_again(ranks, folders, tmp_path, family):
    source, checkpoint, target = folders[family], tmp_path / "megatron", tmp_path / "hf"
    arguments = (str(source), str(checkpoint), torch.float32)
    assert ranks.call("convert", "to_megatron", *arguments) == [len(_read(source))] * 4
    assert "has a checkpoint already" in ranks.call("convert", "to_megatron", *arguments)[0]
    ranks.call("convert", "to_hf", str(checkpoint), str(target), str(source))
    _same(_read(target), _read(source))
