"""A teacher that cannot work is refused by name, with the arithmetic, before anything starts."""

import dataclasses
import json
import shutil

import pytest
from config_cases import CPU_MACHINE, QWEN_7B

from rlmath.checks.files import memory
from rlmath.checks.teacher import teacher_problems, vocabulary_in
from rlmath.commands.plan.gpus import GPUS
from rlmath.commands.plan.teacher import describe_teacher, teacher_bytes, teacher_fits
from rlmath.config.arithmetic import resolve_layout
from rlmath.config.load import load
from rlmath.config.schema import Device
from rlmath.errors import ConfigError, UserError
from rlmath.model.spec import model_spec, read_model_spec
from rlmath.model.tiny import make_tiny_model

TINY_SPEC = read_model_spec("tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1)


def settings(folder, *overrides):
    path = [] if folder is None else [f"teacher.path={folder}"]
    given = ["experiment=quickstart", "model.path=tiny", "algorithm.distill_coef=1"]
    return [*given, *path, *overrides]


def problems(folder, *overrides):
    return list(teacher_problems(load(settings(folder, *overrides)), Device.cpu))


def test_a_whole_folder_passes_and_its_vocabulary_may_be_padded(folder):
    assert problems(folder) == problems(folder, "algorithm.advantage=teacher") == []
    assert vocabulary_in("tiny") == vocabulary_in(str(folder))
    assert vocabulary_in("tiny")[256] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.temperature=0.6"], ["rollout.temperature=0.6", "temperature 1"]),
        (
            ["algorithm.advantage=teacher", "algorithm.whiten_tokens=true"],
            ["whiten_tokens=true", "nothing to whiten"],
        ),
        (
            ["rollout.max_response_tokens=4096", "teacher.cpu_kv_cache_gib=9"],
            ["64 prompt + 4096 response + 1 token", "= 4161 tokens", "max_response_tokens="],
        ),
        (["teacher.cpu_kv_cache_gib=1e-4"], ["teacher.cpu_kv_cache_gib=0.0001", "129 tokens"]),
        (["teacher.tensor_parallel=3"], ["teacher.tensor_parallel=3", "works:"]),
        (["teacher.url=host:8000"], ["teacher.url=host:8000", "http://host:8000/v1"]),
        (
            ["teacher.url=http://h/v1", "teacher.engines=2"],
            ["teacher.engines=2", "on a server", "leave it at 1"],
        ),
    ],
)
def test_settings_are_refused_by_name(folder, overrides, parts):
    (found,) = problems(folder, *overrides)
    for part in parts:
        assert part in found


def test_no_teacher_and_no_folder(tmp_path):
    assert "give its folder as teacher.path" in problems(None)[0]
    (found,) = problems(tmp_path / "none")
    assert f"teacher.path={tmp_path / 'none'}: no such folder" in found
    assert "hf download Qwen/Qwen3-8B" in problems("Qwen/Qwen3-8B")[0]
    (found,) = problems(tmp_path)
    assert "config.json" in found
    config = load(["experiment=quickstart", "model.path=tiny", "algorithm.advantage=teacher"])
    assert "algorithm.distill_coef=0" in next(teacher_problems(config, Device.cpu))


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    file = other / "tokenizer.json"
    made = json.loads(file.read_text())
    vocab, added = made["model"]["vocab"], made["added_tokens"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    file.write_text(json.dumps(made))
    (found,) = problems(other)
    assert "token 0 is '!' in model.path=tiny, and '\"' in the teacher" in found
    assert "(2 of 261 differ)" in found
    # More tokens than the policy has are fine, fewer are not.
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    more = [*added, {"id": 300, "content": "<|new|>"}]
    file.write_text(json.dumps(made | {"added_tokens": more}))
    assert problems(other, "teacher.url=http://h/v1") == []
    last = max(vocab.values())
    made["model"]["vocab"] = {token: i for token, i in vocab.items() if i != last}
    file.write_text(json.dumps(made | {"added_tokens": [a for a in added if a["id"] != last]}))
    (found,) = problems(other)
    assert f"token {last} is '<|assistant|>'" in found and "no token in the teacher" in found


def test_a_list_of_pieces_is_a_vocabulary_too(tmp_path):
    pieces = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.5]]}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(pieces))
    assert vocabulary_in(str(tmp_path)) == {0: "<unk>", 1: "a"}
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        vocabulary_in(str(tmp_path))


def test_teacher_memory_is_counted(folder):
    """On CPU within the machine's; on GPUs by its terms, of which vLLM does not reckon with one."""
    small = dataclasses.replace(CPU_MACHINE, memory_bytes=2**30)
    config = load(settings(folder, "teacher.cpu_kv_cache_gib=3", "teacher.engines=2"))
    (found,) = memory(config, TINY_SPEC, resolve_layout(config, Device.cpu), small, "train")
    assert "2 x teacher.cpu_kv_cache_gib 3" in found and "2 engine(s) of the teacher x 4" in found
    given = ["cluster=gpu8", "rollout.max_response_tokens=8192", "model.dtype=bfloat16"]
    spec = model_spec(QWEN_7B)
    terms = teacher_bytes(load(settings(folder, *given, "teacher.tensor_parallel=2")), spec)
    sequence = 64 + 8192 + 1
    assert terms["cache of one sequence"] == sequence * 2 * 28 * 2 * 128 * 2
    assert terms["logits"] == 4096 * 152064 * (2 + 4 + 4)
    assert terms["weights"] == pytest.approx(spec.num_parameters, rel=0.01)
    config = load(settings(folder, *given))
    assert "logits" in describe_teacher(config)[0] and "h100" in describe_teacher(config)[0]
    wide = load(settings(folder, *given, "teacher.max_batched_tokens=16384"))
    for one, fits in ((config, True), (wide, False)):
        assert teacher_fits(one, teacher_bytes(one, spec), GPUS["h100"]) == fits
    assert describe_teacher(load(settings(folder, "algorithm.distill_coef=0"))) == []


def test_teacher_gpus_are_separate():
    """The teacher has 2 x 2 of 8 GPUs, and a policy at tensor parallel 2 the rest."""
    given = settings("t", "cluster=gpu8", "actor.tensor_parallel=2")
    layout = resolve_layout(
        load([*given, "teacher.engines=2", "teacher.tensor_parallel=2"]), Device.cuda
    )
    assert (layout.teacher_ranks, layout.actor.world_size) == (4, 4)
    alone = load([*given, "algorithm.distill_coef=0"])
    assert resolve_layout(alone, Device.cuda).actor.world_size == 8
    on_server = load([*given, "teacher.url=http://h/v1"])
    assert resolve_layout(on_server, Device.cuda).teacher_ranks == 0
    with pytest.raises(ConfigError, match="8 GPUs - 8 of the teacher = 0 GPUs"):
        resolve_layout(load([*given, "teacher.engines=8"]), Device.cuda)
