"""Trials of ``--check``: prompts with the model's tokenizer, the user's rewards, settings for GPUs
on a machine without any."""

import json
import re

import pytest

from rlmath.checks.machine import Machine
from rlmath.cli import main
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.data.prompts import load_tokenizer
from rlmath.model.tiny import make_tiny_model
from tests.support.program_answers import output_of

pytestmark = pytest.mark.process

LOGIN_NODE = Machine(gpus=0, torch_build="2.13.0+cpu", memory_bytes=2**34, disk_bytes=2**30)
ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "x" * 90, "answer": "3"}]


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: LOGIN_NODE)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        "train",
        "experiment=gsm8k_smoke",
        f"data.train_paths=[{file}]",
        f"runner.run_dir={tmp_path / 'run'}",
        "data.prompt_template='{prompt}'",
        "data.apply_chat_template=false",
        "--check",
    ]


def test_prompts_that_are_too_long_are_counted(base, capsys):
    assert main(base) == 0
    assert "longest of 2 checked prompts: 90 tokens" in capsys.readouterr().out
    assert main([*base, "data.max_prompt_tokens=64", "data.overlong_prompts=filter"]) == 0
    assert "1 of 2 checked prompts have more than 64 tokens" in capsys.readouterr().out
    assert main([*base, "data.max_prompt_tokens=64", "data.overlong_prompts=stop"]) == 2
    assert "set it to 90" in capsys.readouterr().err


def test_check_lists_answer_kinds_and_refuses_data_without_usable_answers(base, tmp_path, capsys):
    rows = [ROWS[0], {"question": "Show it.", "answer": "proof"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(base) == 0
    out = capsys.readouterr().out
    assert "answers  1 numbers, 1 unusable of 2 checked" in out
    assert "warning  1 of 2 checked answers cannot be matched" in out
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[1]) + "\n")
    assert main(base) == 2
    assert "none of 1 problems has an answer" in capsys.readouterr().err


def test_own_rewards_are_called_on_made_up_responses(base, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "def right(completions, answer, **columns):\n"
        "    return [float(a in c) for c, a in zip(completions, answer)]\n"
        "def broken(completions, **columns):\n"
        "    return [columns['gold'] for _ in completions]\n"
        "def wants(completions, hint):\n"
        "    return [0.0 for _ in completions]\n"
    )
    assert main([*base, f"reward.items=[{{name: math}},{{name: {file}:right}}]"]) == 0
    assert (
        "right: 1 for a made-up response with the accepted answer, 0 for one without"
        in capsys.readouterr().out
    )
    assert main([*base, f"reward.items=[{{name: {file}:broken}}]"]) == 2
    err = capsys.readouterr().err
    assert f"{file}:4" in err
    assert "KeyError" in err
    assert "question" in err, "the columns that exist"
    assert main([*base, f"reward.items=[{{name: {file}:wants}}]"]) == 2
    assert "no column for its parameter hint" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("{name: math}, {name: soft_overlong_punishment}", "soft_overlong_punishment"),
        ("{name: math}, {name: remote}", "remote"),
        ("{name: math, weight: 0}", "all weights are 0 (math)"),
        ("{name: math, label: a}, {name: format, label: a}", "two rewards have the label 'a'"),
        ("{name: length, needs_group: false}", "needs_group=false"),
    ],
)
def test_rewards_that_cannot_be_made_are_refused(base, capsys, command, items, expected):
    given = base[1:]
    if command == "evaluate":
        given = [one.replace("train_paths", "eval_paths") for one in given]
    assert main([command, *given]) == 0
    capsys.readouterr()
    assert main([command, *given, f"reward.items=[{items}]"]) == 2
    assert expected in capsys.readouterr().err


