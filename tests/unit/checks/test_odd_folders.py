"""Folders that cannot be trained, through the console command: one message, no traceback, and the
cause by name."""

import dataclasses
import functools
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlmath.checks import weight_values
from rlmath.checks.files import model_folder
from rlmath.checks.overwritten import overwritten_inputs
from rlmath.cli import main
from rlmath.config.load import load
from rlmath.model.spec import model_spec
from rlmath.model.tiny_tokenizer import VOCABULARY_SIZE, fast_tokenizer
from rlmath.weights.pieces import hf_shapes
from tests.support.case_files import read_cases

# Too slow to run after each change.
pytestmark = pytest.mark.process

SIZES = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 64,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY_SIZE,
}
ADAPTER = "a LoRA adapter of Qwen/Qwen3-8B, not a model: merge it with peft"


def write(folder, sizes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    fast_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    shapes = hf_shapes(model_spec(SIZES))
    save_file({n: torch.zeros(s) for n, s in shapes.items()}, folder / "model.safetensors")


def replace_file(folder, name, content):
    """Another text of a file, or other fields of ``config.json``."""
    text = content if isinstance(content, str) else json.dumps(SIZES | content)
    (folder / name).write_text(text)


def index(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


def untie(folder):
    shapes = hf_shapes(model_spec(SIZES))
    tensors = {name: torch.zeros(size) for name, size in shapes.items()}
    tensors["lm_head.weight"] = torch.ones(VOCABULARY_SIZE, 128)
    save_file(tensors, folder / "model.safetensors")


def two_sources(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "other.safetensors"}})
    )


def adapter(folder):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')


def adapter_beside(folder, *, weights=True, damaged=False):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    held = folder / "adapter_model.safetensors"
    save_file({"base_model.model.a.lora_A.weight": torch.zeros(8, 8)}, held)
    if damaged:
        held.write_bytes(held.read_bytes()[:-5])
    if not weights:
        (folder / "model.safetensors").unlink()


def dangling(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "nowhere")


def not_a_number(folder, dtype=torch.float32, value=math.nan):
    shapes = hf_shapes(model_spec(SIZES))
    tensors = {name: torch.zeros(size, dtype=dtype) for name, size in shapes.items()}
    tensors["model.layers.1.mlp.down_proj.weight"].view(-1)[-1] = value
    # Neither is the largest number one, nor counts what is not read.
    tensors["model.norm.weight"][3] = torch.finfo(dtype).max
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.tensor([math.nan])
    save_file(tensors, folder / "model.safetensors")


