"""The folder that a run writes against the actor's weights."""

from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from rlmath.model.tiny import make_tiny_model
from rlmath.training.summary import ExportError, check_export
from rlmath.validation.convert import folder_fingerprints


def test_export_with_exchanged_tensors_is_named_and_not_called_a_model(tmp_path):
    folder = tmp_path / "hf"
    make_tiny_model(folder, seed=0)
    changes = SimpleNamespace(fingerprints=folder_fingerprints(folder))
    session = SimpleNamespace(actor=SimpleNamespace(weights_changes=lambda: [changes]))
    assert check_export(session, folder, None) == {}
    file = folder / "model.safetensors"
    tensors = load_file(file)
    k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
    tensors[k], tensors[v] = tensors[v].clone(), tensors[k].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"k_proj\.weight differs.*v_proj\.weight differs"):
        check_export(session, folder, None)
    assert not folder.exists() and (tmp_path / "hf_rejected" / "config.json").is_file()
