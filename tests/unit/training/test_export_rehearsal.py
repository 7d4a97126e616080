"""The export is rehearsed before a run, and checked after it."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmath.config.load import load
from rlmath.errors import UserError, WeightsError
from rlmath.model.tiny import make_tiny_model
from rlmath.training import summary
from rlmath.training.export_rehearsal import rehearse_export
from rlmath.training.summary import ExportError, check_export
from rlmath.validation.convert import folder_fingerprints
from rlmath.weights.hf_files import generation_config
from tests.support.batches import batch_of_lengths


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


def edit(tiny, folder, name, **fields):
    shutil.copytree(tiny, folder)
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **fields}))
    return folder


def test_an_end_of_sequence_in_added_tokens_decoder_alone_is_exported(tiny, tmp_path):
    rehearse_export(tiny)
    token = {"content": "<|the_end|>", "special": True, "normalized": False}
    token |= {"lstrip": False, "rstrip": False, "single_word": False}
    vocabulary = json.loads((tiny / "tokenizer.json").read_text())
    number = max(one["id"] for one in vocabulary["added_tokens"]) + 1
    model = edit(
        tiny,
        tmp_path / "model",
        "tokenizer_config.json",
        eos_token="<|the_end|>",
        added_tokens_decoder={str(number): token},
    )
    rehearse_export(model)
    eos = generation_config(model)["eos_token_id"]
    assert number in (eos if isinstance(eos, list) else [eos])


def test_an_export_that_would_fail_or_differ_is_refused(tiny, tmp_path):
    broken = edit(tiny, tmp_path / "a", "generation_config.json")
    (broken / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="could not export its model at the end"):
        rehearse_export(broken)
    # A folder of templates, which transformers reads, and the export does not copy.
    other = edit(tiny, tmp_path / "b", "tokenizer_config.json", chat_template=None)
    (other / "chat_template.jinja").unlink(missing_ok=True)
    (other / "additional_chat_templates").mkdir()
    (other / "additional_chat_templates" / "default.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match="would differ in chat template"):
        rehearse_export(other)


@pytest.mark.parametrize(
    ("dtype", "noise", "off", "fits"),
    [
        ("bfloat16", 0.0, 0.015, True),
        ("bfloat16", 0.0, 0.07, False),
        ("bfloat16", 0.05, 0.07, True),
        ("bfloat16", 0.05, 0.15, False),
        ("float32", 0.05, 0.07, False),
        # A model that computes no numbers any more raises no limit.
        ("bfloat16", 800.0, 800.0, False),
        ("bfloat16", math.nan, 0.07, False),
    ],
)
def test_log_probs_of_an_export_are_held_to_the_models_rounding_noise(
    monkeypatch, dtype, noise, off, fits
):
    ours = torch.full((6,), -1.0)
    actor = SimpleNamespace(
        log_probs=lambda batch, name="policy", seed=0: (ours + noise * (name == "noise"), ours)
    )
    config = load(["model.path=tiny", "runner.run_dir=r", f"model.dtype={dtype}"])
    monkeypatch.setattr(summary, "hf_log_probs", lambda *_: ours - off)
    monkeypatch.setattr(summary, "read_model_spec", lambda _: SimpleNamespace(experts=0))
    run, batch = SimpleNamespace(config=config, actor=actor), batch_of_lengths([2], [6])
    if fits:
        summary._check_log_probs(run, Path("hf"), batch)
        return
    with pytest.raises(WeightsError, match="over 1 sequences is"):
        summary._check_log_probs(run, Path("hf"), batch)


def test_export_with_exchanged_tensors_is_named_and_not_called_a_model(tmp_path):
    folder = tmp_path / "hf"
    make_tiny_model(folder, seed=0)
    changes = SimpleNamespace(fingerprints=folder_fingerprints(folder))
    run = SimpleNamespace(actor=SimpleNamespace(weights_changes=lambda: [changes]))
    assert check_export(run, folder, None) == {}
    file = folder / "model.safetensors"
    tensors = load_file(file)
    k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
    tensors[k], tensors[v] = tensors[v].clone(), tensors[k].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"k_proj\.weight differs.*v_proj\.weight differs"):
        check_export(run, folder, None)
    assert not folder.exists() and (tmp_path / "hf_rejected" / "config.json").is_file()