def twice(folder):
    """A tensor in both files, of which the index names the first."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    tensor = torch.ones(128)
    save_file({"model.norm.weight": tensor, "extra": tensor.clone()}, folder / "b.safetensors")
    names = hf_shapes(model_spec(SIZES))
    where = dict.fromkeys(names, "a.safetensors") | {"extra": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


CASES = {
    "tied with another output layer": (untie, "lm_head.weight in the files differs"),
    "one file beside an index": (two_sources, "has both model.safetensors and"),
    **{
        f"an index that is {text}": (functools.partial(index, text=text), words)
        for text, words in (
            ("{", "with weight_map, the file of each tensor"),
            ("{}", "with weight_map, the file of each tensor"),
            ("[]", "with weight_map, the file of each tensor"),
            ('{"weight_map": {"a": 3}}', "model.safetensors.index.json"),
        )
    },
    "NaN in a weight": (
        not_a_number,
        "model.layers.1.mlp.down_proj.weight in model.safetensors holds NaN or infinity",
    ),
    "a link to nothing": (dangling, "nowhere, where no file is"),
    "a tensor in two files": (twice, "model.norm.weight is in a.safetensors and b.safetensors"),
    "a LoRA adapter": (adapter, ADAPTER),
    "a LoRA adapter with a config.json": (
        lambda f: adapter_beside(f, weights=False),
        ADAPTER,
    ),
    "a damaged LoRA adapter with a config.json": (
        lambda f: adapter_beside(f, weights=False, damaged=True),
        ADAPTER,
    ),
    "a LoRA adapter beside a model": (
        adapter_beside,
        "adapter_config.json is beside the model's own weights: transformers would apply",
    ),
    "a chat template that is no text": (
        lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"),
        "chat_template.jinja cannot be read: 'utf-8'",
    ),
    **{
        name: (functools.partial(replace_file, name=file, content=content), words)
        for name, file, content, words in read_cases(__file__, "odd_files")
    },
}


@pytest.fixture
def check(tmp_path, capsys):
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "1 + 1?", "solutions": ["\\boxed{2}"]}) + "\n")

    def run(*settings, code=2):
        given = ["cluster.device=cpu", f"data.train_paths=[{data}]", *settings]
        assert main(["train", *given, f"runner.run_dir={tmp_path / 'run'}", "--check"]) == code
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_trained(check, tmp_path, case):
    damage, words = CASES[case]
    write(tmp_path / "model", SIZES)
    damage(tmp_path / "model")
    message = check(f"model.path={tmp_path / 'model'}")
    assert words in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *itertools.product((torch.float64, torch.float16, torch.bfloat16), (math.nan, 1.0)),
        *itertools.product([torch.float32], (math.nan, math.inf, -math.inf, 1.0)),
    ],
    ids=str,
)
def test_nan_and_infinity_of_each_type(check, tmp_path, monkeypatch, dtype, value):
    write(tmp_path / "model", SIZES)
    # The last element is in a block that is not full.
    monkeypatch.setattr(weight_values, "_BLOCK_BYTES", 1000)
    not_a_number(tmp_path / "model", dtype, value)
    fine = value == 1.0
    settings = f"model.path={tmp_path / 'model'}", "rollout.max_response_tokens=64"
    message = check(*settings, code=0 if fine else 2)
    assert ("model.layers.1.mlp.down_proj.weight in model.safetensors" in message) is not fine


def test_values_of_large_models_are_left_to_the_ranks(check, tmp_path, monkeypatch):
    write(tmp_path / "model", SIZES)
    not_a_number(tmp_path / "model")
    monkeypatch.setattr(weight_values, "LIMIT_BYTES", 1000)
    check(f"model.path={tmp_path / 'model'}", "rollout.max_response_tokens=64", code=0)


@pytest.mark.parametrize("tool", ["convert", "validate"])
@pytest.mark.parametrize(
    "case", ["NaN in a weight", "an index that is []", "a Git LFS pointer", "another family"]
)
def test_the_tools_say_the_same(tmp_path, monkeypatch, capsys, case, tool):
    damage, words = CASES[case]
    write(tmp_path / "model", SIZES)
    damage(tmp_path / "model")
    model = str(tmp_path / "model")
    arguments = [model] if tool == "validate" else ["to-megatron", model, model + "-new"]
    # torch takes seconds to import.
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([tool, *arguments]) == 2
    assert words in capsys.readouterr().err


USER = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
ALONE = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + USER
BRIEF = "You are brief."


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in %}", "fails for a plain message of the user: Expected an expression"),
        ("{{ messages[0]['content'] + 1 }}", "fails for a plain message of the user: can only"),
        ("{{ 1 / 0 }}", "fails for a plain message of the user: division by zero"),
        ("hello", "leaves out the user's message: every prompt would be 'hello'"),
        (USER, "data.system_prompt: the chat template in "),
        (USER, "leaves out system messages; write it into data.prompt_template"),
        (ALONE, "refuses a system message (no); write it into data.prompt_template"),
        ("{{ messages }}", None),
        # It has the same words by default.
        (BRIEF + USER, None),
    ],
)
def test_chat_templates_that_drop_messages_are_refused(check, tmp_path, template, words):
    write(tmp_path / "model", SIZES)
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    settings = ["data.apply_chat_template=true", "rollout.max_response_tokens=64"]
    message = check(
        f"model.path={tmp_path / 'model'}",
        f"data.system_prompt='{BRIEF}'",
        *settings,
        code=0 if words is None else 2,
    )
    if words is not None:
        assert words in message and str(tmp_path / "model") in message
        assert "Traceback" not in message and message.count("\n") == 1


@pytest.mark.parametrize("name", ["a b", "a{b}", "a,b", "a=b", "a(b)", "ä", "{name}"])
def test_paths_with_characters_of_the_overrides_language(check, tmp_path, name):
    folder = tmp_path / name
    write(folder, SIZES)
    tokens = "rollout.max_response_tokens=64"
    check(f'model.path="{folder}"', tokens, code=0)
    check(f"model.path={folder}", tokens, code=0)


@pytest.mark.parametrize("name", ["model [v1]", "a*", "b?"])
def test_a_folder_that_vllm_takes_for_a_pattern_is_refused(check, tmp_path, name):
    folder = tmp_path / name
    write(folder, SIZES)
    message = check(f"model.path={folder}", "rollout.max_response_tokens=64")
    assert f"model.path={folder}: vLLM finds no file below" in message
    (cure,) = re.findall(r"ln -s .*", message)
    link = shlex.split(cure)[-1]
    subprocess.run(shlex.split(cure), check=True)
    check(f"model.path={link}", "rollout.max_response_tokens=64", code=0)
    (message,) = model_folder(load(["model.path=tiny", f"runner.run_dir={folder}"]))
    assert f"runner.run_dir={folder}: vLLM finds no file below" in message


@pytest.mark.parametrize(
    "setting",
    [
        "model.path=models/{name}",
        "model.path=models/<name>",
        'model.path="models/{name}"',
        "runner.run_dir=runs/{name}",
        "data.train_paths=[data/{name}.jsonl]",
    ],
)
def test_braces_that_were_not_filled_in(check, setting):
    message = check(setting)
    assert "name} was not filled in" in message or "name> was not filled in" in message
    assert message.count("\n") == 1


REFERENCES = [
    ("model.path={}/model", "${b}"),
    ("model.path='{}/model'", "${b}"),
    ("runner.run_dir={}/run", "${b}"),
    ("data.train_paths=[{}/train.jsonl]", "${b}"),
    ("model.path={}/model", r"\${b}"),
    ("model.path={}/model", "${b"),
    ("model.path={}/model", "${}"),
]


@pytest.mark.parametrize(("setting", "name"), REFERENCES)
def test_a_path_with_a_dollar_and_a_brace_is_refused(check, tmp_path, setting, name):
    """OmegaConf reads it as a reference to another setting, in saved settings as well."""
    given = setting.format(tmp_path / f"a{name}")
    (tmp_path / "a${b}").mkdir()
    write(tmp_path / "a${b}" / "model", SIZES)
    message = check(given)
    assert f"{given}: " in message and "refers to no setting" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("kind", ["layout", "weights"])
def test_a_plan_refuses_it_as_well(capsys, kind):
    assert main(["plan", kind, "model.path=/a${b}/model"]) == 2
    message = capsys.readouterr().err
    assert "model.path=/a${b}/model: ${b} refers to no setting" in message
    assert message.count("\n") == 1


def test_one_that_a_settings_file_has_is_named(check, tmp_path):
    """Escaped as OmegaConf has it, it would work until the saved settings are read."""
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True)
    text = "# @package _global_\nmodel:\n  path: a\\${b}\n"
    (own / "mine.yaml").write_text(text)
    message = check("experiment=mine", "--config-dir", str(tmp_path / "conf"))
    assert "model.path=a${b}: a value cannot contain ${" in message
    assert message.count("\n") == 1


def test_references_to_settings_work(check, tmp_path):
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "model", SIZES)
    tokens = "rollout.max_response_tokens=64"
    check(tokens, "model.path=${runner.run_dir}/model", code=0)
    check(tokens, f"model.path={tmp_path}/run/${{oc.env:NOT_THERE,model}}", code=0)


def settings(**changes):
    config = load(["experiment=quickstart"])
    for section, fields in changes.items():
        part = dataclasses.replace(getattr(config, section), **fields)
        config = dataclasses.replace(config, **{section: part})
    return config


@pytest.mark.parametrize(
    ("command", "key", "path"),
    [
        ("sft", "model.path", "r/sft"),
        ("train", "model.path", "r/hf"),
        ("train", "model.path", "linked/hf"),
        ("train", "teacher.path", "r/hf/teacher"),
        ("train", "data.train_paths[0]", "r/samples/step_1.jsonl"),
        ("evaluate", "model.path", "r/evaluation/model"),
    ],
)
def test_an_input_in_a_folder_that_is_replaced_is_named(command, key, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r").mkdir()
    Path("linked").symlink_to("r")
    section, _, name = key.partition("[")[0].partition(".")
    value = [path] if "[" in key else path
    sections = {"runner": {"run_dir": "r"}, section: {name: value}}
    if command == "evaluate":
        sections["eval"] = {"checkpoint": "r/checkpoints/step_000001"}
    found = list(overwritten_inputs(settings(**sections), command))
    assert len(found) == 1 and f"{key}={path}" in found[0] and "runner.run_dir" in found[0]
    sections["runner"] = {"run_dir": "other"}
    assert not list(overwritten_inputs(settings(**sections), command))


def test_files_of_other_commands_in_the_run_folder_are_inputs():
    for command, path in (("train", "r/sft"), ("train", "r/model"), ("evaluate", "r/hf")):
        config = settings(runner={"run_dir": "r"}, model={"path": path})
        assert not list(overwritten_inputs(config, command))
