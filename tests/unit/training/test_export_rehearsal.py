"""The export is rehearsed before a run, and checked after it."""

import json
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from rlmath.errors import UserError
from rlmath.model.tiny import make_tiny_model
from rlmath.training.export_rehearsal import rehearse_export
from rlmath.training.summary import ExportError, check_export
from rlmath.validation.convert import folder_fingerprints
from rlmath.weights.hf_files import generation_config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


def edited(tiny, folder, name, **fields):
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
    model = edited(
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
    broken = edited(tiny, tmp_path / "a", "generation_config.json")
    (broken / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="could not export its model at the end"):
        rehearse_export(broken)
    # A folder of templates, which transformers reads, and the export does not copy.
    other = edited(tiny, tmp_path / "b", "tokenizer_config.json", chat_template=None)
    (other / "chat_template.jinja").unlink(missing_ok=True)
    (other / "additional_chat_templates").mkdir()
    (other / "additional_chat_templates" / "default.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match="would differ in chat template"):
        rehearse_export(other)


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