def test_own_rewards_are_called_without_the_models_tokenizer(base, tmp_path, capsys):
    """The hub model is not cached; one reward has a weight of 0, and one no problem in reach."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def seen(completions, prompts, completion_ids, **columns):\n"
        "    assert all('1+1?' in str(p) for p in prompts) and all(completion_ids)\n"
        "    return [float(len(completions)) for _ in completions]\n"
        "def broken(completions, **columns):\n"
        "    return [columns['gold'] for _ in completions]\n"
    )
    hub = [*base, *GPU_RUN, *LONG, "model.dtype=bfloat16"]
    items = f"reward.items=[{{name: math}},{{name: {file}:seen, weight: 0}}]"
    assert main([*hub, items]) == 0
    out = capsys.readouterr().out
    assert "prompts  not checked: Qwen/Qwen3-8B and its tokenizer are still on the hub" in out
    assert "tried with the tokens of another tokenizer" in out
    assert "seen: 2 for a made-up response" in out
    assert main([*hub, f"reward.items=[{{name: {file}:broken}}]"]) == 2
    assert "KeyError" in capsys.readouterr().err
    assert main([*hub, "reward.items=[{name: soft_overlong_punishment}]"]) == 2
    capsys.readouterr()
    assert main([*hub, items, "data.train_paths=[hub:openai/gsm8k]"]) == 0
    assert "seen: not tried" in capsys.readouterr().out


GPU_RUN = ["cluster=gpu8", "model.path=Qwen/Qwen3-8B", "actor.tensor_parallel=4"]
LONG = ["algorithm.prompts_per_step=512", "rollout.gpu_memory_utilization=0.6"]


def test_settings_for_gpus_are_checked_without_them(base, capsys):
    gpu = [*base, *GPU_RUN, *LONG, "model.dtype=bfloat16"]
    gpu += ["rollout.max_response_tokens=8192", "actor.max_tokens_per_microbatch=16384"]
    assert main(gpu) == 0
    out = capsys.readouterr().out
    assert "Qwen/Qwen3-8B: Qwen3ForCausalLM, 8.19 billion parameters" in out
    assert "8 ranks on 8 GPUs, colocated: tensor 4 x pipeline 1 x data 2" in out
    assert "fits a100-80, " in out
    largest = re.search(r"largest micro-batches that fit an h100 so.*: ([\d,]+) .*, ([\d,]+) ", out)
    update, forward = (int(one.replace(",", "")) for one in largest.groups()) if largest else (0, 0)
    assert forward > update > 16384
    tokens = "actor.max_tokens_per_microbatch"
    assert main([*gpu, f"{tokens}={update + 1024}"]) == 0
    assert "an H100 is too small" in capsys.readouterr().out
    assert main([*gpu, f"{tokens}=8192", "actor.max_tokens_per_forward=8191"]) == 2
    assert "actor.max_tokens_per_forward=8191" in capsys.readouterr().err
    assert "this machine has no GPU" in out
    assert "Qwen/Qwen3-8B will be downloaded" in out
    assert "an H100 is too small" not in out
    assert main([*gpu, "model.dtype=float32"]) == 0
    out = capsys.readouterr().out
    assert "memory   not planned" in out and "model.dtype=float32" in out and "fits" not in out
    # A plan that does not fit says so; what does not divide is an error as anywhere.
    assert main([*gpu, "actor.max_tokens_per_microbatch=65536", "actor.logits=whole"]) == 0
    assert "an H100 is too small: logits" in capsys.readouterr().out
    assert main([*gpu, "actor.max_tokens_per_microbatch=524288", "actor.logits=whole"]) == 2
    assert "fit no known GPU; on the largest, " in capsys.readouterr().err
    # Engines on separate GPUs keep their KV cache while they receive weights.
    separate = [*gpu, "cluster.placement=separate", "rollout.engines=4"]
    for share, fits in (("0.85", True), ("0.92", False)):
        assert main([*separate, f"rollout.gpu_memory_utilization={share}"]) == 0
        said = f"gpu_memory_utilization={share} a weight sync takes 5.6 GiB of an engine's GPU"
        assert (said in capsys.readouterr().out) == (not fits)
    assert main([*gpu, "actor.tensor_parallel=3"]) == 2
    assert "actor.tensor_parallel=3" in capsys.readouterr().err


def test_a_run_for_gpus_does_not_start_without_them(base, capsys):
    assert main([*base[:-1], *GPU_RUN]) == 2
    assert "cluster.device=cuda" in capsys.readouterr().err


def test_the_light_tokenizer_is_the_models(tmp_path):
    """Text with accents, markers and other scripts, and chats, as transformers has them."""
    texts = ["1+1?", "é e\u0301 中文 \U0001f600", "<|user|>hi<|assistant|>", " a\n\n b"]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    theirs = load_tokenizer(make_tiny_model(tmp_path / "model"))
    for light in (LightTokenizer(tmp_path / "model"), LightTokenizer("tiny")):
        assert light(texts).input_ids == theirs(texts).input_ids
        assert light(texts[0]).input_ids == theirs(texts[0]).input_ids
        assert light.apply_chat_template(
            chat, add_generation_prompt=True
        ) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_chat_templates_are_rendered_as_transformers_does(tmp_path):
    """Blocks that strip whitespace, a default of several templates, special tokens, tojson."""
    folder = make_tiny_model(tmp_path / "model")
    template = (
        "{% generation %}{{ bos_token }}{% endgeneration %}{%- for m in messages %}\n"
        "    {% if loop.first %}[{{ m | tojson }}]\n"
        "    {% else %}{% break %}\n    {% endif %}\n{%- endfor %}\n"
        "{% if add_generation_prompt %}>{{ eos_token }}{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["bos_token"] = "<|system|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = [{"role": "user", "content": "é < 2"}, {"role": "user", "content": "b"}]
    light, theirs = LightTokenizer(folder), load_tokenizer(folder)
    assert light.apply_chat_template(chat, add_generation_prompt=True) == (
        theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    )


def test_the_check_imports_neither_torch_nor_transformers(base):
    code = (
        "import sys\nfrom rlmath.cli import main\n"
        f"assert main({base!r}) == 0\n"
        "heavy = ('torch', 'transformers', 'ray', 'vllm', 'sympy')\n"
        "print([m for m in heavy if m in sys.modules])\n"
    )
    assert output_of(code).splitlines()[-1] == "[]"
